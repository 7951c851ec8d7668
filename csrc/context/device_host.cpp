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
      if (round.step != 0 && !round.enqueued && round.begin_call >= refused_call_) round.is_void = true;
    }
  }
  changed_.notify_all();
  return true;
}

std::string DevicePipeline::told_by_device(int rank, const cuda::Refusal& refusal) const {
  const Rank& me = of(rank);
  std::int64_t step = 0;
  for (const Rank::Done& done : me.dones) {
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
    cuda::Refusal& refusal = *of(rank).refusal;
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
  for (auto& rank : ranks_) {
    *rank->refusal = cuda::Refusal();
    rank->calls = 0;
    rank->dones = {};
    alike = alike && rank->machine == ranks_.front()->machine;
    lookup_step = std::max(lookup_step, rank->machine.lookup().armed);
    update_step = std::max(update_step, rank->machine.update().armed);
    stages = std::max(stages, rank->machine.stages());
  }
  if (by_device || !alike) start_anew(lookup_step, update_step, stages);
  if (!by_device && !alike) {
    message +=
        ". The ranks stood at different calls, so the context is back in its first-step state: a lookup that was "
        "started and gradients that were staged are dropped";
  }
  return message;
}

void DevicePipeline::start_anew(std::int64_t lookup_step, std::int64_t update_step, std::int64_t stages) {
  for (auto& rank : ranks_) {
    rank->machine.reset(lookup_step, update_step, stages);
    rank->armed_batch = rank->consumed_batch = rank->staged_batch = -1;
    for (auto& batch : rank->batches) batch->holders = 0;
  }
}

// ---- what the host reads ----

std::optional<IdProblem> DevicePipeline::take_id_problem() {
  Lock lock(mutex_);
  std::optional<IdProblem> first;
  for (auto& rank : ranks_) {
    const auto guard = rank->device.activate();
    for (cuda::IdFinding* found : {rank->arena.bad_id.get(), rank->arena.too_many.get()}) {
      cuda::IdFinding finding;
      rank->device.read(&finding, found, sizeof(finding));
      if (finding.step == 0) continue;
      const cuda::IdFinding none;
      rank->device.write(found, &none, sizeof(none));
      const IdProblem problem{.step = finding.step,
                              .position = finding.position,
                              .id = finding.id,
                              .rows = rank->rows,
                              .too_many_unique = finding.distinct > 0,
                              .unique = finding.distinct};
      const bool earlier =
          !first || problem.step < first->step ||
          (problem.step == first->step && !first->too_many_unique && problem.position < first->position);
      if (earlier) first = problem;
    }
  }
  return first;
}

void DevicePipeline::return_to_first_step() {
  Lock lock(mutex_);
  for (auto& rank : ranks_) rank->machine.return_to_first_step();
}

std::optional<StagedGradients> DevicePipeline::staged() const {
  Lock lock(mutex_);
  if (!of(0).machine.staged()) return std::nullopt;
  StagedGradients result;
  result.ids.resize(static_cast<std::size_t>(spec_.tokens()));
  const std::int64_t block_bytes = of(0).arena.grads.bytes();
  result.grads.resize(static_cast<std::size_t>(block_bytes * spec_.group_size));
  for (int rank = 0; rank < spec_.group_size; ++rank) {
    const Rank& me = of(rank);
    const auto guard = me.device.activate();
    const int block = spec_.token_blocks[static_cast<std::size_t>(rank)];
    me.device.read(result.ids.data() + block * spec_.tokens_per_rank,
                   me.batches[static_cast<std::size_t>(me.staged_batch)]->ids.get(),
                   spec_.tokens_per_rank * static_cast<std::int64_t>(sizeof(std::int32_t)));
    me.device.read(result.grads.data() + block * block_bytes, me.arena.grads.get(), block_bytes);
    std::int32_t pending = 0;
    me.device.read(&pending, me.arena.pending.get(), sizeof(pending));
    result.pending = result.pending && pending != 0;
  }
  return result;
}

void DevicePipeline::restore_staged(const StagedGradients& staged) {
  drain();
  Lock lock(mutex_);
  require_working();
  const std::int64_t block_bytes = of(0).arena.grads.bytes();
  check_.staged(static_cast<std::int64_t>(staged.ids.size()), static_cast<std::int64_t>(staged.grads.size()));
  for (const auto& rank : ranks_) {
    if (rank->machine.staged() || rank->machine.update().pending() || rank->machine.lookup().pending()) {
      check_.not_idle();
    }
  }
  const std::int64_t rows = 1 + std::int64_t{*std::max_element(staged.ids.begin(), staged.ids.end())};
  for (int rank = 0; rank < spec_.group_size; ++rank) {
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
  }
  for (const auto& rank : ranks_) {
    cuda::Counters counters;
    const auto guard = rank->device.activate();
    rank->device.read(&counters, rank->arena.counters.get(), sizeof(counters));
    all.bad_ids += static_cast<std::int64_t>(counters.bad_ids);
    all.padding_ids += static_cast<std::int64_t>(counters.padding_ids);
    all.saturated += static_cast<std::int64_t>(counters.saturated);
    all.updates += static_cast<std::int64_t>(counters.applied);
    all.skipped_updates += static_cast<std::int64_t>(counters.skipped);
    all.trained_tokens += static_cast<std::int64_t>(counters.trained_tokens);
    all.unique_tokens += static_cast<std::int64_t>(counters.unique_tokens);
    // Of the calls that a device refuses the first one is known.
    if (rank->refusal->kind != cuda::RefusalKind::kNone) ++all.refused_calls;
  }
  return all;
}

std::int64_t DevicePipeline::arena_bytes() const {
  Lock lock(mutex_);
  std::int64_t total = 0;
  for (const auto& rank : ranks_) {
    total += rank->arena.bytes();
    for (const auto& batch : rank->batches) total += batch->ids.bytes();
  }
  return total;
}

// ---- failures ----

void DevicePipeline::require_working() const {
  if (failure_) throw Error(*failure_);
}

void DevicePipeline::fail_and_throw(Failure failure) {
  if (!failure_) failure_ = std::move(failure);
  changed_.notify_all();
  throw Error(*failure_);
}

void DevicePipeline::fail(Failure failure) {
  Lock lock(mutex_);
  if (!failure_) failure_ = std::move(failure);
  changed_.notify_all();
}

std::optional<Failure> DevicePipeline::failure() const {
  Lock lock(mutex_);
  return failure_;
}

void DevicePipeline::check_timeout(Clock::time_point now) {
  Lock lock(mutex_);
  if (failure_) return;
  for (const int channel : {kLookup, kUpdate}) {
    for (const Round& round : rounds_[static_cast<std::size_t>(channel)]) {
      if (round.step == 0 || !round.waited_for || round.enqueued || round.is_void) continue;
      if (std::chrono::duration<double>(now - round.first_wait).count() <= spec_.timeout_seconds) continue;
      std::vector<int> missing;
      for (int rank = 0; rank < spec_.group_size; ++rank) {
        if (!round.ranks[static_cast<std::size_t>(rank)].here) missing.push_back(rank);
      }
      failure_ = Failure{FailureKind::kTimeout,
                         check_.timed_out(channel == kLookup ? "lookup_start" : "update start", round.step, missing)};
      changed_.notify_all();
      return;
    }
  }
}

void DevicePipeline::drain() {
  for (const auto& rank : ranks_) {
    const auto guard = rank->device.activate();
    rank->device.synchronize(rank->side.get());
  }
}

}  // namespace async_emb::context
