// The calls and the work of lookups.
#include "context/pipeline.h"

#include <cstring>
#include <limits>
#include <utility>

#include "context/clean_ids.h"
#include "cpu/huge_pages.h"

namespace async_emb::context {

float Pipeline::lookup_begin(int rank, const DLTensor& ids, std::int64_t rows) {
  return begin_lookup(rank, ids, rows, false);
}

float Pipeline::lookup_begin_beside_update(int rank, const DLTensor& ids) {
  std::int64_t rows = 0;
  {
    Lock lock(mutex_);
    rows = ranks_[rank].last_rows;  // an update of any other table has failed
  }
  return begin_lookup(rank, ids, rows, true);
}

float Pipeline::begin_lookup(int rank, const DLTensor& ids, std::int64_t rows, bool beside_update) {
  check_.lookup_start(rank, ids, rows);
  std::int64_t step = 0;
  std::int32_t* destination = nullptr;
  const std::int64_t first_position = spec_.token_blocks[rank] * spec_.tokens_per_rank;
  {
    Lock lock(mutex_);
    require_working();
    Rank& me = ranks_[rank];
    ++stats_.lookup_begin_calls;
    const std::int64_t start = ++me.starts[static_cast<std::size_t>(comm::Channel::kLookup)];
    StateMachine::Refusal refusal = beside_update
                                        ? me.machine.check_lookup_start_beside_update(me.last_table != nullptr)
                                        : me.machine.check_lookup_start();
    if (refuses(me, std::move(refusal), "lookup_start")) {
      const float pin = pin_of(me.machine.lookup().armed);
      if (peers_ != nullptr && me.lookup_open && !lookup_round(me.machine.lookup().armed).ranks[rank].arrived) {
        // The peers hear of starts in their order, and the one before has yet to come to them.
        fail_and_throw({FailureKind::kInvalidArgument, refusal_.value_or("a call of this step was refused")});
      }
      lock.unlock();
      if (peers_ != nullptr) arrive(comm::Channel::kLookup, start, rank);
      return pin;
    }
    me.lookup_open = true;
    step = me.machine.lookup_start();
    record("lookup_begin", rank, step);
    LookupRound& round = lookup_round(step);
    if (round.step != step) {
      static_cast<Progress&>(round) = Progress{.step = step, .start = start, .begin_call = me.calls};
      round.batch = take_batch();
      batches_[round.batch]->rows = rows;
      round.rows = rows;
      round.ranks_left = 0;
      for (auto& peer : round.ranks) peer = {};
    } else if (auto failure = check_.rows_of_peers(rank, step, rows, round.rows)) {
      fail_and_throw(std::move(*failure));
    }
    round.ranks[rank].begun = true;
    if (me.calls >= refused_call_) finish_void(round);  // a peer has refused this very call
    hold(round.batch);                                  // by this rank, until another lookup is consumed
    destination = batches_[round.batch]->ids.as<std::int32_t>() + first_position;
  }
  const core::IdReport cleaned = clean_ids(ids, spec_, rows, destination);
  Lock lock(mutex_);
  stats_.tokens += spec_.tokens_per_rank;
  stats_.bad_ids += cleaned.bad;
  stats_.padding_ids += cleaned.padding;
  if (cleaned.bad > 0 && spec_.id_policy == core::IdPolicy::kError) {
    note({.step = step,
          .position = first_position + cleaned.first_bad_position,
          .id = cleaned.first_bad_id,
          .rows = rows});
  }
  return pin_of(step);
}

void Pipeline::take_offer(int rank, LookupRound& round, const DLTensor& table) {
  if (auto failure = check_.lookup_table(rank, round.step, table, round.rows)) fail_and_throw(std::move(*failure));
  LookupRound::Rank& mine = round.ranks[rank];
  if (mine.table != nullptr && mine.table != data_of(table)) {
    fail_and_throw({FailureKind::kUnmatchedBuffers, check_.where("lookup_start", rank) + " of step " +
                                                        std::to_string(round.step) +
                                                        ": XLA has put a copy of the table between two calls"});
  }
  mine.table = data_of(table);
  ranks_[rank].last_table = mine.table;
  ranks_[rank].last_rows = round.rows;
}

void Pipeline::lookup_offer(int rank, const DLTensor& table) {
  Lock lock(mutex_);
  require_working();
  Rank& me = ranks_[rank];
  LookupRound& round = lookup_round(me.machine.lookup().armed);
  if (!me.lookup_open || round.is_void) return;
  take_offer(rank, round, table);
}

void Pipeline::lookup_lease(int rank, const DLTensor& table, Completion completion) {
  std::int64_t number = 0;
  {
    Lock lock(mutex_);
    Rank& me = ranks_[rank];
    const std::int64_t step = me.machine.lookup().armed;
    LookupRound& round = lookup_round(step);
    if (failure_ && me.lookup_open && round.running && round.ranks[rank].lent) {
      // The done has lent the table to work that still runs: it comes back, with the failure, when that has ended.
      me.lookup_open = false;
      round.ranks[rank].lease = std::move(completion);
      return;
    }
    require_working();
    ++stats_.lookup_lease_calls;
    if (!me.lookup_open || round.step != step || round.is_void) {
      lock.unlock();
      completion(nullptr);
      return;
    }
    me.lookup_open = false;
    take_offer(rank, round, table);
    record("lookup_lease", rank, step);
    LookupRound::Rank& mine = round.ranks[rank];
    if (round.complete) {
      lock.unlock();
      completion(nullptr);
      return;
    }
    const UpdateRound& update = update_round(me.machine.update().armed);
    if (!mine.lent && me.machine.update().pending() && !update.ranks[rank].ready && !update.is_void) {
      mine.lease = std::move(completion);
      mine.waits_for_update = true;
      return;
    }
    if (mine.lent || !at_once_) {
      mine.lease = std::move(completion);
      round.note_wait();
    }
    if (mine.lent) {
      // The done has lent it. Now that the lease holds the table, the done need not wait for the peers.
      mine.done_lends = false;
      if (mine.ready) finish_lookup(rank, round);
      return;
    }
    mine.lent = mine.arrived = true;
    number = number_of(round);
  }
  arrive(comm::Channel::kLookup, number, rank);
  if (!at_once_) return;
  const std::optional<Failure> failed = failure();
  completion(failed ? &*failed : nullptr);
}

void Pipeline::run_lookup(std::int64_t step) {
  {
    Lock lock(mutex_);
    LookupRound& round = lookup_round(step);
    if (failure_ || round.is_void || round.step != step) return;  // whoever waited was answered
    begin_running(round);
  }
  gather(step);
}

void Pipeline::gather(std::int64_t step) {
  const int parts = work_.parts_for(work_.lookup_bytes(), executor_.limit());
  {
    Lock lock(mutex_);
    LookupRound& round = lookup_round(step);
    round.ranks_left = static_cast<int>(local_.size());
    for (const int rank : local_) {
      round.ranks[rank].parts_left = parts;
      round.tables[rank] = round.ranks[rank].table;
    }
    running_ += static_cast<int>(local_.size()) * parts - 1;
    ++stats_.lookups;
    stats_.bytes_moved += moved_bytes();
  }
  if (at_once_) {
    gather_part(step, local_.front(), 0, 1);
    return;
  }
  for (const int rank : local_) {
    for (int part = 0; part < parts; ++part) {
      executor_.submit(
          [self = shared_from_this(), step, rank, part, parts] { self->gather_part(step, rank, part, parts); });
    }
  }
}

void Pipeline::gather_part(std::int64_t step, int rank, int part, int parts) {
  LookupRound& round = lookup_round(step);  // stays this step's while its work runs
  LookupRound::Rank& mine = round.ranks[rank];
  const BatchIds* batch = nullptr;
  {
    Lock lock(mutex_);
    // Straight into XLA's output where the done was called already, else into the arena.
    if (mine.destination == nullptr) {
      mine.destination = mine.out != nullptr ? mine.out : work_.arena().rows[rank].as<void>();
    }
    batch = batches_[round.batch].get();
  }
  guarded("lookup", [&] {
    work_.gather(*batch, round.tables, rank, part, parts, mine.destination);
    if (peers_ != nullptr) peers_->unpack_rows(rank, part, parts, mine.destination);
  });

  Lock lock(mutex_);
  --running_;
  if (--mine.parts_left == 0) {
    mine.ready = true;
    record("lookup_ready", rank, step);
    if (mine.done && !mine.done_lends) finish_lookup(rank, round);
    if (--round.ranks_left == 0) {
      round.complete = true;
      round.running = false;
      for (const int peer : local_) {
        later(round.ranks[peer].lease);
        if (round.ranks[peer].done) finish_lookup(peer, round);
      }
    }
  }
  if (failure_) fail_waiting();
  if (running_ == 0) settled_.notify_all();
}

void Pipeline::finish_lookup(int rank, LookupRound& round) {
  LookupRound::Rank& mine = round.ranks[rank];
  if (!mine.done) return;
  if (mine.destination != mine.out) {
    // The done came while the work was writing to the arena. Nobody else touches either buffer.
    std::memcpy(mine.out, mine.destination, work_.lookup_bytes());
  }
  stats_.exposed_wait_ns += nanoseconds_since(mine.done_called);
  consume_lookup(rank, round);
  later(mine.done);
}

void Pipeline::consume_lookup(int rank, LookupRound& round) {
  Rank& me = ranks_[rank];
  me.machine.lookup_done();
  release(me.consumed_batch);
  me.consumed_batch = round.batch;  // takes over the hold of lookup_begin
}

StateMachine::Refusal Pipeline::check_same_ids(int rank, float pin, const DLTensor& ids) const {
  check_.lookup_done_ids(rank, ids);
  const std::int64_t first_position = spec_.token_blocks[rank] * spec_.tokens_per_rank;
  const std::int32_t* armed = nullptr;
  std::int64_t rows = 0;
  std::int64_t step = 0;
  {
    Lock lock(mutex_);
    const StateMachine& machine = ranks_[rank].machine;
    if (machine.check_lookup_done(pin)) return std::nullopt;  // the call says so itself
    step = machine.lookup().armed;
    const LookupRound& round = lookups_[step % 2];
    armed = batches_[round.batch]->ids.as<std::int32_t>() + first_position;
    rows = round.rows;
  }
  // Without the lock: the batch is this rank's until it has consumed the step.
  const IdDifference difference = first_difference(ids, spec_, rows, armed);
  if (difference.position < 0) return std::nullopt;
  return other_batch(step, first_position + difference.position, armed[difference.position], difference.given);
}

void Pipeline::lookup_done(int rank, float pin, const DLTensor* ids, const DLTensor& rows, Completion completion) {
  check_.rows(rows);
  cpu::prefer_huge_pages(data_of(rows), work_.lookup_bytes());
  StateMachine::Refusal other_batch;
  if (ids != nullptr) other_batch = check_same_ids(rank, pin, *ids);
  {
    Lock lock(mutex_);
    require_working();
    ++stats_.lookup_done_calls;
    Rank& me = ranks_[rank];
    const std::int64_t step = me.machine.lookup().armed;
    LookupRound& round = lookup_round(step);
    StateMachine::Refusal refusal = me.machine.check_lookup_done(pin);
    if (!refusal && round.ranks[rank].out != nullptr) refusal = called_twice("lookup_done", step);
    if (!refusal) refusal = std::move(other_batch);
    if (refuses(me, std::move(refusal), "lookup_done") || round.is_void) {
      if (round.is_void && me.machine.lookup().pending()) consume_lookup(rank, round);
      lock.unlock();
      work_.fill_refused(data_of(rows));
      completion(nullptr);
      return;
    }
    record("lookup_done", rank, step);
    LookupRound::Rank& mine = round.ranks[rank];
    mine.out = data_of(rows);
    if (at_once_ && !mine.lent && !mine.waits_for_update && mine.table != nullptr) {
      mine.lent = mine.arrived = true;
      const std::int64_t number = number_of(round);
      const Clock::time_point called = Clock::now();
      lock.unlock();
      arrive(comm::Channel::kLookup, number, rank);
      lock.lock();
      require_working();
      stats_.exposed_wait_ns += nanoseconds_since(called);
    }
    if (!mine.ready) {
      mine.done = std::move(completion);
      mine.done_called = Clock::now();
      round.note_wait();
      if (mine.lent || mine.waits_for_update || mine.table == nullptr) return;
      mine.lent = mine.done_lends = mine.arrived = true;
      const std::int64_t number = number_of(round);
      lock.unlock();
      arrive(comm::Channel::kLookup, number, rank);
      return;
    }
    if (mine.destination != mine.out) {
      lock.unlock();
      // The arena's rows stay this step's until this rank has consumed them: the next step runs only when all have.
      std::memcpy(mine.out, mine.destination, work_.lookup_bytes());
      lock.lock();
    }
    consume_lookup(rank, round);
  }
  completion(nullptr);
}

}  // namespace async_emb::context
