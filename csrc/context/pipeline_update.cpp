// The calls and the work of updates.
#include "context/pipeline.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "context/clean_ids.h"
#include "context/together.h"

namespace async_emb::context {
namespace {

constexpr int kPiecesAThread = 8;  // so that one which came late, or sorted ids meanwhile, takes fewer

}  // namespace

float Pipeline::stage_update(int rank, const DLTensor& grads, const DLTensor* segment_ids,
                             const DLTensor* unique_tokens, bool pending) {
  check_.stage_update(rank, grads, segment_ids, unique_tokens);
  const std::int64_t first_position = spec_.token_blocks[rank] * spec_.tokens_per_rank;
  std::int32_t* own_ids = nullptr;
  std::int64_t rows = 0;
  std::int64_t stage = 0;
  BatchIds* to_index = nullptr;
  const int threads = work_.parts_for(work_.lookup_bytes(), executor_.limit());
  {
    Lock lock(mutex_);
    require_working();
    ++stats_.stage_calls;
    Rank& me = ranks_[rank];
    if (refuses(me, me.machine.check_stage(), "stage_update")) return pin_of(me.machine.stages());
    stage = me.machine.stage();
    record("stage_update", rank, me.machine.lookup().consumed);
    rows = lookup_round(me.machine.lookup().consumed).rows;
    me.staged_pending = pending;
    me.staged_own_ids = segment_ids != nullptr;
    if (segment_ids == nullptr) {
      me.staged_batch = me.consumed_batch;
      BatchIds& batch = *batches_[me.staged_batch];
      // No process but this one has ids still to come.
      const bool may_index = threads > 1 && peers_ == nullptr;
      if (may_index && !std::exchange(batch.indexed, true)) to_index = &batch;
    } else {
      Override& given = overrides_[stage % 2];
      if (given.stage != stage) {
        given = {stage, take_batch()};
        batches_[given.batch]->rows = rows;
      }
      me.staged_batch = given.batch;
      own_ids = batches_[given.batch]->ids.as<std::int32_t>() + first_position;
    }
    hold(me.staged_batch);
  }
  if (threads == 1) {
    work_.stage(rank, data_of(grads));
  } else {
    const int pieces = threads * kPiecesAThread;
    run_together(executor_, pieces + 1, threads - 1, [&](int job) {
      if (job > 0) {
        work_.stage(rank, data_of(grads), job - 1, pieces);
      } else if (to_index != nullptr) {
        work_.index(*to_index);
      }
    });
  }
  if (peers_ != nullptr) peers_->stage(rank, data_of(grads));
  if (own_ids != nullptr) {
    const core::IdReport cleaned = ids_of_segments(*segment_ids, *unique_tokens, spec_, rows, own_ids);
    Lock lock(mutex_);
    stats_.bad_ids += cleaned.bad;
    if (cleaned.bad > 0 && spec_.id_policy == core::IdPolicy::kError) {
      note({.step = ranks_[rank].machine.lookup().consumed,
            .position = first_position + cleaned.first_bad_position,
            .id = cleaned.first_bad_id,
            .rows = rows});
    }
  }
  return pin_of(stage);
}

float Pipeline::update_begin(int rank, const UpdateRule& rule) {
  Lock lock(mutex_);
  require_working();
  ++stats_.update_begin_calls;
  Rank& me = ranks_[rank];
  const std::int64_t start = ++me.starts[static_cast<std::size_t>(comm::Channel::kUpdate)];
  if (refuses(me, me.machine.check_update_start(), "update start")) {
    const float pin = pin_of(me.machine.update().armed);
    lock.unlock();
    if (peers_ != nullptr) arrive(comm::Channel::kUpdate, start, rank);
    return pin;
  }
  me.update_open = true;
  const bool staged = me.machine.update_start();
  const std::int64_t step = me.machine.update().armed;
  record("update_begin", rank, step);
  UpdateRound& round = update_round(step);
  if (round.step != step) {
    static_cast<Progress&>(round) = Progress{.step = step, .start = start, .begin_call = me.calls};
    round.batch = staged ? me.staged_batch : -1;
    round.own_ids = staged && me.staged_own_ids;
    round.applies_nothing = !staged;
    round.pending = true;
    round.rule = rule;
    round.norm = 0;
    round.applied = false;
    for (auto& peer : round.ranks) peer = {};
  } else if (const auto what = difference_between(round, rule, rank)) {
    fail_and_throw({FailureKind::kInvalidArgument, check_.of_step("update start", step) + ": " + *what +
                                                       ". All ranks must give one optimizer and one schedule"});
  }
  round.ranks[rank].begun = true;
  round.pending = round.pending && me.staged_pending;
  if (me.calls >= refused_call_) finish_void(round);  // a peer has refused this very call
  return pin_of(step);
}

std::optional<std::string> Pipeline::difference_between(const UpdateRound& round, const UpdateRule& rule,
                                                        int rank) const {
  const auto is_begun = [&](int other) { return round.ranks[static_cast<std::size_t>(other)].begun; };
  const int first = *std::find_if(local_.begin(), local_.end(), is_begun);
  return difference(round.rule, "rank " + std::to_string(first), rule, "rank " + std::to_string(rank));
}

void Pipeline::take_offer(int rank, UpdateRound& round, const DLTensor& table, const DLTensor& row_state,
                          const DLTensor* last_step) {
  const std::int64_t staged_rows = round.batch >= 0 ? batches_[round.batch]->rows : -1;
  if (auto failure = check_.update_buffers(rank, round.step, {table, row_state, last_step}, round.rule.lazy,
                                           staged_rows, ranks_[rank].last_table)) {
    fail_and_throw(std::move(*failure));
  }
  UpdateRound::Rank& mine = round.ranks[rank];
  mine.table = data_of(table);
  mine.row_state = static_cast<float*>(data_of(row_state));
  mine.last_step = last_step != nullptr ? static_cast<std::int32_t*>(data_of(*last_step)) : nullptr;
  round.rows = table.shape[0];
}

void Pipeline::update_offer(int rank, const DLTensor& table, const DLTensor& row_state, const DLTensor* last_step) {
  Lock lock(mutex_);
  require_working();
  Rank& me = ranks_[rank];
  UpdateRound& round = update_round(me.machine.update().armed);
  if (!me.update_open || round.is_void) return;
  take_offer(rank, round, table, row_state, last_step);
}

void Pipeline::update_lease(int rank, const DLTensor& table, const DLTensor& row_state, const DLTensor* last_step,
                            Completion completion) {
  std::int64_t number = 0;
  {
    Lock lock(mutex_);
    Rank& me = ranks_[rank];
    const std::int64_t step = me.machine.update().armed;
    UpdateRound& round = update_round(step);
    if (failure_ && me.update_open && round.running && round.ranks[rank].lent && !round.ranks[rank].ready) {
      me.update_open = false;
      round.ranks[rank].lease = std::move(completion);
      return;
    }
    require_working();
    ++stats_.update_lease_calls;
    if (!me.update_open || round.step != step || round.is_void) {
      lock.unlock();
      completion(nullptr);
      return;
    }
    me.update_open = false;
    UpdateRound::Rank& mine = round.ranks[rank];
    if (mine.lent && !(mine.table == data_of(table) && mine.row_state == data_of(row_state))) {
      fail_and_throw({FailureKind::kUnmatchedBuffers, check_.where("update start", rank) + " of step " +
                                                          std::to_string(step) +
                                                          ": XLA has put a copy of the table between two calls"});
    }
    record("update_lease", rank, step);
    if (mine.ready) {
      lock.unlock();
      completion(nullptr);
      return;
    }
    if (!mine.lent) take_offer(rank, round, table, row_state, last_step);
    mine.lease = std::move(completion);
    round.note_wait();
    if (std::exchange(mine.lent, true)) return;  // by the done, which completes no earlier than the lease
    mine.arrived = true;
    number = number_of(round);
  }
  arrive(comm::Channel::kUpdate, number, rank);
}

void Pipeline::run_update(std::int64_t step) {
  {
    Lock lock(mutex_);
    UpdateRound& round = update_round(step);
    if (failure_ || round.is_void || round.step != step) return;
    begin_running(round);  // one chain of jobs; its last one ends it
  }
  work_on_update(step);
}

void Pipeline::work_on_update(std::int64_t step) {
  bool applies_nothing = false;
  {
    Lock lock(mutex_);
    UpdateRound& round = update_round(step);
    round.ranks_left = static_cast<int>(local_.size());
    applies_nothing = round.applies_nothing;
  }
  executor_.submit([self = shared_from_this(), step, applies_nothing] {
    self->guarded("update", [&] {
      if (applies_nothing) {
        for (const int rank : self->local_) self->finish_update(step, rank);
      } else {
        self->index_then_sum(step);
      }
    });
  });
}

void Pipeline::index_then_sum(std::int64_t step) {
  BatchIds* batch = nullptr;
  {
    Lock lock(mutex_);
    batch = batches_[update_round(step).batch].get();
  }
  if (!std::exchange(batch->indexed, true)) work_.index(*batch);
  const std::int64_t limit = std::min(spec_.num_unique, spec_.tokens());
  if (batch->unique_count > limit) {
    Lock lock(mutex_);
    note({.step = step, .rows = update_round(step).rows, .too_many_unique = true, .unique = batch->unique_count});
    batch->unique_count = limit;  // as with dropped ids: the largest ones train nothing this time
    batch->indexed = false;       // counted again, and reported again, where the batch is staged once more
  }
  std::int64_t bytes = 0;
  for (const int rank : local_) bytes = std::max(bytes, work_.sum_bytes(rank));
  const int parts = work_.parts_for(bytes, executor_.limit());
  parallel(
      static_cast<int>(local_.size()) * parts,
      [this, batch, parts](int job) { work_.sum(*batch, local_[job / parts], job % parts, parts); },
      [this, step, batch] {
        if (peers_ == nullptr) {
          work_.statistics(0, batch->unique_count);
          decide(step);
        } else {
          peers_->threads().post([self = shared_from_this(), step] { self->share_sums(step); });
        }
      });
}

void Pipeline::decide(std::int64_t step) {
  if (peers_ != nullptr) peers_->threads().release();  // all that this step exchanges is there
  const BatchIds* batch = nullptr;
  {
    Lock lock(mutex_);
    batch = batches_[update_round(step).batch].get();
  }
  const float norm = work_.norm(*batch);
  bool applies = false;
  {
    Lock lock(mutex_);
    UpdateRound& round = update_round(step);
    stats_.trained_tokens += batch->offsets.as<std::int32_t>()[batch->unique_count];
    stats_.unique_tokens += batch->unique_count;
    stats_.bytes_moved += moved_bytes();
    round.norm = norm;
    // The last point at which a failure still leaves every byte as it was.
    applies = std::isfinite(norm) && round.rule.can_be_applied() && round.pending && !failure_;
    round.applied = applies;
    (applies ? stats_.updates : stats_.skipped_updates) += 1;
  }
  if (applies) {
    apply(step);
  } else {
    for (const int rank : local_) finish_update(step, rank);
  }
}

void Pipeline::apply(std::int64_t step) {
  std::int64_t bytes = 0;
  for (const int rank : local_) bytes = std::max(bytes, work_.sum_bytes(rank));
  const int parts = work_.parts_for(bytes, executor_.limit());
  UpdateRound& round = update_round(step);  // stays this step's while its work runs
  const BatchIds* batch = nullptr;
  {
    Lock lock(mutex_);
    batch = batches_[round.batch].get();
    for (auto& rank : round.ranks) rank.parts_left = parts;
  }
  parallel(
      static_cast<int>(local_.size()) * parts,
      [this, step, batch, parts, &round](int job) {
        const int rank = local_[job / parts];
        const std::int64_t saturated =
            work_.apply(*batch, round.rule, round.norm, round.ranks[rank], rank, job % parts, parts);
        bool last = false;
        {
          Lock lock(mutex_);
          stats_.saturated += saturated;
          last = --round.ranks[rank].parts_left == 0;
        }
        if (last) finish_update(step, rank);
      },
      [] {});
}

void Pipeline::write_results(const UpdateRound& round, const UpdateRound::Rank& rank) const {
  *rank.results.norm = round.norm;
  *rank.results.valid = round.applied ? 1 : 0;
  *rank.results.pending = round.applies_nothing ? 0 : 1;
}

void Pipeline::finish_update(std::int64_t step, int rank) {
  std::int64_t lookup = 0;
  {
    Lock lock(mutex_);
    lookup = end_update(step, rank);
  }
  if (lookup != 0) arrive(comm::Channel::kLookup, lookup, rank);
}

std::int64_t Pipeline::end_update(std::int64_t step, int rank) {
  UpdateRound& round = update_round(step);
  UpdateRound::Rank& mine = round.ranks[rank];
  mine.ready = true;
  record("update_ready", rank, step);
  later(mine.lease);
  if (mine.done) {
    write_results(round, mine);
    stats_.exposed_wait_ns += nanoseconds_since(mine.done_called);
    consume_update(rank, round);
    later(mine.done);
  }
  if (--round.ranks_left == 0) {
    round.complete = true;
    stop_running(round);
  }
  LookupRound& next = lookup_round(ranks_[rank].machine.lookup().armed);
  LookupRound::Rank& looks_up = next.ranks[rank];
  if (failure_ || next.is_void || !std::exchange(looks_up.waits_for_update, false)) return 0;
  next.note_wait();
  looks_up.lent = looks_up.arrived = true;
  return number_of(next);
}

void Pipeline::consume_update(int rank, UpdateRound& round) {
  ranks_[rank].machine.update_done();
  if (round.batch >= 0) release(ranks_[rank].staged_batch);
}

float Pipeline::update_done(int rank, UpdateResults results, Completion completion) {
  std::int64_t step = 0;
  {
    Lock lock(mutex_);
    require_working();
    ++stats_.update_done_calls;
    Rank& me = ranks_[rank];
    step = me.machine.update().armed;
    UpdateRound& round = update_round(step);
    StateMachine::Refusal refusal = me.machine.check_update_done();
    if (!refusal && round.ranks[rank].results.norm != nullptr) refusal = called_twice("update_done", step);
    if (refuses(me, std::move(refusal), "update_done") || round.is_void) {
      if (round.is_void && me.machine.update().pending()) consume_update(rank, round);
      results.write_nothing_done();
      lock.unlock();
      completion(nullptr);
      return pin_of(step);
    }
    record("update_done", rank, step);
    UpdateRound::Rank& mine = round.ranks[rank];
    mine.results = results;
    if (!mine.ready) {
      mine.done = std::move(completion);
      mine.done_called = Clock::now();
      round.note_wait();
      if (mine.lent || mine.table == nullptr) return pin_of(step);
      mine.lent = mine.arrived = true;
      const std::int64_t number = number_of(round);
      lock.unlock();
      arrive(comm::Channel::kUpdate, number, rank);
      return pin_of(step);
    }
    write_results(round, mine);
    consume_update(rank, round);
  }
  completion(nullptr);
  return pin_of(step);
}

}  // namespace async_emb::context
