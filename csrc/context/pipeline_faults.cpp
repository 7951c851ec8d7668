// Refusals, which cost nothing and are taken back, and failures, which end a pipeline.
#include "context/pipeline.h"

#include <algorithm>
#include <utility>

namespace async_emb::context {

// ---- refusals ----

bool Pipeline::refuses(Rank& rank, StateMachine::Refusal refusal, const char* call) {
  const std::int64_t index = ++rank.calls;
  if (index > refused_call_) {
    ++stats_.refused_calls;
    return true;
  }
  if (!refusal) return false;
  ++stats_.refused_calls;
  refused_call_ = index;
  if (!refusal_) {
    refusal_ = check_.where(call, static_cast<int>(&rank - ranks_.data())) + ": " + *refusal +
               ". Nothing was applied; tables and state are as before this call";
  }
  void_rounds();
  return true;
}

void Pipeline::void_rounds() {
  for (LookupRound& round : lookups_) {
    if (round.step != 0 && !round.running && !round.complete && round.begin_call >= refused_call_) finish_void(round);
  }
  for (UpdateRound& round : updates_) {
    if (round.step != 0 && !round.running && !round.complete && round.begin_call >= refused_call_) finish_void(round);
  }
}

void Pipeline::finish_void(LookupRound& round) {
  round.is_void = true;
  round.complete = true;
  for (const int rank : local_) {
    LookupRound::Rank& mine = round.ranks[rank];
    if (peers_ != nullptr && mine.begun && !std::exchange(mine.arrived, true)) {
      arrive(comm::Channel::kLookup, round.start, rank);
    }
    later(mine.lease);
    if (!mine.done) continue;
    work_.fill_refused(mine.out);
    consume_lookup(rank, round);
    later(mine.done);
  }
}

void Pipeline::finish_void(UpdateRound& round) {
  round.is_void = true;
  round.complete = true;
  for (const int rank : local_) {
    UpdateRound::Rank& mine = round.ranks[rank];
    if (peers_ != nullptr && mine.begun && !std::exchange(mine.arrived, true)) {
      arrive(comm::Channel::kUpdate, round.start, rank);
    }
    later(mine.lease);
    if (!mine.done) continue;
    mine.results.write_nothing_done();
    consume_update(rank, round);
    later(mine.done);
  }
}

std::optional<std::string> Pipeline::take_refusal() {
  Lock lock(mutex_);
  if (!refusal_) return std::nullopt;
  std::string message = *refusal_;
  refusal_.reset();
  refused_call_ = std::numeric_limits<std::int64_t>::max();
  bool alike = true;
  std::int64_t lookup_step = 0;
  std::int64_t update_step = 0;
  std::int64_t stages = 0;
  std::array<std::int64_t, comm::kChannels> starts{};
  for (const int local : local_) {
    Rank& rank = ranks_[local];
    rank.calls = 0;
    alike = alike && rank.machine == ranks_[local_.front()].machine;
    for (std::size_t channel = 0; channel < starts.size(); ++channel) {
      starts[channel] = std::max(starts[channel], rank.starts[channel]);
    }
    lookup_step = std::max(lookup_step, rank.machine.lookup().armed);
    update_step = std::max(update_step, rank.machine.update().armed);
    stages = std::max(stages, rank.machine.stages());
  }
  for (const int local : local_) ranks_[local].starts = starts;
  if (!alike) {
    for (auto& batch : batches_) batch->holders = 0;
    for (const int local : local_) {
      Rank& rank = ranks_[local];
      rank.machine.reset(lookup_step, update_step, stages);
      rank.lookup_open = false;
      rank.update_open = false;
      rank.consumed_batch = -1;
      rank.staged_batch = -1;
    }
    message +=
        ". The ranks stood at different calls, so the context is back in its first-step state: a lookup that was "
        "started and gradients that were staged are dropped";
  }
  return message;
}

// ---- failures ----

void Pipeline::require_working() const {
  if (failure_) throw Error(*failure_);
}

void Pipeline::fail_and_throw(Failure failure) {
  adopt(std::move(failure));
  throw Error(*failure_);
}

void Pipeline::fail(Failure failure) {
  Lock lock(mutex_);
  adopt(std::move(failure));
}

void Pipeline::adopt(Failure failure) {
  const bool first = !failure_;
  if (first) failure_ = std::move(failure);
  fail_waiting();
  if (peers_ == nullptr || !first) return;
  // A context that is closed here may go on elsewhere.
  peers_->threads().give_up(failure_->kind == FailureKind::kUnknownContext ? "" : failure_->message);
}

std::optional<Failure> Pipeline::failure() const {
  Lock lock(mutex_);
  return failure_;
}

void Pipeline::fail_waiting() {
  // Work that runs keeps its buffers until it has ended; it calls here again then.
  for (LookupRound& round : lookups_) {
    if (round.running) continue;
    for (auto& rank : round.ranks) {
      later(rank.lease);
      later(rank.done);
    }
  }
  for (UpdateRound& round : updates_) {
    if (round.running) continue;
    for (auto& rank : round.ranks) {
      later(rank.lease);
      later(rank.done);
    }
  }
}

void Pipeline::set_absent(int rank, std::string why) {
  {
    Lock lock(mutex_);
    ranks_.at(static_cast<std::size_t>(rank)).why_absent = std::move(why);
  }
  check_timeout(Clock::now());
}

void Pipeline::check_timeout(Clock::time_point now) {
  if (const auto told = peers_ != nullptr ? peers_->threads().told() : std::nullopt) {
    fail({FailureKind::kPeer, *told});
    return;
  }
  Failure failure{FailureKind::kTimeout, ""};
  {
    Lock lock(mutex_);
    if (failure_) return;
    const auto look_at = [&](comm::Channel channel, const Progress& round, const char* call) {
      if (round.step == 0 || !round.waited_for || round.running || round.complete || !failure.message.empty()) return;
      const std::vector<int> missing = arrivals_.missing(channel, number_of(round));
      for (const int rank : missing) {
        const std::string& why = ranks_[static_cast<std::size_t>(rank)].why_absent;
        if (why.empty()) continue;
        failure = {FailureKind::kPeer, check_.absent(call, round.step, rank, why)};
        return;
      }
      const bool late = std::chrono::duration<double>(now - round.first_wait).count() > spec_.timeout_seconds;
      if (late && !missing.empty()) failure.message = check_.timed_out(call, round.step, missing);  // empty: just come
    };
    for (const LookupRound& round : lookups_) look_at(comm::Channel::kLookup, round, "lookup_start");
    for (const UpdateRound& round : updates_) look_at(comm::Channel::kUpdate, round, "update start");
  }
  if (!failure.message.empty()) fail(std::move(failure));
}

void Pipeline::drain() {
  Lock lock(mutex_);
  settled_.wait(lock, [&] { return running_ == 0; });
}

}  // namespace async_emb::context
