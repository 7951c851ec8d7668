#include "comm/c10d/process_group.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <sstream>

namespace async_emb::comm {
namespace {

using Clock = std::chrono::steady_clock;

// A wait of Gloo's that times out closes every connection of this process, and its peers would take it for dead before
// it could tell them whom it misses. So no wait of ours ever reaches its own timeout: it is woken, which harms nothing.
constexpr std::chrono::milliseconds kNever = std::chrono::hours(24 * 365);
// How late a deadline, or a peer that is lost while another is awaited, may be noticed.
constexpr std::chrono::milliseconds kTick{50};
constexpr std::chrono::milliseconds kShortTick{1};

at::Tensor bytes_at(void* data, std::int64_t bytes) { return at::from_blob(data, {bytes}, at::kByte); }

// The first sentence of an exception of torch's, without the place in its sources.
std::string what_happened(const std::exception& error) {
  std::string what = error.what();
  if (what.starts_with('[')) what.erase(0, std::min(what.find("] "), what.size() - 2) + 2);
  return what.substr(0, std::min(what.find('\n'), what.find(". ")));
}

std::string list(const std::vector<int>& peers) {
  std::ostringstream text;
  text << (peers.size() == 1 ? "peer " : "peers ");
  for (std::size_t i = 0; i < peers.size(); ++i) text << (i == 0 ? "" : ", ") << peers[i];
  return text.str();
}

void add(std::vector<int>& peers, int peer) {
  if (std::find(peers.begin(), peers.end(), peer) == peers.end()) peers.push_back(peer);
}

}  // namespace

ProcessGroupTransport::ProcessGroupTransport(c10::intrusive_ptr<::c10d::Backend> backend,
                                             c10::intrusive_ptr<::c10d::Store> store)
    : size_(backend->getSize()),
      self_(backend->getRank()),
      announcements_(std::move(store)),
      backend_(std::move(backend)),
      wake_every_(kTick),
      waker_([this] { wake_regularly(); }) {}

ProcessGroupTransport::~ProcessGroupTransport() {
  end();
  waker_.join();
}

void ProcessGroupTransport::exchange(std::span<const Block> sent, std::span<const Inbox> received,
                                     std::chrono::nanoseconds timeout) {
  if (static_cast<int>(sent.size()) != size_ || static_cast<int>(received.size()) != size_) {
    throw std::invalid_argument("an exchange between " + std::to_string(size_) +
                                " processes needs as many blocks, got " + std::to_string(sent.size()) +
                                " to send and " + std::to_string(received.size()) + " to receive");
  }
  ++exchanges_;
  c10::intrusive_ptr<::c10d::Backend> backend;
  {
    std::lock_guard lock(mutex_);
    if (ended_) throw TransportError(TransportError::Kind::kEnded, {}, exchange_name() + ": the transport was ended");
    if (failed_) throw *failed_;
    backend = backend_;
  }

  try {
    std::vector<Operation> pending = post(*backend, sent, received);
    wait_for_all(pending, timeout);
  } catch (const TransportError& error) {
    // The operations are gone, and with them every use of the buffers.
    failed_ = error;
    throw;
  }
}

// Receives first: then no peer's block finds nowhere to go.
std::vector<ProcessGroupTransport::Operation> ProcessGroupTransport::post(::c10d::Backend& backend,
                                                                          std::span<const Block> sent,
                                                                          std::span<const Inbox> received) {
  // A tag of its own for every exchange, and for every size of a block: what was meant for another one can never arrive
  // in this one. A process that is at another point of the program than its peers sends what nobody awaits, and is
  // late.
  const auto tag_of = [&](std::int64_t bytes) {
    return static_cast<int>((exchanges_ & 0x7fff) << 16 | ((bytes ^ bytes >> 16 ^ bytes >> 32) & 0xffff));
  };
  std::vector<Operation> pending;
  std::vector<int> lost;
  const auto start = [&](int peer, void* data, std::int64_t bytes, auto&& operation) {
    if (peer == self_ || bytes == 0) return;
    std::vector<at::Tensor> tensors{bytes_at(data, bytes)};
    try {
      pending.push_back({peer, operation(tensors, peer)});
    } catch (const std::exception& error) {
      if (lost.empty()) broken_because_ = what_happened(error);
      add(lost, peer);
    }
  };
  for (int peer = 0; peer < size_; ++peer) {
    start(peer, received[peer].data, received[peer].bytes, [&](std::vector<at::Tensor>& tensors, int from) {
      return backend.recv(tensors, from, tag_of(tensors[0].numel()));
    });
  }
  for (int peer = 0; peer < size_; ++peer) {
    start(peer, const_cast<void*>(sent[peer].data), sent[peer].bytes, [&](std::vector<at::Tensor>& tensors, int to) {
      return backend.send(tensors, to, tag_of(tensors[0].numel()));
    });
  }
  if (!lost.empty()) {
    throw TransportError(TransportError::Kind::kLost, lost,
                         exchange_name() + ": the connection to " + list(lost) + " broke: " + broken_because_);
  }
  return pending;
}

void ProcessGroupTransport::wait_for_all(std::vector<Operation>& pending, std::chrono::nanoseconds timeout) {
  const auto start = Clock::now();
  // Not start + timeout, which could overflow.
  const auto is_over = [&] { return Clock::now() - start >= timeout; };

  while (!pending.empty()) {
    const Outcome outcome = wait_for(pending.back(), false);
    if (outcome == Outcome::kDone) {
      pending.pop_back();
      continue;
    }
    {
      std::lock_guard lock(mutex_);
      if (ended_) throw TransportError(TransportError::Kind::kEnded, {}, exchange_name() + ": the transport was ended");
    }
    // Somebody who is late must not hide that somebody else is lost.
    std::vector<int> lost;
    for (const Operation& operation : pending) {
      if (wait_for(operation, true) == Outcome::kBroken) add(lost, operation.peer);
    }
    if (!lost.empty()) {
      std::sort(lost.begin(), lost.end());
      throw TransportError(TransportError::Kind::kLost, lost,
                           exchange_name() + ": the connection to " + list(lost) + " broke: " + broken_because_);
    }
    if (!is_over()) continue;

    set_tick(kShortTick);
    std::vector<int> late;
    for (const Operation& operation : pending) {
      // Twice, because a call of the waker's may be left over from before.
      if (wait_for(operation, false) == Outcome::kDone || wait_for(operation, false) == Outcome::kDone) continue;
      add(late, operation.peer);
    }
    set_tick(kTick);
    if (late.empty()) return;
    std::sort(late.begin(), late.end());
    std::ostringstream what;
    what << exchange_name() << ": no answer from " << list(late) << " within "
         << std::chrono::duration<double>(timeout).count() << " s";
    throw TransportError(TransportError::Kind::kTimeout, late, what.str());
  }
}

// Waits until the operation is over or the waker comes by. `only_look` says kBroken or kNotYet, at once.
ProcessGroupTransport::Outcome ProcessGroupTransport::wait_for(const Operation& operation, bool only_look) {
  {
    std::lock_guard lock(mutex_);
    // The wait that follows returns false, once, but throws where the connection broke.
    if (only_look || ended_) operation.work->abort();
    waiting_ = operation.work.get();
  }
  Outcome outcome;
  try {
    outcome = operation.work->wait(kNever) ? Outcome::kDone : Outcome::kNotYet;
  } catch (const std::exception& error) {
    broken_because_ = what_happened(error);
    outcome = Outcome::kBroken;
  }
  std::lock_guard lock(mutex_);
  waiting_ = nullptr;
  return outcome;
}

void ProcessGroupTransport::wake_regularly() {
  std::unique_lock lock(mutex_);
  while (!ended_) {
    changed_.wait_for(lock, wake_every_);
    if (waiting_) waiting_->abort();
  }
}

void ProcessGroupTransport::set_tick(std::chrono::milliseconds tick) {
  {
    std::lock_guard lock(mutex_);
    wake_every_ = tick;
  }
  changed_.notify_all();
}

void ProcessGroupTransport::end() noexcept {
  c10::intrusive_ptr<::c10d::Backend> backend;
  {
    std::lock_guard lock(mutex_);
    ended_ = true;
    if (waiting_) waiting_->abort();
    backend = std::move(backend_);  // An exchange holds it too, and closes the connections when it has ended.
  }
  changed_.notify_all();
}

std::string ProcessGroupTransport::exchange_name() const {
  return "exchange " + std::to_string(exchanges_) + " of peer " + std::to_string(self_) + " of " +
         std::to_string(size_);
}

}  // namespace async_emb::comm
