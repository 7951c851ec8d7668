// How the processes of a device pipeline agree about a start, on the communication thread, how it then goes to the
// streams, and what faults of other processes are called.
#include <algorithm>
#include <utility>

#include "context/device_pipeline.h"
#include "context/peer_faults.h"

namespace async_emb::context {
namespace {

const char* name_of(int channel) {
  return channel == static_cast<int>(comm::Channel::kLookup) ? "lookup_start" : "update start";
}

}  // namespace

void DevicePipeline::arrive_at_peers(int channel, std::int64_t start, int rank) {
  arrivals_.arrive(static_cast<comm::Channel>(channel), start, rank, [self = shared_from_this(), channel, start] {
    self->peers_->threads().post([self, channel, start] { self->agree(channel, start); });
  });
}

DevicePipeline::Round* DevicePipeline::round_of_start(int channel, std::int64_t start) {
  for (Round& round : rounds_[static_cast<std::size_t>(channel)]) {
    if (round.step != 0 && round.start == start && !round.is_void) return &round;
  }
  return nullptr;
}

Notice DevicePipeline::notice_of(int channel, std::int64_t start, const Round* round) const {
  Notice notice{.start = start};
  if (round == nullptr) {
    notice.refused = true;
    const std::string why = refusal_.value_or("a call of this step was refused");
    why.copy(notice.why, sizeof(notice.why) - 1);
    return notice;
  }
  notice.step = round->step;
  notice.rows = round->rows;
  if (channel == kUpdate) {
    notice.staged = round->staged;
    // The numbers are the devices' to compare.
    notice.rule.lazy = round->form.lazy;
    notice.rule.clips = round->form.clips;
    notice.rule.stochastic_rounding = round->form.stochastic_rounding;
  }
  return notice;
}

void DevicePipeline::accept(const std::vector<Notice>& notices, Round* round) {
  Lock lock(mutex_);
  if (failure_ || round == nullptr) return;
  for (const Notice& notice : notices) {
    if (!notice.refused) continue;
    if (!refusal_) {
      refusal_ = std::string(notice.why);
      refused_call_ = round->begin_call;
    }
    round->is_void = true;
    for (auto& channel : rounds_) {
      for (Round& other : channel) {
        if (other.step != 0 && !other.enqueued && other.begin_call >= refused_call_) other.is_void = true;
      }
    }
    changed_.notify_all();
    return;
  }
  for (const Notice& notice : notices) round->works = round->works && notice.staged;
  round->running = true;
  changed_.notify_all();
}

void DevicePipeline::agree(int channel, std::int64_t start) {
  Notice mine;
  Round* round = nullptr;
  {
    Lock lock(mutex_);
    if (failure_) return;
    round = round_of_start(channel, start);
    mine = notice_of(channel, start, round);
  }
  const char* const call = name_of(channel);
  std::optional<Failure> failure;
  try {
    const std::vector<Notice>& notices = peers_->exchange_notices(mine);
    if (const auto what = disagreement(notices, peers_->map().names)) {
      const std::int64_t step = round != nullptr ? round->step : notices.front().step;
      failure =
          Failure{FailureKind::kInvalidArgument, check_.of_step(call, step) + ": " + *what +
                                                     ". All processes must run one program with one configuration"};
    } else {
      accept(notices, round);
    }
  } catch (const comm::TransportError& error) {
    failure = failure_of(error, call, mine.step, check_, peers_->map(), peers_->threads());
  } catch (const std::exception& error) {
    failure = Failure{FailureKind::kInternal, check_.of_step(call, mine.step) + " failed: " + error.what()};
  }
  if (failure) fail(std::move(*failure));
}

void DevicePipeline::launch_rounds(Lock& lock, int rank) {
  if (peers_ == nullptr || !leads(rank)) return;
  for (;;) {
    // The one that began first.
    Round* next = nullptr;
    int channel = kLookup;
    for (const int each : {kLookup, kUpdate}) {
      for (Round& round : rounds_[static_cast<std::size_t>(each)]) {
        if (round.step == 0 || !round.ranks[static_cast<std::size_t>(rank)].here) continue;
        if (round.enqueued || round.is_void || (next != nullptr && next->begin_call < round.begin_call)) continue;
        next = &round;
        channel = each;
      }
    }
    if (next == nullptr) return;
    note_wait(*next);
    changed_.wait(lock, [&] { return next->running || next->is_void || failure_; });
    if (failure_) return;
    if (!next->is_void) launch(lock, channel, *next);
  }
}

void DevicePipeline::launch(Lock& lock, int channel, Round& round) {
  // Without the lock: a call of the library may take long where something fails, and then others must be told.
  lock.unlock();
  std::optional<Failure> failure;
  try {
    channel == kLookup ? enqueue_lookup_with_peers(round) : enqueue_update_with_peers(round);
  } catch (const std::exception& error) {
    failure = failure_on_device(name_of(channel), round, error);
  }
  lock.lock();
  if (failure) return adopt(std::move(*failure));
  if (channel == kLookup) ++stats_.lookups;
  if (channel == kLookup || round.works) stats_.bytes_moved += moved_bytes();
  round.running = false;
  round.enqueued = true;
  peers_->pulse().put(static_cast<comm::Channel>(channel), round.step);
  changed_.notify_all();
}

// An exchange that cannot be put on a stream has a reason that the hosts know better, where a process has died.
Failure DevicePipeline::failure_on_device(const char* call, const Round& round, const std::exception& error) const {
  if (const auto told = peers_->threads().wait_until_told()) return {FailureKind::kPeer, *told};
  if (auto fault = fault_of_peers()) return std::move(*fault);
  return {FailureKind::kInternal, check_.of_step(call, round.step) + " failed: " + error.what()};
}

std::optional<Failure> DevicePipeline::fault_of_peers() const {
  if (peers_ == nullptr) return std::nullopt;
  if (const auto told = peers_->threads().told()) return Failure{FailureKind::kPeer, *told};
  const auto fault = peers_->pulse().fault();
  if (!fault) return std::nullopt;
  std::int64_t step = fault->step;
  int channel = static_cast<int>(fault->channel);
  if (fault->error) {
    // In the latest start, as the hosts see it.
    Lock lock(mutex_);
    std::int64_t latest = -1;
    for (const int each : {kLookup, kUpdate}) {
      for (const Round& round : rounds_[static_cast<std::size_t>(each)]) {
        if (round.step == 0 || round.begin_call <= latest) continue;
        latest = round.begin_call;
        step = round.step;
        channel = each;
      }
    }
    lock.unlock();
    return failure_of(*fault->error, name_of(channel), step, check_, peers_->map(), peers_->threads());
  }
  std::vector<int> ranks;
  for (const int process : fault->late) {
    const std::vector<int>& theirs = peers_->map().ranks[static_cast<std::size_t>(process)];
    ranks.insert(ranks.end(), theirs.begin(), theirs.end());
  }
  std::sort(ranks.begin(), ranks.end());
  if (!ranks.empty()) return Failure{FailureKind::kTimeout, check_.timed_out(name_of(channel), step, ranks)};
  return Failure{FailureKind::kTimeout,
                 check_.of_step(name_of(channel), step) +
                     ": the GPUs of all processes have come to the exchange, but it was not over in time. A link "
                     "between them is broken or slow (NCCL_DEBUG=INFO says which are used), or an exchange of another "
                     "library stands in its way. Set ASYNC_EMB_TIMEOUT_SECONDS to wait longer"};
}

std::optional<Failure> DevicePipeline::difference_of_peers() const {
  if (!difference_) return std::nullopt;
  const cuda::RuleDifference& found = **difference_;
  const std::int64_t step = __atomic_load_n(&found.step, __ATOMIC_ACQUIRE);
  if (step == 0) return std::nullopt;
  const bool lazy = rounds_[kUpdate][static_cast<std::size_t>(step % 2)].form.lazy;
  return Failure{FailureKind::kInvalidArgument, check_.of_step("update start", step) + ": " +
                                                    in_words(found, lazy, peers_->map()) +
                                                    ". All processes must run one program with one configuration"};
}

}  // namespace async_emb::context
