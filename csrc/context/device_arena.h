// The memory that one rank of a device pipeline works in, on its own GPU. Sized once from the spec.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "context/spec.h"
#include "core/layout.h"
#include "cuda/handles.h"

namespace async_emb::context {

// Ids of one batch: this rank's own tokens, cleaned. A batch stays until nobody needs it: the armed lookup, the last
// consumed one, the staged gradients or the update that takes them.
struct DeviceBatch {
  cuda::DeviceArray<std::int32_t> ids;  // [tokens_per_rank]
  std::int64_t rows = 0;
  int holders = 0;
};

struct DeviceArena {
  // Lookup: rows that wait for their done.
  cuda::DeviceArray<char> rows;  // [tokens_per_rank, emb_width]

  // Update: this rank's gradient rows, and ids of the whole group in token order with where each distinct one occurs.
  cuda::DeviceArray<char> grads;  // [tokens_per_rank, emb_width]
  cuda::DeviceArray<std::int32_t> ids, unique, offsets, positions;
  cuda::DeviceArray<cuda::BatchCounts> counts;
  cuda::DeviceArray<char> sort_workspace, sum_workspace, norm_workspace;
  cuda::DeviceArray<float> sums;          // [num_unique, width]
  cuda::DeviceArray<float> subtree_sums;  // [num_unique, subtrees of this rank]
  cuda::DeviceArray<float> statistics;    // [num_unique]
  cuda::DeviceArray<std::int8_t> levels;  // of the subtrees of a whole row
  cuda::DeviceArray<std::int32_t> pending;
  cuda::DeviceArray<cuda::RuleNumbers> numbers;
  cuda::DeviceArray<cuda::Outcome> outcome;

  cuda::DeviceArray<cuda::Counters> counters;
  // Of ids, noted on XLA's stream, and of too many distinct ones, noted on the side stream.
  cuda::DeviceArray<cuda::IdFinding> bad_id, too_many;
  cuda::DeviceArray<std::int64_t> first_differing;
  // Whether the work of a round, and the results of a done, are void: one of each for lookups and for updates.
  std::array<cuda::DeviceArray<std::int32_t>, 2> round_skip, done_skip;
  cuda::DeviceArray<std::int32_t> always;  // 1: for a done that the host refuses

  // For peers of this process whose memory this device cannot read: what they send, by rank; empty where it is not
  // needed.
  std::vector<cuda::DeviceArray<char>> rows_inbox;     // [tokens_per_rank, shard_width]
  std::vector<cuda::DeviceArray<char>> rows_outbox;    // the same, gathered here for that peer
  std::vector<cuda::DeviceArray<std::int32_t>> asked;  // ids of that peer's tokens
  std::vector<cuda::DeviceArray<char>> grads_inbox;    // [tokens_per_rank, emb_width]
  std::vector<cuda::DeviceArray<float>> subtree_inbox;
  std::vector<cuda::DeviceArray<std::int32_t>> pending_inbox;
  cuda::DeviceArray<std::int32_t> token_positions;    // 0, 1, 2, ...
  cuda::DeviceArray<cuda::IdFinding> lookup_finding;  // `bad_id` as the last lookup left it, for other processes

  // `devices` by rank, null for those of other processes.
  DeviceArena(const ContextSpec& spec, const core::ColumnLayout& layout, int rank,
              const std::vector<cuda::Device*>& devices);
  std::int64_t bytes() const;
};

}  // namespace async_emb::context
