#include "context/pipeline.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <span>
#include <utility>

#include "context/clean_ids.h"
#include "context/timeline.h"

namespace async_emb::context {
namespace {

std::int64_t nanoseconds_since(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

void write_nothing_done(const UpdateResults& results) {
  *results.norm = 0;
  *results.valid = 0;
  *results.pending = 0;
}

// A done that still waits owns its step; a second one would take its place, and nobody would answer the first.
std::string called_twice(const char* call, std::int64_t step) {
  return std::string(call) + " of step " + std::to_string(step) +
         " was called again while the first call waits: call it once for each start";
}

}  // namespace

Pipeline::Pipeline(ContextSpec spec, std::vector<std::int64_t> devices,
                   std::unique_ptr<comm::Communicator> communicator, Executor& executor)
    : spec_(std::move(spec)),
      devices_(std::move(devices)),
      communicator_(std::move(communicator)),
      executor_(executor),
      work_(spec_),
      ranks_(spec_.group_size) {
  for (LookupRound& round : lookups_) {
    round.ranks.resize(spec_.group_size);
    round.tables.resize(spec_.group_size);
  }
  for (UpdateRound& round : updates_) round.ranks.resize(spec_.group_size);
}

// ---- what every call begins with ----

std::string Pipeline::where(const char* call, int rank) const {
  return "async_emb '" + spec_.name + "' " + call + " on rank " + std::to_string(rank) + " (device " +
         std::to_string(devices_[rank]) + ")";
}

void Pipeline::record(const char* name, int rank, std::int64_t step) const {
  Timeline::shared().record(name, spec_.name, devices_[rank], step);
}

void Pipeline::require_working() const {
  if (failure_) throw Error(*failure_);
}

void Pipeline::fail_and_throw(Failure failure) {
  if (!failure_) failure_ = std::move(failure);
  fail_waiting();
  throw Error(*failure_);
}

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
    refusal_ = where(call, static_cast<int>(&rank - ranks_.data())) + ": " + *refusal +
               ". Nothing was applied; tables and state are as before this call";
  }
  void_rounds();
  return true;
}

// ---- batches of ids ----

int Pipeline::take_batch() {
  for (std::size_t i = 0; i < batches_.size(); ++i) {
    if (batches_[i]->holders == 0) {
      batches_[i]->indexed = false;
      return static_cast<int>(i);
    }
  }
  batches_.push_back(std::make_unique<BatchIds>(spec_.tokens()));
  return static_cast<int>(batches_.size()) - 1;
}

void Pipeline::hold(int batch) { ++batches_[batch]->holders; }

void Pipeline::release(int& batch) {
  if (batch >= 0) --batches_[batch]->holders;
  batch = -1;
}

// ---- lookup ----

void Pipeline::note_bad_id(std::int64_t step, std::int64_t position, std::int64_t id, std::int64_t rows) {
  const bool earlier = !id_problem_ || step < id_problem_->step ||
                       (step == id_problem_->step && !id_problem_->too_many_unique && position < id_problem_->position);
  if (earlier) id_problem_ = IdProblem{.step = step, .position = position, .id = id, .rows = rows};
}

float Pipeline::lookup_begin(int rank, const DLTensor& ids, std::int64_t rows) {
  if (!same_type(ids.dtype, kInt32) && !same_type(ids.dtype, kInt64)) {
    throw Error(FailureKind::kInvalidArgument,
                where("lookup_start", rank) + ": token_ids are " + describe(ids) + ", but must be int32 or int64");
  }
  if (element_count(ids) != spec_.tokens_per_rank) {
    throw Error(
        FailureKind::kInvalidArgument,
        where("lookup_start", rank) + ": token_ids are " + describe(ids) + ", but the context has " +
            std::to_string(spec_.tokens_per_rank) +
            " tokens on each rank: call lookup_start inside jax.shard_map, with token_ids sharded over data_axis");
  }
  if (rows < 0 || rows > std::numeric_limits<std::int32_t>::max()) {
    throw Error(FailureKind::kInvalidArgument, where("lookup_start", rank) + ": the table has " + std::to_string(rows) +
                                                   " rows, but rows are numbered by 32-bit integers");
  }
  std::int64_t step = 0;
  std::int32_t* destination = nullptr;
  const std::int64_t first_position = spec_.token_blocks[rank] * spec_.tokens_per_rank;
  {
    Lock lock(mutex_);
    require_working();
    Rank& me = ranks_[rank];
    ++stats_.lookup_begin_calls;
    if (refuses(me, me.machine.check_lookup_start(), "lookup_start")) return pin_of(me.machine.lookup().armed);
    me.lookup_open = true;
    step = me.machine.lookup_start();
    record("lookup_begin", rank, step);
    LookupRound& round = lookup_round(step);
    if (round.step != step) {
      static_cast<Progress&>(round) = Progress{.step = step, .begin_call = me.calls};
      round.batch = take_batch();
      batches_[round.batch]->rows = rows;
      round.rows = rows;
      round.ranks_left = 0;
      for (auto& peer : round.ranks) peer = {};
    } else if (round.rows != rows) {
      fail_and_throw({FailureKind::kInvalidArgument, where("lookup_start", rank) + " of step " + std::to_string(step) +
                                                         ": the table has " + std::to_string(rows) + " rows here and " +
                                                         std::to_string(round.rows) + " on another rank"});
    }
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
    note_bad_id(step, first_position + cleaned.first_bad_position, cleaned.first_bad_id, rows);
  }
  return pin_of(step);
}

void Pipeline::check_table(const DLTensor& table, std::int64_t rows) const {
  const std::int64_t shape[] = {rows, spec_.shard_width()};
  require(table, "table", dlpack_type(spec_.dtype), shape);
}

void Pipeline::take_offer(int rank, LookupRound& round, const DLTensor& table) {
  const std::string here = where("lookup_start", rank) + " of step " + std::to_string(round.step) + ": ";
  try {
    check_table(table, round.rows);
  } catch (const Error& error) {
    fail_and_throw({error.kind(), here + error.what()});
  }
  LookupRound::Rank& mine = round.ranks[rank];
  if (mine.table != nullptr && mine.table != data_of(table)) {
    fail_and_throw({FailureKind::kUnmatchedBuffers, here + "XLA has put a copy of the table between two calls"});
  }
  mine.table = data_of(table);
  ranks_[rank].last_table = mine.table;
}

void Pipeline::lookup_offer(int rank, const DLTensor& table) {
  Lock lock(mutex_);
  require_working();
  Rank& me = ranks_[rank];
  LookupRound& round = lookup_round(me.machine.lookup().armed);
  if (!me.lookup_open || round.is_void) return;
  take_offer(rank, round, table);
}

void Pipeline::arrive(comm::Channel channel, std::int64_t step, int rank) {
  // The completions are the round's from here on, so an exception may only reach a caller through them.
  guarded(channel == comm::Channel::kLookup ? "lookup_start" : "update start", [&] {
    communicator_->arrive(channel, step, rank, [self = shared_from_this(), channel, step] {
      channel == comm::Channel::kLookup ? self->run_lookup(step) : self->run_update(step);
    });
  });
}

void Pipeline::lookup_lease(int rank, const DLTensor& table, Completion completion) {
  std::int64_t step = 0;
  {
    Lock lock(mutex_);
    Rank& me = ranks_[rank];
    step = me.machine.lookup().armed;
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
    mine.lease = std::move(completion);
    round.note_wait();
    if (mine.lent) {
      // The done has lent it. Now that the lease holds the table, the done need not wait for the peers.
      mine.done_lends = false;
      if (mine.ready) finish_lookup(rank, round);
      return;
    }
    mine.lent = true;
  }
  arrive(comm::Channel::kLookup, step, rank);
}

void Pipeline::run_lookup(std::int64_t step) {
  const int parts = work_.parts_for(work_.lookup_bytes(), executor_.limit());
  {
    Lock lock(mutex_);
    LookupRound& round = lookup_round(step);
    if (failure_ || round.is_void || round.step != step) return;  // whoever waited was answered
    round.running = true;
    round.ranks_left = spec_.group_size;
    for (int rank = 0; rank < spec_.group_size; ++rank) {
      round.ranks[rank].parts_left = parts;
      round.tables[rank] = round.ranks[rank].table;
    }
    running_ += spec_.group_size * parts;
    ++stats_.lookups;
    stats_.bytes_moved += work_.lookup_bytes() * (spec_.group_size - 1);
  }
  for (int rank = 0; rank < spec_.group_size; ++rank) {
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
  guarded("lookup", [&] { work_.gather(*batch, round.tables, rank, part, parts, mine.destination); });

  Lock lock(mutex_);
  --running_;
  if (--mine.parts_left == 0) {
    mine.ready = true;
    record("lookup_ready", rank, step);
    if (mine.done && !mine.done_lends) finish_lookup(rank, round);
    if (--round.ranks_left == 0) {
      round.complete = true;
      round.running = false;
      for (int peer = 0; peer < spec_.group_size; ++peer) {
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
  if ((!same_type(ids.dtype, kInt32) && !same_type(ids.dtype, kInt64)) || element_count(ids) != spec_.tokens_per_rank) {
    throw Error(FailureKind::kInvalidArgument, where("lookup_done", rank) + ": token_ids are " + describe(ids) +
                                                   ", but the context has " + std::to_string(spec_.tokens_per_rank) +
                                                   " int32 or int64 tokens on each rank");
  }
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
  return "lookup_done was given token_ids of another batch: step " + std::to_string(step) + " was armed with row " +
         std::to_string(armed[difference.position]) + " at position " +
         std::to_string(first_position + difference.position) + ", but token_ids have " +
         std::to_string(difference.given) +
         " there (-1 stands for an id that reads zeros); pass the batch whose ids went to lookup_start";
}

void Pipeline::lookup_done(int rank, float pin, const DLTensor* ids, const DLTensor& rows, Completion completion) {
  const std::int64_t shape[] = {spec_.tokens_per_rank, spec_.emb_width};
  require(rows, "rows", dlpack_type(spec_.dtype), shape);
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
    if (!mine.ready) {
      mine.done = std::move(completion);
      mine.done_called = Clock::now();
      round.note_wait();
      if (mine.lent || mine.table == nullptr) return;
      mine.lent = mine.done_lends = true;
      lock.unlock();
      arrive(comm::Channel::kLookup, step, rank);
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

// ---- update ----

float Pipeline::stage_update(int rank, const DLTensor& grads, const DLTensor* segment_ids,
                             const DLTensor* unique_tokens, bool pending) {
  const std::int64_t shape[] = {spec_.tokens_per_rank, spec_.emb_width};
  require(grads, "grads", dlpack_type(spec_.dtype), shape);
  if ((segment_ids == nullptr) != (unique_tokens == nullptr)) {
    throw Error(FailureKind::kInvalidArgument,
                where("stage_update", rank) + ": segment_ids and unique_tokens go together; give both or neither");
  }
  if (segment_ids != nullptr) {
    const std::int64_t tokens[] = {spec_.tokens_per_rank};
    const std::int64_t unique[] = {spec_.num_unique};
    require(*segment_ids, "segment_ids", kInt32, tokens);
    require(*unique_tokens, "unique_tokens", kInt32, unique);
  }
  if (spec_.lookup_only) {
    throw Error(FailureKind::kInvalidArgument, where("stage_update", rank) + ": this context only looks up");
  }
  const std::int64_t first_position = spec_.token_blocks[rank] * spec_.tokens_per_rank;
  std::int32_t* own_ids = nullptr;
  std::int64_t rows = 0;
  std::int64_t stage = 0;
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
    if (segment_ids == nullptr) {
      me.staged_batch = me.consumed_batch;
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
  const std::int64_t bytes = work_.lookup_bytes();
  std::memcpy(work_.arena().grads.as<char>() + spec_.token_blocks[rank] * bytes, data_of(grads), bytes);
  if (own_ids != nullptr) {
    const core::IdReport cleaned = ids_of_segments(*segment_ids, *unique_tokens, spec_, rows, own_ids);
    Lock lock(mutex_);
    stats_.bad_ids += cleaned.bad;
    if (cleaned.bad > 0 && spec_.id_policy == core::IdPolicy::kError) {
      note_bad_id(ranks_[rank].machine.lookup().consumed, first_position + cleaned.first_bad_position,
                  cleaned.first_bad_id, rows);
    }
  }
  return pin_of(stage);
}

float Pipeline::update_begin(int rank, const UpdateRule& rule) {
  Lock lock(mutex_);
  require_working();
  ++stats_.update_begin_calls;
  Rank& me = ranks_[rank];
  if (refuses(me, me.machine.check_update_start(), "update start")) return pin_of(me.machine.update().armed);
  me.update_open = true;
  const bool staged = me.machine.update_start();
  const std::int64_t step = me.machine.update().armed;
  record("update_begin", rank, step);
  UpdateRound& round = update_round(step);
  if (round.step != step) {
    static_cast<Progress&>(round) = Progress{.step = step, .begin_call = me.calls};
    round.batch = staged ? me.staged_batch : -1;
    round.pending = true;
    round.rule = rule;
    round.norm = 0;
    round.applied = false;
    for (auto& peer : round.ranks) peer = {};
  }
  round.pending = round.pending && me.staged_pending;
  if (me.calls >= refused_call_) finish_void(round);  // a peer has refused this very call
  return pin_of(step);
}

void Pipeline::take_offer(int rank, UpdateRound& round, const DLTensor& table, const DLTensor& row_state,
                          const DLTensor* last_step) {
  const std::string here = where("update start", rank) + " of step " + std::to_string(round.step) + ": ";
  const std::int64_t rows = table.ndim == 2 ? table.shape[0] : -1;
  try {
    check_table(table, rows);
    const std::int64_t per_row[] = {rows};
    require(row_state, "row_state", kFloat32, per_row);
    if (last_step != nullptr) require(*last_step, "last_step", kInt32, per_row);
  } catch (const Error& error) {
    fail_and_throw({error.kind(), here + error.what()});
  }
  if (round.rule.lazy != (last_step != nullptr)) {
    fail_and_throw({FailureKind::kInvalidArgument,
                    here + (round.rule.lazy ? "the lazy rule needs last_step" : "only the lazy rule takes last_step")});
  }
  if (round.batch >= 0 && rows < batches_[round.batch]->rows) {
    fail_and_throw({FailureKind::kInvalidArgument, here + "the table has " + std::to_string(rows) +
                                                       " rows, but the staged gradients are for one with at "
                                                       "least " +
                                                       std::to_string(batches_[round.batch]->rows) +
                                                       ": update the table that was looked up"});
  }
  const void* const last_table = ranks_[rank].last_table;
  if (round.batch >= 0 && last_table != nullptr && data_of(table) != last_table) {
    fail_and_throw({FailureKind::kUnmatchedBuffers,
                    here +
                        "lookup and update see different table buffers, so XLA has put a copy between them. Thread "
                        "the table through every call (use the table that lookup_start returns) and donate it to the "
                        "jitted step (jax.jit(step, donate_argnums=...))"});
  }
  UpdateRound::Rank& mine = round.ranks[rank];
  mine.table = data_of(table);
  mine.row_state = static_cast<float*>(data_of(row_state));
  mine.last_step = last_step != nullptr ? static_cast<std::int32_t*>(data_of(*last_step)) : nullptr;
  round.rows = rows;
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
  std::int64_t step = 0;
  {
    Lock lock(mutex_);
    Rank& me = ranks_[rank];
    step = me.machine.update().armed;
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
      fail_and_throw({FailureKind::kUnmatchedBuffers, where("update start", rank) + " of step " + std::to_string(step) +
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
  }
  arrive(comm::Channel::kUpdate, step, rank);
}

void Pipeline::run_update(std::int64_t step) {
  bool nothing_staged = false;
  {
    Lock lock(mutex_);
    UpdateRound& round = update_round(step);
    if (failure_ || round.is_void || round.step != step) return;
    round.running = true;
    round.ranks_left = spec_.group_size;
    ++running_;  // one chain of jobs; its last one takes this back
    nothing_staged = round.batch < 0;
  }
  executor_.submit([self = shared_from_this(), step, nothing_staged] {
    self->guarded("update", [&] {
      if (nothing_staged) {
        for (int rank = 0; rank < self->spec_.group_size; ++rank) self->finish_update(step, rank);
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
  if (!batch->indexed) work_.index(*batch);
  const std::int64_t limit = std::min(spec_.num_unique, spec_.tokens());
  if (batch->unique_count > limit) {
    Lock lock(mutex_);
    if (!id_problem_) {
      id_problem_ = IdProblem{
          .step = step, .rows = update_round(step).rows, .too_many_unique = true, .unique = batch->unique_count};
    }
    batch->unique_count = limit;  // as with dropped ids: the largest ones train nothing this time
    batch->indexed = false;       // counted again, and reported again, where the batch is staged once more
  }
  std::int64_t bytes = 0;
  for (int rank = 0; rank < spec_.group_size; ++rank) bytes = std::max(bytes, work_.sum_bytes(rank));
  const int parts = work_.parts_for(bytes, executor_.limit());
  parallel(
      spec_.group_size * parts, [this, batch, parts](int job) { work_.sum(*batch, job / parts, job % parts, parts); },
      [this, step] { decide(step); });
}

void Pipeline::decide(std::int64_t step) {
  const BatchIds* batch = nullptr;
  {
    Lock lock(mutex_);
    batch = batches_[update_round(step).batch].get();
  }
  const float norm = work_.finish_norm(*batch);
  bool applies = false;
  {
    Lock lock(mutex_);
    UpdateRound& round = update_round(step);
    stats_.trained_tokens += batch->offsets.as<std::int32_t>()[batch->unique_count];
    stats_.unique_tokens += batch->unique_count;
    stats_.bytes_moved += work_.lookup_bytes() * (spec_.group_size - 1);
    round.norm = norm;
    // The last point at which a failure still leaves every byte as it was.
    applies = std::isfinite(norm) && round.pending && !failure_;
    round.applied = applies;
    (applies ? stats_.updates : stats_.skipped_updates) += 1;
  }
  if (applies) {
    apply(step);
  } else {
    for (int rank = 0; rank < spec_.group_size; ++rank) finish_update(step, rank);
  }
}

void Pipeline::apply(std::int64_t step) {
  std::int64_t bytes = 0;
  for (int rank = 0; rank < spec_.group_size; ++rank) bytes = std::max(bytes, work_.sum_bytes(rank));
  const int parts = work_.parts_for(bytes, executor_.limit());
  UpdateRound& round = update_round(step);  // stays this step's while its work runs
  const BatchIds* batch = nullptr;
  {
    Lock lock(mutex_);
    batch = batches_[round.batch].get();
    for (auto& rank : round.ranks) rank.parts_left = parts;
  }
  parallel(
      spec_.group_size * parts,
      [this, step, batch, parts, &round](int job) {
        const int rank = job / parts;
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
  *rank.results.pending = round.batch >= 0 ? 1 : 0;
}

void Pipeline::finish_update(std::int64_t step, int rank) {
  Lock lock(mutex_);
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
    round.running = false;
    --running_;
    if (failure_) fail_waiting();
    if (running_ == 0) settled_.notify_all();
  }
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
      write_nothing_done(results);
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
      mine.lent = true;
      lock.unlock();
      arrive(comm::Channel::kUpdate, step, rank);
      return pin_of(step);
    }
    write_results(round, mine);
    consume_update(rank, round);
  }
  completion(nullptr);
  return pin_of(step);
}

// ---- running work ----

void Pipeline::parallel(int count, std::function<void(int)> body, std::function<void()> then) {
  if (count == 1) {
    body(0);
    then();
    return;
  }
  struct Shared {
    std::atomic<int> left;
    std::function<void(int)> body;
    std::function<void()> then;
  };
  auto shared = std::make_shared<Shared>(count, std::move(body), std::move(then));
  for (int job = 0; job < count; ++job) {
    executor_.submit([self = shared_from_this(), shared, job] {
      self->guarded("update", [&] {
        shared->body(job);
        if (shared->left.fetch_sub(1, std::memory_order_acq_rel) == 1) shared->then();
      });
    });
  }
}

template <typename Body>
void Pipeline::guarded(const char* call, Body body) {
  try {
    body();
  } catch (const std::exception& error) {
    fail({FailureKind::kInternal, "async_emb '" + spec_.name + "' " + call + " failed: " + error.what()});
  }
}

void Pipeline::later(Completion& completion) {
  if (!completion) return;
  // A buffer may only go back without an error when all is well; the failure is copied, since it outlives this call.
  executor_.resume([completion = std::exchange(completion, nullptr), failure = failure_] {
    completion(failure ? &*failure : nullptr);
  });
}

// ---- refusals, failures, host calls ----

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
  for (int rank = 0; rank < spec_.group_size; ++rank) {
    LookupRound::Rank& mine = round.ranks[rank];
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
  for (int rank = 0; rank < spec_.group_size; ++rank) {
    UpdateRound::Rank& mine = round.ranks[rank];
    later(mine.lease);
    if (!mine.done) continue;
    write_nothing_done(mine.results);
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
  for (Rank& rank : ranks_) {
    rank.calls = 0;
    alike = alike && rank.machine == ranks_.front().machine;
    lookup_step = std::max(lookup_step, rank.machine.lookup().armed);
    update_step = std::max(update_step, rank.machine.update().armed);
    stages = std::max(stages, rank.machine.stages());
  }
  if (!alike) {
    for (auto& batch : batches_) batch->holders = 0;
    for (Rank& rank : ranks_) {
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

std::optional<IdProblem> Pipeline::take_id_problem() {
  Lock lock(mutex_);
  return std::exchange(id_problem_, std::nullopt);
}

void Pipeline::return_to_first_step() {
  Lock lock(mutex_);
  for (Rank& rank : ranks_) rank.machine.return_to_first_step();
}

std::optional<StagedGradients> Pipeline::staged() const {
  Lock lock(mutex_);
  const Rank& first = ranks_.front();
  if (!first.machine.staged()) return std::nullopt;
  StagedGradients result;
  const auto* ids = batches_[first.staged_batch]->ids.as<std::int32_t>();
  const char* grads = work_.arena().grads.as<char>();
  result.ids.assign(ids, ids + spec_.tokens());
  result.grads.assign(grads, grads + work_.arena().grads.bytes());
  for (const Rank& rank : ranks_) result.pending = result.pending && rank.staged_pending;
  return result;
}

void Pipeline::restore_staged(const StagedGradients& staged) {
  Lock lock(mutex_);
  require_working();
  if (static_cast<std::int64_t>(staged.ids.size()) != spec_.tokens() ||
      static_cast<std::int64_t>(staged.grads.size()) != work_.arena().grads.bytes()) {
    throw Error(FailureKind::kInvalidArgument,
                "async_emb '" + spec_.name + "': staged gradients of " + std::to_string(staged.ids.size()) +
                    " tokens and " + std::to_string(staged.grads.size()) + " bytes do not fit a context of " +
                    std::to_string(spec_.tokens()) + " tokens and " + std::to_string(work_.arena().grads.bytes()) +
                    " bytes: restore with the batch size and width that the snapshot was taken with");
  }
  for (const Rank& rank : ranks_) {
    if (rank.machine.staged() || rank.machine.update().pending() || rank.machine.lookup().pending()) {
      throw Error(
          FailureKind::kInvalidArgument,
          "async_emb '" + spec_.name + "': restore needs an idle context, but a step is under way: flush first");
    }
  }
  const int batch = take_batch();
  std::memcpy(batches_[batch]->ids.as<char>(), staged.ids.data(), staged.ids.size() * sizeof(std::int32_t));
  batches_[batch]->rows = 1 + std::int64_t{*std::max_element(staged.ids.begin(), staged.ids.end())};
  std::memcpy(work_.arena().grads.as<char>(), staged.grads.data(), staged.grads.size());
  for (Rank& rank : ranks_) {
    rank.last_table = nullptr;  // the next lookup brings it
    release(rank.staged_batch);
    rank.staged_batch = batch;
    rank.staged_pending = staged.pending;
    hold(batch);
    rank.machine.adopt_staged();
  }
}

Stats Pipeline::stats() const {
  Lock lock(mutex_);
  return stats_;
}

std::int64_t Pipeline::arena_bytes() const {
  Lock lock(mutex_);
  std::int64_t total = work_.arena().bytes();
  for (const auto& batch : batches_) total += batch->bytes();
  return total;
}

void Pipeline::fail(Failure failure) {
  Lock lock(mutex_);
  if (!failure_) failure_ = std::move(failure);
  fail_waiting();
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

void Pipeline::check_timeout(Clock::time_point now) {
  Failure failure{FailureKind::kTimeout, ""};
  {
    Lock lock(mutex_);
    if (failure_) return;
    const auto late = [&](const Progress& round) {
      return round.step != 0 && round.waited_for && !round.running && !round.complete &&
             std::chrono::duration<double>(now - round.first_wait).count() > spec_.timeout_seconds;
    };
    const auto describe_missing = [&](comm::Channel channel, std::int64_t step, const char* call) {
      const std::vector<int> missing = communicator_->missing(channel, step);
      if (missing.empty() || !failure.message.empty()) return;  // the last one has just come
      char seconds[32];
      std::snprintf(seconds, sizeof(seconds), "%g", spec_.timeout_seconds);
      std::string text = "async_emb '" + spec_.name + "' timed out after " + seconds + " s in " + call + " of step " +
                         std::to_string(step) + ": missing";
      const char* separator = " ";
      for (int rank : missing) {
        text += separator + std::string("rank ") + std::to_string(rank) + " (device " + std::to_string(devices_[rank]) +
                ")";
        separator = ", ";
      }
      failure.message = text + ". Set ASYNC_EMB_TIMEOUT_SECONDS to wait longer";
    };
    for (const LookupRound& round : lookups_) {
      if (late(round)) describe_missing(comm::Channel::kLookup, round.step, "lookup_start");
    }
    for (const UpdateRound& round : updates_) {
      if (late(round)) describe_missing(comm::Channel::kUpdate, round.step, "update start");
    }
  }
  if (!failure.message.empty()) fail(std::move(failure));
}

void Pipeline::drain() {
  Lock lock(mutex_);
  settled_.wait(lock, [&] { return running_ == 0; });
}

}  // namespace async_emb::context
