// The rounds of a device pipeline whose group spans processes: as in device_rounds.cpp, but one GPU, the lead, brings
// what the ranks of this process send to the others, and all of them read in its memory what has come.
#include <algorithm>
#include <utility>

#include "context/device_pipeline.h"

namespace async_emb::context {

// ---- what both kinds of rounds do

void DevicePipeline::open_local(int channel, Round& round) {
  for (const int rank : local_) {
    Rank& me = of(rank);
    const auto guard = me.device.activate();
    wait_for_all(channel, rank, &Rank::begun);
    std::int32_t* const skip = me.arena.round_skip[static_cast<std::size_t>(channel)].get();
    me.device.launches().open_round({all_refusals(), round.begin_call, nullptr, skip}, me.side.get());
  }
}

// Every process must void the same rounds, and only one of them may know why.
void DevicePipeline::speak(int channel, const Round& round) {
  Rank& me = lead();
  const cuda::Stream side = me.side.get();
  cuda::SpeakToPeers job;
  job.refusals.num_ranks = spec_.group_size;
  for (const int rank : local_) {
    const Rank& them = of(rank);
    job.refusals.of_rank[rank] = them.refusal.get();
    if (channel == kLookup && spec_.id_policy == core::IdPolicy::kError) {
      job.findings[job.num_findings++] = them.arena.lookup_finding.get();
    }
    me.device.copy_from(them.device, peers_->own_ids(rank), round.ranks[static_cast<std::size_t>(rank)].ids,
                        spec_.tokens_per_rank * static_cast<std::int64_t>(sizeof(std::int32_t)), side);
    if (channel == kUpdate) {
      me.device.copy_from(them.device, peers_->own_pending(rank), them.arena.pending.get(), them.arena.pending.bytes(),
                          side);
    }
  }
  job.call = round.begin_call;
  job.step = round.step;
  job.numbers = channel == kUpdate ? me.arena.numbers.get() : nullptr;
  job.word = peers_->own_word();
  me.device.launches().speak_to_peers(job, side);
}

void DevicePipeline::hear(int channel, const Round& round) {
  Rank& me = lead();
  const ProcessMap& map = peers_->map();
  cuda::HearPeers job;
  job.own = me.refusal.get();
  job.num_processes = map.size();
  for (int process = 0; process < map.size(); ++process) {
    if (process == map.self) continue;
    job.words[process] = peers_->word(process);
    for (const int rank : map.ranks[static_cast<std::size_t>(process)]) job.refusals[rank] = &refusal_of(rank);
  }
  job.finding = peer_bad_id_.get();
  job.numbers = channel == kUpdate ? me.arena.numbers.get() : nullptr;
  job.difference = difference_->get();
  job.step = round.step;
  job.skip = me.arena.round_skip[static_cast<std::size_t>(channel)].get();
  me.device.launches().hear_peers(job, me.side.get());

  // What a broken exchange has left in the place of ids must not be taken for rows.
  for (int process = 0; process < map.size(); ++process) {
    if (process == map.self) continue;
    const std::vector<int>& ranks = map.ranks[static_cast<std::size_t>(process)];
    cuda::CleanIds clean;
    clean.out = peers_->ids(ranks.front());
    clean.ids = clean.out;
    clean.count = spec_.tokens_per_rank * static_cast<std::int64_t>(ranks.size());
    clean.rows = round.rows;
    clean.policy = core::IdPolicy::kDrop;
    clean.counters = peer_counters_.get();
    me.device.launches().clean_ids(clean, me.side.get());
  }
}

// What comes on the side streams of all ranks comes after what is on the lead's, and skips what the lead skips.
void DevicePipeline::follow_lead(int channel, bool takes_skip) {
  Rank& first = lead();
  {
    const auto guard = first.device.activate();
    first.device.record(first.worked(channel), first.side.get());
  }
  for (const int rank : local_) {
    if (leads(rank)) continue;
    Rank& me = of(rank);
    const auto guard = me.device.activate();
    me.device.wait(me.side.get(), first.worked(channel));
    if (!takes_skip) continue;
    const auto c = static_cast<std::size_t>(channel);
    me.device.copy_from(first.device, me.arena.round_skip[c].get(), first.arena.round_skip[c].get(),
                        me.arena.round_skip[c].bytes(), me.side.get());
  }
}

// ---- lookup

void DevicePipeline::enqueue_lookup_with_peers(Round& round) {
  open_local(kLookup, round);
  {
    Rank& first = lead();
    const auto guard = first.device.activate();
    const cuda::Stream side = first.side.get();
    speak(kLookup, round);
    first.device.record(ready_[kLookup].get(), side);
    peers_->exchange_ids(side);
    hear(kLookup, round);
    gather_for_peers(round);
    peers_->exchange_rows(side);
  }
  follow_lead(kLookup, true);
  for (const int rank : local_) place_rows(round, rank);
  close_round(kLookup);
}

// Own columns of the rows of the peers' tokens, packed.
void DevicePipeline::gather_for_peers(const Round& round) {
  Rank& me = lead();
  const std::int64_t shard_bytes = spec_.shard_width() * element_;
  cuda::GatherRows job;
  job.count = spec_.tokens_per_rank;
  for (const int rank : local_) {
    job.shards[job.num_shards++] = {round.ranks[static_cast<std::size_t>(rank)].table, shard_bytes, shard_bytes};
  }
  job.out_row_stride_bytes = peers_->columns(peers_->map().self).bytes();
  for (int rank = 0; rank < spec_.group_size; ++rank) {
    if (ranks_[static_cast<std::size_t>(rank)] != nullptr) continue;
    job.ids = peers_->ids(rank);
    job.out = peers_->rows_out(rank);
    me.device.launches().gather_rows(job, me.side.get());
  }
}

// The rows of a rank's own tokens: this process's columns out of its tables, the others' out of what has come.
void DevicePipeline::place_rows(const Round& round, int rank) {
  Rank& me = of(rank);
  const auto guard = me.device.activate();
  const std::int64_t shard_bytes = spec_.shard_width() * element_;
  const ProcessMap& map = peers_->map();
  for (int process = 0; process < map.size(); ++process) {
    const PackedColumns& columns = peers_->columns(process);
    std::int64_t packed = 0;  // bytes of the runs before
    for (const PackedColumns::Run& run : columns.runs()) {
      cuda::GatherRows job;
      job.count = spec_.tokens_per_rank;
      job.out = me.arena.rows.get() + run.begin;
      job.out_row_stride_bytes = spec_.emb_width * element_;
      if (process == map.self) {
        job.ids = round.ranks[static_cast<std::size_t>(rank)].ids;
        for (std::int64_t peer = run.begin / shard_bytes; peer < (run.begin + run.bytes) / shard_bytes; ++peer) {
          job.shards[job.num_shards++] = {round.ranks[static_cast<std::size_t>(peer)].table, shard_bytes, shard_bytes};
        }
      } else {
        job.ids = me.arena.token_positions.get();
        job.shards[0] = {peers_->rows_in(process, rank) + packed, columns.bytes(), run.bytes};
        job.num_shards = 1;
      }
      me.device.launches().gather_rows(job, me.side.get());
      packed += run.bytes;
    }
  }
  me.device.record(me.worked(kLookup), me.side.get());
}

// ---- update

void DevicePipeline::enqueue_update_with_peers(Round& round) {
  open_local(kUpdate, round);
  Rank& first = lead();
  const cuda::Stream side = first.side.get();
  if (!round.works) {
    for (const int rank : local_) {
      const auto guard = of(rank).device.activate();
      of(rank).device.record(of(rank).worked(kUpdate), of(rank).side.get());
    }
    first.device.record(ready_[kUpdate].get(), side);
    return close_round(kUpdate);
  }
  {
    const auto guard = first.device.activate();
    speak(kUpdate, round);
    peers_->spread_common(first.device, side);
    for (const int rank : local_) pack_grads(rank);
    first.device.record(ready_[kUpdate].get(), side);
    peers_->exchange_grads(side);
    hear(kUpdate, round);
  }
  follow_lead(kUpdate, true);
  for (const int rank : local_) {
    Rank& me = of(rank);
    const auto guard = me.device.activate();
    sum(round, rank);
    me.device.record(me.worked(kUpdate), me.side.get());
  }
  {
    const auto guard = first.device.activate();
    wait_for_all(kUpdate, local_.front(), &Rank::worked);
    for (const int rank : local_) {
      first.device.copy_from(of(rank).device, peers_->sums_out(rank), of(rank).arena.subtree_sums.get(),
                             of(rank).arena.subtree_sums.bytes(), side);
    }
    peers_->exchange_sums(side);
  }
  follow_lead(kUpdate, false);
  for (const int rank : local_) {
    Rank& me = of(rank);
    const auto guard = me.device.activate();
    // Again: an exchange that was broken off leaves anything behind, and then the host has refused all that follows.
    std::int32_t* const skip = me.arena.round_skip[kUpdate].get();
    me.device.launches().open_round({all_refusals(), round.begin_call, skip, skip}, me.side.get());
    apply(round, rank);
  }
  close_round(kUpdate);
}

// Cuts a rank's gradient rows into the columns that each process holds.
void DevicePipeline::pack_grads(int rank) {
  Rank& me = lead();
  for (int process = 0; process < peers_->map().size(); ++process) {
    const PackedColumns& columns = peers_->columns(process);
    cuda::GatherRows job;
    job.ids = me.arena.token_positions.get();
    job.count = spec_.tokens_per_rank;
    for (const PackedColumns::Run& run : columns.runs()) {
      job.shards[job.num_shards++] = {of(rank).arena.grads.get() + run.begin, columns.row_bytes(), run.bytes};
    }
    job.out = peers_->grads_out(process, rank);
    job.out_row_stride_bytes = columns.bytes();
    me.device.launches().gather_rows(job, me.side.get());
  }
}

// The ids and gradient rows of the whole group. Rows are packed, so a block begins where its rank's first column would
// lie at the place that it has in whole rows.
void DevicePipeline::collect_from_peers(cuda::SegmentSum& job, int rank) {
  Rank& me = of(rank);
  const std::int64_t id_bytes = spec_.tokens_per_rank * static_cast<std::int64_t>(sizeof(std::int32_t));
  const std::int64_t shift = (rank - peers_->place(rank)) * spec_.shard_width() * element_;
  for (int peer = 0; peer < spec_.group_size; ++peer) {
    const int block = spec_.token_blocks[static_cast<std::size_t>(peer)];
    const bool is_local = ranks_[static_cast<std::size_t>(peer)] != nullptr;
    me.device.copy_from(lead().device, me.arena.ids.get() + block * spec_.tokens_per_rank,
                        is_local ? peers_->own_ids(peer) : peers_->ids(peer), id_bytes, me.side.get());
    job.blocks[block] = reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(peers_->grads(peer)) -
                                                      static_cast<std::uintptr_t>(shift));
  }
  job.grad_row_stride = peers_->columns(peers_->map().self).bytes() / element_;
}

}  // namespace async_emb::context
