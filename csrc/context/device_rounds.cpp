// The work of a device pipeline: what goes to the side streams once every rank has begun a step.
#include <algorithm>

#include "context/device_pipeline.h"

namespace async_emb::context {

void DevicePipeline::arrive(int channel, Round& round, int rank, cuda::Stream stream) {
  of(rank).device.record(of(rank).begun(channel), stream);
  round.ranks[static_cast<std::size_t>(rank)].here = true;
  if (peers_ != nullptr) return arrive_at_peers(channel, round.start, rank);
  if (round.is_void || !std::all_of(round.ranks.begin(), round.ranks.end(), [](const auto& peer) { return peer.here; }))
    return;
  try {
    channel == kLookup ? enqueue_lookup(round) : enqueue_update(round);
  } catch (const std::exception& error) {
    // Half of a step may be on the streams: nobody may go on from here.
    fail_and_throw({FailureKind::kInternal, check_.where(channel == kLookup ? "lookup" : "update", rank) + " of step " +
                                                std::to_string(round.step) + " failed: " + error.what()});
  }
  round.enqueued = true;
  changed_.notify_all();
}

void DevicePipeline::note_wait(Round& round) {
  if (round.waited_for) return;
  round.waited_for = true;
  round.first_wait = Clock::now();
}

void DevicePipeline::await_peers(Lock& lock, Round& round) {
  if (!round.enqueued && !round.is_void) note_wait(round);
  changed_.wait(lock, [&] { return round.enqueued || round.is_void || failure_; });
  require_working();
}

void DevicePipeline::wait_for_all(int channel, int rank, cuda::Event (Rank::*event)(int) const) {
  const auto guard = of(rank).device.activate();
  for (const int peer : local_) of(rank).device.wait(of(rank).side.get(), (of(peer).*event)(channel));
}

// Everybody's side stream goes on when everybody's work is over.
void DevicePipeline::close_round(int channel) {
  for (const int rank : local_) {
    Rank& me = of(rank);
    const auto guard = me.device.activate();
    wait_for_all(channel, rank, &Rank::worked);
    me.device.record(me.closed(channel), me.side.get());
  }
}

cuda::Refusals DevicePipeline::all_refusals() const {
  cuda::Refusals all;
  all.num_ranks = spec_.group_size;
  for (int rank = 0; rank < spec_.group_size; ++rank) all.of_rank[rank] = &refusal_of(rank);
  return all;
}

cuda::Refusal& DevicePipeline::refusal_of(int rank) const {
  const auto r = static_cast<std::size_t>(rank);
  return ranks_[r] ? *ranks_[r]->refusal : **peer_refusals_[r];
}

void DevicePipeline::look_for_refusals(int channel, int rank, cuda::Stream stream) {
  Rank& me = of(rank);
  cuda::OpenRound job;
  job.refusals.num_ranks = 1;
  job.refusals.of_rank[0] = me.refusal.get();
  job.call = me.calls;
  job.also = me.arena.round_skip[static_cast<std::size_t>(channel)].get();
  job.skip = me.arena.done_skip[static_cast<std::size_t>(channel)].get();
  me.device.launches().open_round(job, stream);
}

// ---- lookup ----

void DevicePipeline::enqueue_lookup(Round& round) {
  for (int rank = 0; rank < spec_.group_size; ++rank) {
    Rank& me = of(rank);
    const auto guard = me.device.activate();
    wait_for_all(kLookup, rank, &Rank::begun);
    me.device.launches().open_round({all_refusals(), round.begin_call, nullptr, me.arena.round_skip[kLookup].get()},
                                    me.side.get());
  }
  ask_for_rows(round);
  for (int rank = 0; rank < spec_.group_size; ++rank) gather(round, rank);
  close_round(kLookup);
  ++stats_.lookups;
  stats_.bytes_moved += moved_bytes();
}

// Of one lookup, or of the gradient rows of one update: what the ranks of this process get from all others.
std::int64_t DevicePipeline::moved_bytes() const {
  const auto local = static_cast<std::int64_t>(local_.size());
  return spec_.tokens_per_rank * spec_.emb_width * element_ * local / spec_.group_size * (spec_.group_size - 1);
}

// Where a device cannot read a peer's shard, the peer gathers for it.
void DevicePipeline::ask_for_rows(Round& round) {
  const std::int64_t shard_bytes = spec_.shard_width() * element_;
  bool asked = false;
  for (int owner = 0; owner < spec_.group_size; ++owner) {
    Rank& me = of(owner);
    const auto guard = me.device.activate();
    for (int reader = 0; reader < spec_.group_size; ++reader) {
      const Rank& peer = of(reader);
      if (peer.device.reads(me.device)) continue;
      asked = true;
      std::int32_t* const ids = me.arena.asked[static_cast<std::size_t>(reader)].get();
      me.device.copy_from(peer.device, ids, peer.batches[static_cast<std::size_t>(peer.armed_batch)]->ids.get(),
                          spec_.tokens_per_rank * static_cast<std::int64_t>(sizeof(std::int32_t)), me.side.get());
      cuda::GatherRows job;
      job.ids = ids;
      job.count = spec_.tokens_per_rank;
      job.shards[0] = {round.ranks[static_cast<std::size_t>(owner)].table, shard_bytes, shard_bytes};
      job.num_shards = 1;
      job.out = me.arena.rows_outbox[static_cast<std::size_t>(reader)].get();
      job.out_row_stride_bytes = shard_bytes;
      me.device.launches().gather_rows(job, me.side.get());
    }
    me.device.record(me.worked(kLookup), me.side.get());
  }
  if (!asked) return;
  for (int reader = 0; reader < spec_.group_size; ++reader) wait_for_all(kLookup, reader, &Rank::worked);
}

void DevicePipeline::gather(Round& round, int rank) {
  Rank& me = of(rank);
  const auto guard = me.device.activate();
  const std::int64_t shard_bytes = spec_.shard_width() * element_;
  cuda::GatherRows job;
  job.count = spec_.tokens_per_rank;
  job.out_row_stride_bytes = spec_.emb_width * element_;
  int first = 0;  // shards [first, peer) are read side by side in one launch
  const auto launch = [&](int end) {
    if (job.num_shards == 0) return;
    job.ids = me.batches[static_cast<std::size_t>(me.armed_batch)]->ids.get();
    job.out = me.arena.rows.get() + first * shard_bytes;
    me.device.launches().gather_rows(job, me.side.get());
    job.num_shards = 0;
    first = end;
  };
  for (int peer = 0; peer < spec_.group_size; ++peer) {
    if (me.device.reads(of(peer).device)) {
      if (job.num_shards == 0) first = peer;
      job.shards[job.num_shards++] = {round.ranks[static_cast<std::size_t>(peer)].table, shard_bytes, shard_bytes};
      continue;
    }
    launch(peer);
    char* const inbox = me.arena.rows_inbox[static_cast<std::size_t>(peer)].get();
    me.device.copy_from(of(peer).device, inbox, of(peer).arena.rows_outbox[static_cast<std::size_t>(rank)].get(),
                        spec_.tokens_per_rank * shard_bytes, me.side.get());
    cuda::GatherRows place = job;
    place.ids = me.arena.token_positions.get();
    place.shards[0] = {inbox, shard_bytes, shard_bytes};
    place.num_shards = 1;
    place.out = me.arena.rows.get() + peer * shard_bytes;
    me.device.launches().gather_rows(place, me.side.get());
  }
  launch(spec_.group_size);
  me.device.record(me.worked(kLookup), me.side.get());
}

// ---- update ----

void DevicePipeline::enqueue_update(Round& round) {
  for (int rank = 0; rank < spec_.group_size; ++rank) {
    Rank& me = of(rank);
    const auto guard = me.device.activate();
    wait_for_all(kUpdate, rank, &Rank::begun);
    me.device.launches().open_round({all_refusals(), round.begin_call, nullptr, me.arena.round_skip[kUpdate].get()},
                                    me.side.get());
    if (round.staged) sum(round, rank);
    me.device.record(me.worked(kUpdate), me.side.get());
  }
  if (round.staged) {
    for (int rank = 0; rank < spec_.group_size; ++rank) wait_for_all(kUpdate, rank, &Rank::worked);
    for (int rank = 0; rank < spec_.group_size; ++rank) apply(round, rank);
    stats_.bytes_moved += moved_bytes();
  }
  close_round(kUpdate);
}

void DevicePipeline::sum(Round& round, int rank) {
  Rank& me = of(rank);
  const cuda::Launches& launches = me.device.launches();
  const cuda::Stream side = me.side.get();
  const std::int64_t limit = std::min(spec_.num_unique, spec_.tokens());
  cuda::SegmentSum& job = me.sum_job;
  job = {};
  job.grad_row_stride = spec_.emb_width;
  if (peers_ != nullptr) collect_from_peers(job, rank);
  for (int peer = 0; peer < spec_.group_size && peers_ == nullptr; ++peer) {
    const Rank& them = of(peer);
    const int block = spec_.token_blocks[static_cast<std::size_t>(peer)];
    me.device.copy_from(them.device, me.arena.ids.get() + block * spec_.tokens_per_rank,
                        them.batches[static_cast<std::size_t>(them.staged_batch)]->ids.get(),
                        spec_.tokens_per_rank * static_cast<std::int64_t>(sizeof(std::int32_t)), side);
    job.blocks[block] = them.arena.grads.get();
    if (me.device.reads(them.device)) continue;
    char* const inbox = me.arena.grads_inbox[static_cast<std::size_t>(peer)].get();
    me.device.copy_from(them.device, inbox, them.arena.grads.get(), them.arena.grads.bytes(), side);
    job.blocks[block] = inbox;
  }
  cuda::UniqueIds unique;
  unique.ids = me.arena.ids.get();
  unique.count = spec_.tokens();
  unique.rows = round.rows;
  unique.limit = limit;
  unique.unique = me.arena.unique.get();
  unique.offsets = me.arena.offsets.get();
  unique.positions = me.arena.positions.get();
  unique.counts = me.arena.counts.get();
  unique.workspace = me.arena.sort_workspace.get();
  unique.workspace_bytes = me.arena.sort_workspace.bytes();
  unique.finding = leads(rank) ? me.arena.too_many.get() : nullptr;
  unique.step = round.step;
  launches.unique_ids(unique, side);

  job.grad_dtype = spec_.dtype;
  job.num_blocks = spec_.group_size;
  job.tokens_per_block = spec_.tokens_per_rank;
  job.column_begin = layout_.column_begin(rank);
  job.width = layout_.width(rank);
  job.offsets = me.arena.offsets.get();
  job.positions = me.arena.positions.get();
  job.counts = me.arena.counts.get();
  job.max_segments = limit;
  job.max_tokens = spec_.tokens();
  // The update reads what occurs once where it lies, which saves writing it. A peer's rows would be fetched twice.
  job.leaves_singles = spec_.group_size == 1;
  job.sums = me.arena.sums.get();
  job.subtree_sums = me.arena.subtree_sums.get();
  job.workspace = me.arena.sum_workspace.get();
  job.workspace_bytes = me.arena.sum_workspace.bytes();
  job.skip = me.arena.round_skip[kUpdate].get();
  launches.segment_sum(job, side);
}

void DevicePipeline::apply(Round& round, int rank) {
  Rank& me = of(rank);
  const auto guard = me.device.activate();
  const cuda::Launches& launches = me.device.launches();
  const cuda::Stream side = me.side.get();
  const std::int64_t limit = std::min(spec_.num_unique, spec_.tokens());
  const Round::Buffers& buffers = round.ranks[static_cast<std::size_t>(rank)];

  cuda::RowStatistic statistic;
  cuda::Decide decide;
  for (int peer = 0; peer < spec_.group_size; ++peer) {
    statistic.subtrees[peer] = static_cast<std::int32_t>(layout_.subtree_count(peer));
    if (ranks_[static_cast<std::size_t>(peer)] == nullptr) {
      statistic.subtree_sums[peer] = peers_->sums(peer);
      decide.pending[peer] = peers_->pending(peer);
      continue;
    }
    const Rank& them = of(peer);
    statistic.subtree_sums[peer] = them.arena.subtree_sums.get();
    decide.pending[peer] = them.arena.pending.get();
    if (me.device.reads(them.device)) continue;
    float* const inbox = me.arena.subtree_inbox[static_cast<std::size_t>(peer)].get();
    me.device.copy_from(them.device, inbox, them.arena.subtree_sums.get(), them.arena.subtree_sums.bytes(), side);
    statistic.subtree_sums[peer] = inbox;
    std::int32_t* const pending = me.arena.pending_inbox[static_cast<std::size_t>(peer)].get();
    me.device.copy_from(them.device, pending, them.arena.pending.get(), them.arena.pending.bytes(), side);
    decide.pending[peer] = pending;
  }
  statistic.num_ranks = spec_.group_size;
  statistic.levels = me.arena.levels.get();
  statistic.counts = me.arena.counts.get();
  statistic.max_segments = limit;
  statistic.statistics = me.arena.statistics.get();
  statistic.skip = me.arena.round_skip[kUpdate].get();
  launches.row_statistic(statistic, side);

  decide.statistics = me.arena.statistics.get();
  decide.counts = me.arena.counts.get();
  decide.max_segments = limit;
  decide.workspace = me.arena.norm_workspace.get();
  decide.workspace_bytes = me.arena.norm_workspace.bytes();
  decide.num_ranks = spec_.group_size;
  decide.numbers = me.arena.numbers.get();
  decide.lazy = round.form.lazy;
  decide.clips = round.form.clips;
  decide.skip = me.arena.round_skip[kUpdate].get();
  decide.outcome = me.arena.outcome.get();
  decide.counters = leads(rank) ? me.arena.counters.get() : nullptr;
  launches.decide(decide, side);

  cuda::RowwiseAdagrad rule;
  rule.table_dtype = spec_.dtype;
  rule.table = buffers.table;
  rule.table_row_stride = spec_.shard_width();
  rule.column_begin = layout_.column_begin(rank);
  rule.width = layout_.width(rank);
  rule.logical_width = spec_.logical_width;
  rule.row_state = buffers.row_state;
  rule.last_step = round.form.lazy ? buffers.last_step : nullptr;
  rule.unique = me.arena.unique.get();
  rule.sums = me.arena.sums.get();
  rule.sum_job = &me.sum_job;
  rule.statistics = me.arena.statistics.get();
  rule.counts = me.arena.counts.get();
  rule.max_segments = limit;
  rule.numbers = me.arena.numbers.get();
  rule.outcome = me.arena.outcome.get();
  rule.stochastic_rounding = round.form.stochastic_rounding;
  rule.counters = me.arena.counters.get();
  launches.rowwise_adagrad(rule, side);
  me.device.record(me.worked(kUpdate), side);
}

}  // namespace async_emb::context
