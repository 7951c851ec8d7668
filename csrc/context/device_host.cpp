// What the host reads and restores of a device pipeline, and how it ends.
#include <algorithm>
#include <utility>

#include "context/device_pipeline.h"

namespace async_emb::context {

// ---- refusals ----

bool DevicePipeline::refuses(int rank, StateMachine::Refusal refusal, const char* call) {
  const std::int64_t index = ++of(rank).calls;
  if (index > refused_call_) {
    ++stats_.refused_calls;
    return true;
  }
  if (!refusal) return false;
  ++stats_.refused_calls;
  refused_call_ = index;
  if (!refusal_) {
    refusal_ =
        check_.where(call, rank) + ": " + *refusal + ". Nothing was applied; tables and state are as before this call";
  }
  for (auto& channel : rounds_) {
    for (Round& round : channel) {
      if (round.step != 0 && !round.running && !round.enqueued && round.begin_call >= refused_call_)
        round.is_void = true;
    }
  }
  changed_.notify_all();
  return true;
}

std::string DevicePipeline::told_by_device(int rank, const cuda::Refusal& refusal) const {
  // All ranks make the same calls, also those of other processes.
  const Rank& one = ranks_[static_cast<std::size_t>(rank)] ? of(rank) : lead();
  std::int64_t step = 0;
  for (const Rank::Done& done : one.dones) {
    if (done.call == refusal.refused_call) step = done.step;
  }
  std::string what;
  if (refusal.kind == cuda::RefusalKind::kStalePin) {
    what = stale_pin(refusal.pin, step);
  } else {
    const std::int64_t first = spec_.token_blocks[static_cast<std::size_t>(rank)] * spec_.tokens_per_rank;
    what = other_batch(step, first + refusal.position, refusal.armed, refusal.given);
  }
  return check_.where("lookup_done", rank) + ": " + what +
         ". Nothing was applied; tables and state are as before this call. The device found this while the host went "
         "on, so the context is back in its first-step state: a lookup that was started and gradients that were "
         "staged are dropped";
}

std::optional<std::string> DevicePipeline::take_refusal() {
  drain();  // work that has yet to look at a refusal must find it
  Lock lock(mutex_);
  std::int64_t first = kNone;
  std::string message;
  for (int rank = 0; rank < spec_.group_size; ++rank) {
    const cuda::Refusal& refusal = refusal_of(rank);
    if (refusal.kind != cuda::RefusalKind::kNone && refusal.refused_call < first) {
      first = refusal.refused_call;
      message = told_by_device(rank, refusal);
    }
  }
  const bool by_device = first < kNone && first <= refused_call_;
  if (!by_device && !refusal_) return std::nullopt;
  if (!by_device) message = *refusal_;
  refusal_.reset();
  refused_call_ = kNone;

  bool alike = true;
  std::int64_t lookup_step = 0;
  std::int64_t update_step = 0;
  std::int64_t stages = 0;
  std::array<std::int64_t, comm::kChannels> starts{};
  for (int rank = 0; rank < spec_.group_size; ++rank) refusal_of(rank) = cuda::Refusal();
  for (const int local : local_) {
    Rank& rank = of(local);
    rank.calls = 0;
    rank.dones = {};
    alike = alike && rank.machine == lead().machine;
    lookup_step = std::max(lookup_step, rank.machine.lookup().armed);
    update_step = std::max(update_step, rank.machine.update().armed);
    stages = std::max(stages, rank.machine.stages());
    for (std::size_t c = 0; c < starts.size(); ++c) starts[c] = std::max(starts[c], rank.starts[c]);
  }
  for (const int local : local_) of(local).starts = starts;
  if (by_device || !alike) start_anew(lookup_step, update_step, stages);
  if (!by_device && !alike) {
    message +=
        ". The ranks stood at different calls, so the context is back in its first-step state: a lookup that was "
        "started and gradients that were staged are dropped";
  }
  return message;
}

void DevicePipeline::start_anew(std::int64_t lookup_step, std::int64_t update_step, std::int64_t stages) {
  for (const int local : local_) {
    Rank& rank = of(local);
    rank.machine.reset(lookup_step, update_step, stages);
    rank.armed_batch = rank.consumed_batch = rank.staged_batch = -1;
    for (auto& batch : rank.batches) batch->holders = 0;
  }
}

// ---- what the host reads ----

std::optional<IdProblem> DevicePipeline::take_id_problem() {
  Lock lock(mutex_);
  // All processes say the same, as far as the step is over on every rank of this one: then all know of it.
  const auto is_over = [&](const IdProblem& problem) {
    return peers_ == nullptr || std::all_of(local_.begin(), local_.end(), [&](int rank) {
             const StateMachine& machine = of(rank).machine;
             return problem.step <= (problem.too_many_unique ? machine.update() : machine.lookup()).consumed;
           });
  };
  std::optional<IdProblem> first;
  const auto look_at = [&](const Rank& rank, cuda::IdFinding* found) {
    cuda::IdFinding finding;
    rank.device.read(&finding, found, sizeof(finding));
    const IdProblem problem{.step = finding.step,
                            .position = finding.position,
                            .id = finding.id,
                            .rows = rank.rows,
                            .too_many_unique = finding.distinct > 0,
                            .unique = finding.distinct};
    if (finding.step == 0 || !is_over(problem)) return;
    const cuda::IdFinding none;
    rank.device.write(found, &none, sizeof(none));
    const bool earlier = !first || problem.step < first->step ||
                         (problem.step == first->step && !first->too_many_unique && problem.position < first->position);
    if (earlier) first = problem;
  };
  for (const int local : local_) {
    const Rank& rank = of(local);
    const auto guard = rank.device.activate();
    look_at(rank, rank.arena.bad_id.get());
    look_at(rank, rank.arena.too_many.get());
    if (peers_ != nullptr && leads(local)) look_at(rank, peer_bad_id_.get());
  }
  return first;
}

void DevicePipeline::return_to_first_step() {
  Lock lock(mutex_);
  for (const int rank : local_) of(rank).machine.return_to_first_step();
}

std::vector<int> DevicePipeline::local_in_token_order() const {
  std::vector<int> ranks = local_;
  std::sort(ranks.begin(), ranks.end(), [&](int a, int b) {
    return spec_.token_blocks[static_cast<std::size_t>(a)] < spec_.token_blocks[static_cast<std::size_t>(b)];
  });
  return ranks;
}

std::optional<StagedGradients> DevicePipeline::staged() const {
  Lock lock(mutex_);
  if (!lead().machine.staged()) return std::nullopt;
  StagedGradients result;
  const std::int64_t block_bytes = lead().arena.grads.bytes();
  result.ids.resize(static_cast<std::size_t>(spec_.tokens_per_rank) * local_.size());
  result.grads.resize(static_cast<std::size_t>(block_bytes) * local_.size());
  std::int64_t block = 0;
  for (const int rank : local_in_token_order()) {
    const Rank& me = of(rank);
    const auto guard = me.device.activate();
    me.device.read(result.ids.data() + block * spec_.tokens_per_rank,
                   me.batches[static_cast<std::size_t>(me.staged_batch)]->ids.get(),
                   spec_.tokens_per_rank * static_cast<std::int64_t>(sizeof(std::int32_t)));
    me.device.read(result.grads.data() + block * block_bytes, me.arena.grads.get(), block_bytes);
    std::int32_t pending = 0;
    me.device.read(&pending, me.arena.pending.get(), sizeof(pending));
    result.pending = result.pending && pending != 0;
    ++block;
  }
  return result;
}

void DevicePipeline::restore_staged(const StagedGradients& staged) {
  drain();
  Lock lock(mutex_);
  require_working();
  const std::int64_t block_bytes = lead().arena.grads.bytes();
  check_.staged(static_cast<std::int64_t>(staged.ids.size()), static_cast<std::int64_t>(staged.grads.size()));
  for (const int rank : local_) {
    const StateMachine& machine = of(rank).machine;
    if (machine.staged() || machine.update().pending() || machine.lookup().pending()) check_.not_idle();
  }
  const std::int64_t rows = 1 + std::int64_t{*std::max_element(staged.ids.begin(), staged.ids.end())};
  for (const int rank : local_) {
    Rank& me = of(rank);
    const auto guard = me.device.activate();
    const int block = spec_.token_blocks[static_cast<std::size_t>(rank)];
    const int index = take_batch(me);
    DeviceBatch& batch = *me.batches[static_cast<std::size_t>(index)];
    me.device.write(batch.ids.get(), staged.ids.data() + block * spec_.tokens_per_rank, batch.ids.bytes());
    batch.rows = rows;
    me.device.write(me.arena.grads.get(), staged.grads.data() + block * block_bytes, block_bytes);
    const std::int32_t pending = staged.pending ? 1 : 0;
    me.device.write(me.arena.pending.get(), &pending, sizeof(pending));
    me.last_table = nullptr;  // the next lookup brings it
    release(me, me.staged_batch);
    me.staged_batch = index;
    ++batch.holders;
    me.machine.adopt_staged();
  }
}

Stats DevicePipeline::stats() const {
  Stats all;
  {
    Lock lock(mutex_);
    all = stats_;
    if (peers_ != nullptr) all.bytes_sent = peers_->bytes_sent();
  }
  for (const int local : local_) {
    const Rank& rank = of(local);
    cuda::Counters counters;
    const auto guard = rank.device.activate();
    rank.device.read(&counters, rank.arena.counters.get(), sizeof(counters));
    all.bad_ids += static_cast<std::int64_t>(counters.bad_ids);
    all.padding_ids += static_cast<std::int64_t>(counters.padding_ids);
    all.saturated += static_cast<std::int64_t>(counters.saturated);
    all.updates += static_cast<std::int64_t>(counters.applied);
    all.skipped_updates += static_cast<std::int64_t>(counters.skipped);
    all.trained_tokens += static_cast<std::int64_t>(counters.trained_tokens);
    all.unique_tokens += static_cast<std::int64_t>(counters.unique_tokens);
    // Of the calls that a device refuses the first one is known.
    if (rank.refusal->kind != cuda::RefusalKind::kNone) ++all.refused_calls;
  }
  return all;
}

std::int64_t DevicePipeline::arena_bytes() const {
  Lock lock(mutex_);
  std::int64_t total = 0;
  for (const int rank : local_) {
    total += of(rank).arena.bytes();
    for (const auto& batch : of(rank).batches) total += batch->ids.bytes();
  }
  if (peers_ != nullptr) total += peers_->bytes();
  return total;
}

// ---- failures ----

void DevicePipeline::require_working() const {
  if (failure_) throw Error(*failure_);
}

void DevicePipeline::adopt(Failure failure) {
  const bool first = !failure_;
  if (first) failure_ = std::move(failure);
  changed_.notify_all();
  if (peers_ == nullptr || !first) return;
  // Exchanges end with anything in what they were to fill: from now on nothing is applied or delivered.
  for (const int rank : local_) {
    __atomic_store_n(&of(rank).refusal->refused_call, cuda::kRefusedByHost, __ATOMIC_RELEASE);
  }
  // A context that is closed here may go on elsewhere.
  peers_->threads().give_up(failure_->kind == FailureKind::kUnknownContext ? "" : failure_->message);
}

void DevicePipeline::fail_and_throw(Failure failure) {
  adopt(std::move(failure));
  throw Error(*failure_);
}

void DevicePipeline::fail(Failure failure) {
  Lock lock(mutex_);
  adopt(std::move(failure));
}

std::optional<Failure> DevicePipeline::failure() const {
  Lock lock(mutex_);
  return failure_ ? failure_ : difference_of_peers();
}

void DevicePipeline::check_timeout(Clock::time_point now) {
  Lock lock(mutex_);
  if (failure_) return;
  lock.unlock();
  if (auto failure = fault_of_peers()) return fail(std::move(*failure));
  lock.lock();
  if (failure_) return;
  if (auto failure = difference_of_peers()) return adopt(std::move(*failure));
  for (const int channel : {kLookup, kUpdate}) {
    for (const Round& round : rounds_[static_cast<std::size_t>(channel)]) {
      if (round.step == 0 || !round.waited_for || round.enqueued || round.is_void) continue;
      if (std::chrono::duration<double>(now - round.first_wait).count() <= spec_.timeout_seconds) continue;
      std::vector<int> missing;
      for (const int rank : local_) {
        if (!round.ranks[static_cast<std::size_t>(rank)].here) missing.push_back(rank);
      }
      if (missing.empty() && !round.running) continue;  // others are, and the wait for them has a timeout of its own
      if (missing.empty()) missing.push_back(local_.front());  // the next call of the lead
      return adopt({FailureKind::kTimeout,
                    check_.timed_out(channel == kLookup ? "lookup_start" : "update start", round.step, missing)});
    }
  }
}

void DevicePipeline::drain() {
  for (const int rank : local_) {
    const auto guard = of(rank).device.activate();
    of(rank).device.synchronize(of(rank).side.get());
  }
}

}  // namespace async_emb::context
