#include "context/pulse.h"

#include <algorithm>
#include <utility>

#include "context/peer_threads.h"

namespace async_emb::context {
namespace {

using Clock = std::chrono::steady_clock;

// Between beats while somebody leaves.
constexpr std::chrono::milliseconds kShortPause{1};

}  // namespace

Pulse::Pulse(std::shared_ptr<comm::Transport> transport, double timeout_seconds, Reached reached)
    : transport_(std::move(transport)),
      timeout_seconds_(timeout_seconds),
      pause_(PeerThreads::pause_of(timeout_seconds)),
      reached_(std::move(reached)),
      thread_([this] { run(); }) {}

Pulse::~Pulse() { stop(); }

void Pulse::put(comm::Channel channel, std::int64_t step) {
  std::lock_guard lock(mutex_);
  const auto c = static_cast<std::size_t>(channel);
  Count& count = mine_.counts[c];
  if (count.finished == count.put) progress_[c].since = Clock::now();
  progress_[c].step = step;
  ++count.put;
}

std::optional<Pulse::Fault> Pulse::fault() const {
  std::lock_guard lock(mutex_);
  return fault_;
}

void Pulse::leave() {
  std::unique_lock lock(mutex_);
  mine_.leaving = 1;
  changed_.notify_all();
  changed_.wait_for(lock, std::chrono::duration<double>(std::min(timeout_seconds_, 1e8)), [&] { return stopped_; });
}

void Pulse::end() noexcept {
  {
    std::lock_guard lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
  transport_->end();
}

void Pulse::stop() noexcept {
  end();
  if (thread_.joinable()) thread_.join();
}

void Pulse::run() {
  const auto size = static_cast<std::size_t>(transport_->size());
  const auto self = static_cast<std::size_t>(transport_->self());
  const auto timeout = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(std::min(timeout_seconds_, 1e8)));
  std::vector<Beat> beats(size);
  std::vector<comm::Block> sent(size);
  std::vector<comm::Inbox> received(size);
  for (std::size_t process = 0; process < size; ++process) {
    sent[process] = {&beats[self], sizeof(Beat)};
    received[process] = {&beats[process], sizeof(Beat)};
  }
  std::unique_lock lock(mutex_);
  while (!ended_) {
    lock.unlock();
    beats[self] = look();
    std::optional<comm::TransportError> error;
    try {
      transport_->exchange(sent, received, timeout);
    } catch (const comm::TransportError& caught) {
      error = caught;
    }
    lock.lock();
    if (error) {
      if (!ended_) fault_ = Fault{.error = std::move(error)};
      break;
    }
    if (is_over(beats)) break;
    look_for_late(beats);
    const bool leaving = std::any_of(beats.begin(), beats.end(), [](const Beat& beat) { return beat.leaving != 0; });
    if (leaving) {
      changed_.wait_for(lock, kShortPause, [&] { return ended_; });
    } else {
      changed_.wait_for(lock, pause_, [&] { return ended_ || mine_.leaving != 0; });
    }
  }
  stopped_ = true;
  changed_.notify_all();
}

// What was put before the question is what the answer is about; more may be put meanwhile.
Pulse::Beat Pulse::look() {
  Beat before;
  {
    std::lock_guard lock(mutex_);
    before = mine_;
  }
  std::array<bool, comm::kChannels> ready{};
  std::array<bool, comm::kChannels> finished{};
  for (std::size_t c = 0; c < comm::kChannels; ++c) {
    const Count& count = before.counts[c];
    const auto channel = static_cast<comm::Channel>(c);
    ready[c] = count.ready == count.put || reached_(channel, Mark::kReady);
    finished[c] = count.finished == count.put || reached_(channel, Mark::kFinished);
  }
  std::lock_guard lock(mutex_);
  for (std::size_t c = 0; c < comm::kChannels; ++c) {
    if (ready[c]) mine_.counts[c].ready = before.counts[c].put;
    if (!finished[c] || before.counts[c].finished == before.counts[c].put) continue;
    mine_.counts[c].finished = before.counts[c].put;
    progress_[c].since = Clock::now();
  }
  return mine_;
}

// The same question about the same beats, and so the same answer, in every process.
bool Pulse::is_over(const std::vector<Beat>& beats) const {
  const auto& first = beats.front().counts;
  bool leaving = false;
  bool at_rest = true;
  for (const Beat& beat : beats) {
    leaving = leaving || beat.leaving != 0;
    for (std::size_t c = 0; c < comm::kChannels; ++c) {
      at_rest = at_rest && beat.counts[c].put == first[c].put && beat.counts[c].finished == first[c].put;
    }
  }
  return leaving && at_rest;
}

void Pulse::look_for_late(const std::vector<Beat>& beats) {
  if (fault_) return;
  for (std::size_t c = 0; c < comm::kChannels; ++c) {
    const Count& mine = mine_.counts[c];
    if (mine.finished == mine.put) continue;
    if (std::chrono::duration<double>(Clock::now() - progress_[c].since).count() <= timeout_seconds_) continue;
    Fault fault{.channel = static_cast<comm::Channel>(c), .step = progress_[c].step};
    for (std::size_t process = 0; process < beats.size(); ++process) {
      if (beats[process].counts[c].ready < mine.put) fault.late.push_back(static_cast<int>(process));
    }
    fault_ = std::move(fault);
    return;
  }
}

}  // namespace async_emb::context
