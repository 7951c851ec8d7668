// The calls of a device pipeline: what each puts on XLA's stream.
#include "context/device_pipeline.h"

#include <algorithm>
#include <utility>

#include "context/timeline.h"

namespace async_emb::context {
namespace {

std::array<std::array<cuda::OwnedEvent, 3>, comm::kChannels> make_events(cuda::Device& device) {
  const auto three = [&] {
    return std::array<cuda::OwnedEvent, 3>{cuda::OwnedEvent(device), cuda::OwnedEvent(device),
                                           cuda::OwnedEvent(device)};
  };
  return {three(), three()};
}

ProcessMap map_of_one(const ContextSpec& spec) {
  ProcessMap map;
  map.names = {spec.process};
  map.ranks.emplace_back();
  for (int rank = 0; rank < spec.group_size; ++rank) map.ranks.front().push_back(rank);
  return map;
}

}  // namespace

DevicePipeline::Rank::Rank(const ContextSpec& spec, const core::ColumnLayout& layout, int rank,
                           const std::vector<cuda::Device*>& gpus)
    : device(*gpus[static_cast<std::size_t>(rank)]),
      arena(spec, layout, rank, gpus),
      refusal(device),
      events(make_events(device)),
      side(device) {}

DevicePipeline::DevicePipeline(ContextSpec spec, std::vector<std::int64_t> devices, std::vector<cuda::Device*> gpus)
    : DevicePipeline(spec, std::move(devices), std::move(gpus), map_of_one(spec), {}) {}

DevicePipeline::DevicePipeline(ContextSpec spec, std::vector<std::int64_t> devices, std::vector<cuda::Device*> gpus,
                               ProcessMap map, DeviceLinks links)
    : spec_(std::move(spec)),
      devices_(std::move(devices)),
      check_(spec_, devices_),
      layout_(spec_.group_size, spec_.emb_width, spec_.logical_width),
      element_(core::size_of(spec_.dtype)),
      arrivals_(map.local()),
      local_(arrivals_.ranks()) {
  if (spec_.group_size > cuda::kMaxRanks) {
    throw Error(FailureKind::kInvalidArgument,
                "async_emb context '" + spec_.name + "' has " + std::to_string(spec_.group_size) +
                    " ranks in a group, more than the " + std::to_string(cuda::kMaxRanks) + " that GPUs support");
  }
  make_ranks(gpus);
  for (auto& channel : rounds_) {
    for (Round& round : channel) round.ranks.resize(static_cast<std::size_t>(spec_.group_size));
  }
  if (map.size() == 1) return;
  for (const int rank : local_) {
    for (const int peer : local_) {
      if (of(rank).device.reads(of(peer).device)) continue;
      throw Error(FailureKind::kInvalidArgument, "async_emb context '" + spec_.name + "' spans processes, and " +
                                                     check_.where("the GPU", rank) +
                                                     " cannot read the memory of that of rank " + std::to_string(peer) +
                                                     " in the same process: start one process for each GPU");
    }
  }
  Rank& first = lead();
  const auto guard = first.device.activate();
  peer_refusals_.resize(static_cast<std::size_t>(spec_.group_size));
  for (int rank = 0; rank < spec_.group_size; ++rank) {
    if (map.process_of(rank) != map.self) peer_refusals_[static_cast<std::size_t>(rank)].emplace(first.device);
  }
  difference_.emplace(first.device);
  peer_bad_id_ = {first.device, 1};
  peer_counters_ = {first.device, 1};
  for (int channel = 0; channel < comm::kChannels; ++channel) ready_.emplace_back(first.device);
  const auto reached = [this](comm::Channel channel, Pulse::Mark mark) {
    const auto c = static_cast<int>(channel);
    const auto current = lead().device.activate();
    return lead().device.reached(mark == Pulse::Mark::kReady ? ready_[static_cast<std::size_t>(c)].get()
                                                             : lead().closed(c));
  };
  peers_ = std::make_unique<DevicePeers>(spec_, layout_, std::move(map), std::move(links), first.device, reached);
}

void DevicePipeline::make_ranks(const std::vector<cuda::Device*>& gpus) {
  ranks_.resize(static_cast<std::size_t>(spec_.group_size));
  for (const int rank : local_) {
    const auto guard = gpus[static_cast<std::size_t>(rank)]->activate();
    ranks_[static_cast<std::size_t>(rank)] = std::make_unique<Rank>(spec_, layout_, rank, gpus);
    Rank& me = of(rank);
    for (int i = 0; i < kBatches; ++i) {
      me.batches.push_back(std::make_unique<DeviceBatch>());
      me.batches.back()->ids = {me.device, spec_.tokens_per_rank};
    }
    me.device.launches().warm_up();
    if (me.arena.token_positions.get() != nullptr) {
      me.device.launches().write_positions(me.arena.token_positions.get(), spec_.tokens_per_rank, me.side.get());
      me.device.synchronize(me.side.get());
    }
  }
}

DevicePipeline::~DevicePipeline() {
  // A device that has failed cannot be waited for, and runs nothing any more. What XLA's stream still reads of the
  // arena is safe too: memory of a GPU is freed when the GPU is done with it.
  try {
    if (peers_ != nullptr) peers_->close();  // or the streams might wait for a process that has gone
    drain();
  } catch (const std::exception&) {
  }
}

void DevicePipeline::record(const char* name, int rank, std::int64_t step) const {
  Timeline::shared().record(name, spec_.name, devices_[static_cast<std::size_t>(rank)], step);
}

// One is armed, one consumed, one staged or in the update under way. A free one is always there: what no call holds, no
// work reads after the wait that the last call on XLA's stream has put there.
int DevicePipeline::take_batch(Rank& rank) {
  for (std::size_t i = 0; i < rank.batches.size(); ++i) {
    if (rank.batches[i]->holders == 0) return static_cast<int>(i);
  }
  throw Error(FailureKind::kInternal, "async_emb '" + spec_.name + "': more batches are under way than states allow");
}

void DevicePipeline::release(Rank& rank, int& batch) {
  if (batch >= 0) --rank.batches[static_cast<std::size_t>(batch)]->holders;
  batch = -1;
}

void DevicePipeline::write_pin(Rank& rank, std::int64_t step, float* pin, cuda::Stream stream) {
  if (pin != nullptr) rank.device.launches().write_pin(pin_of(step), pin, stream);
}

DevicePipeline::Round& DevicePipeline::open(int channel, std::int64_t step, int rank) {
  Round& round = this->round(channel, step);
  if (round.step != step) {
    round.step = step;
    round.start = of(rank).starts[static_cast<std::size_t>(channel)];
    round.begin_call = of(rank).calls;
    round.rows = -1;
    round.staged = round.works = false;
    round.running = round.enqueued = round.is_void = round.waited_for = false;
    for (auto& peer : round.ranks) peer = {};
  }
  if (of(rank).calls >= refused_call_) round.is_void = true;  // a peer has refused this very call
  return round;
}

void DevicePipeline::lookup_begin(int rank, const DLTensor& ids, const DLTensor& table, float* pin,
                                  cuda::Stream stream) {
  Lock lock(mutex_);
  const std::int64_t step = begin_lookup(lock, rank, ids, &table, stream);
  const auto guard = of(rank).device.activate();
  write_pin(of(rank), step, pin, stream);
}

void DevicePipeline::lookup_begin_beside_update(int rank, const DLTensor& ids, float* issued, float* pin,
                                                cuda::Stream stream) {
  Lock lock(mutex_);
  const std::int64_t step = begin_lookup(lock, rank, ids, nullptr, stream);
  const auto guard = of(rank).device.activate();
  write_pin(of(rank), step, issued, stream);
  write_pin(of(rank), step, pin, stream);
}

void DevicePipeline::lookup_show(int rank, const DLTensor& table) {
  Lock lock(mutex_);
  const std::int64_t step = of(rank).machine.lookup().armed;
  const void* const used = round(kLookup, step).ranks[static_cast<std::size_t>(rank)].table;
  if (!of(rank).machine.lookup().pending() || used == nullptr || used == data_of(table)) return;
  fail_and_throw({FailureKind::kUnmatchedBuffers, check_.where("lookup_start", rank) + " of step " +
                                                      std::to_string(step) +
                                                      ": XLA has put a copy of the table between two calls"});
}

std::int64_t DevicePipeline::begin_lookup(Lock& lock, int rank, const DLTensor& ids, const DLTensor* table,
                                          cuda::Stream stream) {
  std::int64_t rows = of(rank).rows;
  if (table != nullptr) rows = table->ndim == 2 ? table->shape[0] : 0;
  check_.lookup_start(rank, ids, rows);
  launch_rounds(lock, rank);
  require_working();
  Rank& me = of(rank);
  const auto guard = me.device.activate();
  ++stats_.lookup_begin_calls;
  ++me.starts[kLookup];
  StateMachine::Refusal refusal = table == nullptr
                                      ? me.machine.check_lookup_start_beside_update(me.last_table != nullptr)
                                      : me.machine.check_lookup_start();
  if (refuses(rank, std::move(refusal), "lookup_start")) {
    if (peers_ != nullptr) arrive_at_peers(kLookup, me.starts[kLookup], rank);
    return me.machine.lookup().armed;
  }
  const std::int64_t step = me.machine.lookup_start();
  record("lookup_begin", rank, step);
  Round& round = open(kLookup, step, rank);
  if (round.rows < 0) round.rows = rows;
  if (auto failure = check_.rows_of_peers(rank, step, rows, round.rows)) fail_and_throw(std::move(*failure));
  if (table != nullptr) {
    if (auto failure = check_.lookup_table(rank, step, *table, rows)) fail_and_throw(std::move(*failure));
    me.last_table = data_of(*table);
    me.rows = rows;
  }
  me.armed_batch = take_batch(me);
  DeviceBatch& batch = *me.batches[static_cast<std::size_t>(me.armed_batch)];
  batch.rows = rows;
  ++batch.holders;

  cuda::CleanIds job;
  job.ids = data_of(ids);
  job.wide = same_type(ids.dtype, kInt64);
  job.count = spec_.tokens_per_rank;
  job.rows = rows;
  job.policy = spec_.id_policy;
  job.has_padding = spec_.has_padding_id;
  job.padding_id = spec_.padding_id;
  job.out = batch.ids.get();
  job.counters = me.arena.counters.get();
  job.finding = me.arena.bad_id.get();
  job.report_bad = spec_.id_policy == core::IdPolicy::kError;
  job.step = step;
  job.first_position = spec_.token_blocks[static_cast<std::size_t>(rank)] * spec_.tokens_per_rank;
  me.device.launches().clean_ids(job, stream);
  if (peers_ != nullptr) {
    me.device.copy(me.arena.lookup_finding.get(), job.finding, me.arena.lookup_finding.bytes(), stream);
  }
  stats_.tokens += spec_.tokens_per_rank;
  round.ranks[static_cast<std::size_t>(rank)].ids = batch.ids.get();
  round.ranks[static_cast<std::size_t>(rank)].table = me.last_table;
  arrive(kLookup, round, rank, stream);
  return step;
}

void DevicePipeline::lookup_done(int rank, const float* pin, const DLTensor* ids, const DLTensor& rows,
                                 cuda::Stream stream) {
  check_.rows(rows);
  if (ids != nullptr) check_.lookup_done_ids(rank, *ids);
  Lock lock(mutex_);
  launch_rounds(lock, rank);
  require_working();
  Rank& me = of(rank);
  const auto guard = me.device.activate();
  ++stats_.lookup_done_calls;
  const std::int64_t step = me.machine.lookup().armed;
  Round& round = this->round(kLookup, step);
  // Whether the pin is the right one, only the device knows.
  const bool refused = refuses(rank, me.machine.check_lookup_done(pin_of(step)), "lookup_done");
  if (!refused) {
    record("lookup_done", rank, step);
    await_peers(lock, round);
  }
  cuda::DeliverRows deliver;
  deliver.rows = me.arena.rows.get();
  deliver.out = data_of(rows);
  deliver.count = spec_.tokens_per_rank * spec_.emb_width;
  deliver.dtype = spec_.dtype;
  if (refused || round.is_void) {
    deliver.skip = me.arena.always.get();
    me.device.launches().deliver_rows(deliver, stream);
  } else {
    me.dones[me.next_done++ % me.dones.size()] = {me.calls, step};
    const DeviceBatch& batch = *me.batches[static_cast<std::size_t>(me.armed_batch)];
    cuda::CheckLookup check;
    check.pin = pin;
    check.expected = pin_of(step);
    if (ids != nullptr) {
      check.ids = data_of(*ids);
      check.wide = same_type(ids->dtype, kInt64);
    }
    check.count = spec_.tokens_per_rank;
    check.rows = batch.rows;
    check.policy = spec_.id_policy;
    check.has_padding = spec_.has_padding_id;
    check.padding_id = spec_.padding_id;
    check.armed = batch.ids.get();
    check.call = me.calls;
    check.refusal = me.refusal.get();
    check.first_differing = me.arena.first_differing.get();
    if (pin != nullptr) me.device.launches().check_lookup(check, stream);
    me.device.wait(stream, me.closed(kLookup));
    look_for_refusals(kLookup, rank, stream);
    deliver.skip = me.arena.done_skip[kLookup].get();
    me.device.launches().deliver_rows(deliver, stream);
  }
  if (!me.machine.lookup().pending()) return;
  if (refused && !round.is_void) return;
  me.machine.lookup_done();
  release(me, me.consumed_batch);
  me.consumed_batch = std::exchange(me.armed_batch, -1);
}

void DevicePipeline::stage_update(int rank, const DLTensor& grads, const DLTensor* segment_ids,
                                  const DLTensor* unique_tokens, const DLTensor& pending, float* pin,
                                  cuda::Stream stream) {
  check_.stage_update(rank, grads, segment_ids, unique_tokens);
  CallChecks::pending(pending);
  Lock lock(mutex_);
  launch_rounds(lock, rank);
  require_working();
  Rank& me = of(rank);
  const auto guard = me.device.activate();
  const cuda::Launches& launches = me.device.launches();
  ++stats_.stage_calls;
  if (refuses(rank, me.machine.check_stage(), "stage_update")) return write_pin(me, me.machine.stages(), pin, stream);
  const std::int64_t stage = me.machine.stage();
  const std::int64_t step = me.machine.lookup().consumed;
  record("stage_update", rank, step);
  me.staged_batch = me.consumed_batch;
  if (segment_ids != nullptr) {
    const std::int64_t rows = me.batches[static_cast<std::size_t>(me.consumed_batch)]->rows;
    me.staged_batch = take_batch(me);
    DeviceBatch& given = *me.batches[static_cast<std::size_t>(me.staged_batch)];
    given.rows = rows;
    cuda::IdsOfSegments job;
    job.segment_ids = static_cast<const std::int32_t*>(data_of(*segment_ids));
    job.count = spec_.tokens_per_rank;
    job.unique_tokens = static_cast<const std::int32_t*>(data_of(*unique_tokens));
    job.num_unique = spec_.num_unique;
    job.rows = rows;
    job.has_padding = spec_.has_padding_id;
    job.padding_id = spec_.padding_id;
    job.out = given.ids.get();
    job.counters = me.arena.counters.get();
    job.finding = me.arena.bad_id.get();
    job.report_bad = spec_.id_policy == core::IdPolicy::kError;
    job.step = step;
    job.first_position = spec_.token_blocks[static_cast<std::size_t>(rank)] * spec_.tokens_per_rank;
    launches.ids_of_segments(job, stream);
  }
  ++me.batches[static_cast<std::size_t>(me.staged_batch)]->holders;
  me.device.copy(me.arena.grads.get(), data_of(grads), me.arena.grads.bytes(), stream);
  launches.take_pending({data_of(pending), pending.dtype.code == kDLBool, me.arena.pending.get()}, stream);
  write_pin(me, stage, pin, stream);
}

void DevicePipeline::update_begin(int rank, const RuleForm& form, cuda::TakeNumbers operands, const DLTensor& table,
                                  const DLTensor& row_state, const DLTensor* last_step, float* pin,
                                  cuda::Stream stream) {
  Lock lock(mutex_);
  launch_rounds(lock, rank);
  require_working();
  Rank& me = of(rank);
  const auto guard = me.device.activate();
  ++stats_.update_begin_calls;
  ++me.starts[kUpdate];
  if (refuses(rank, me.machine.check_update_start(), "update start")) {
    if (peers_ != nullptr) arrive_at_peers(kUpdate, me.starts[kUpdate], rank);
    return write_pin(me, me.machine.update().armed, pin, stream);
  }
  const bool staged = me.machine.update_start();
  const std::int64_t step = me.machine.update().armed;
  record("update_begin", rank, step);
  Round& round = open(kUpdate, step, rank);
  round.staged = round.works = staged;
  round.form = form;
  const std::int64_t staged_rows = staged ? me.batches[static_cast<std::size_t>(me.staged_batch)]->rows : -1;
  if (auto failure =
          check_.update_buffers(rank, step, {table, row_state, last_step}, form.lazy, staged_rows, me.last_table)) {
    fail_and_throw(std::move(*failure));
  }
  if (staged) {
    round.rows = staged_rows;
    operands.numbers = me.arena.numbers.get();
    me.device.launches().take_numbers(operands, stream);
  }
  write_pin(me, step, pin, stream);
  Round::Buffers& mine = round.ranks[static_cast<std::size_t>(rank)];
  if (staged) mine.ids = me.batches[static_cast<std::size_t>(me.staged_batch)]->ids.get();
  mine.table = data_of(table);
  mine.row_state = static_cast<float*>(data_of(row_state));
  mine.last_step = last_step != nullptr ? static_cast<std::int32_t*>(data_of(*last_step)) : nullptr;
  arrive(kUpdate, round, rank, stream);
}

void DevicePipeline::update_done(int rank, const Results& results, float* pin, cuda::Stream stream) {
  Lock lock(mutex_);
  launch_rounds(lock, rank);
  require_working();
  Rank& me = of(rank);
  const auto guard = me.device.activate();
  ++stats_.update_done_calls;
  const std::int64_t step = me.machine.update().armed;
  Round& round = this->round(kUpdate, step);
  const bool refused = refuses(rank, me.machine.check_update_done(), "update_done");
  if (!refused) {
    record("update_done", rank, step);
    await_peers(lock, round);
  }
  cuda::DeliverOutcome deliver;
  deliver.norm = results.norm;
  deliver.valid = results.valid;
  deliver.pending = results.pending;
  if (!refused && !round.is_void && round.works) {
    me.device.wait(stream, me.closed(kUpdate));
    look_for_refusals(kUpdate, rank, stream);
    deliver.outcome = me.arena.outcome.get();
    deliver.skip = me.arena.done_skip[kUpdate].get();
  }
  me.device.launches().deliver_outcome(deliver, stream);
  write_pin(me, step, pin, stream);
  if (!me.machine.update().pending() || (refused && !round.is_void)) return;
  me.machine.update_done();
  if (round.staged) release(me, me.staged_batch);
}

void DevicePipeline::settle(int rank, cuda::Stream stream) {
  Lock lock(mutex_);
  launch_rounds(lock, rank);
  require_working();
  Rank& me = of(rank);
  const auto guard = me.device.activate();
  for (const int channel : {kLookup, kUpdate}) {
    const StepCounts& counts = channel == kLookup ? me.machine.lookup() : me.machine.update();
    if (!counts.pending()) continue;
    Round& round = this->round(channel, counts.armed);
    await_peers(lock, round);
    if (!round.is_void) me.device.wait(stream, me.closed(channel));
  }
}

void DevicePipeline::hold(int rank, cuda::Stream stream) noexcept {
  try {
    Lock lock(mutex_);
    Rank& me = of(rank);
    const auto guard = me.device.activate();
    for (const int channel : {kLookup, kUpdate}) me.device.wait(stream, me.closed(channel));
    // And for a round that was broken off half way.
    me.device.record(me.closed(kUpdate), me.side.get());
    me.device.wait(stream, me.closed(kUpdate));
  } catch (const std::exception&) {
    // The device itself has failed.
  }
}

}  // namespace async_emb::context
