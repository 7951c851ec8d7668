// Row statistics, the global norm, and the decision to apply an update.
#pragma once

#include <cstdint>

#include "core/adagrad.h"
#include "core/dyadic.h"
#include "cuda/launches.h"
#include "cuda/share.h"

namespace async_emb::cuda {
inline namespace ASYNC_EMB_ISA {

// One row a lane. Every lane of a warp takes the same branches, since all rows have the same subtrees.
struct FinishRows {
  static constexpr int kLanes = 32;
  static constexpr bool kMeet = false;
  static constexpr int kStack = 32;  // sums wait at strictly falling levels, and rows have fewer than 2^31 columns
  static constexpr int kResident = 4;
  static const char* name() { return "row_statistic"; }

  RowStatistic job;
  std::int32_t subtrees = 0;  // of all ranks

  template <class Lanes>
  ASYNC_EMB_INLINE void operator()(Lanes lanes, Share share, core::BorrowedStack stack) const {
    if (*job.skip != 0) return;
    const std::int64_t kept = job.counts->kept;
    for (std::int64_t u = share.lane_first(lanes); u < kept; u += share.lane_step(lanes)) {
      core::DyadicAccumulator<core::BorrowedStack> tree(stack);
      const std::int8_t* level = job.levels;
      for (int rank = 0; rank < job.num_ranks; ++rank) {
        const std::int32_t count = job.subtrees[rank];
        const float* const sums = job.subtree_sums[rank] + u * count;
        if (subtrees == 1 && count == 1) {  // the sum is the tree, and already canonical
          job.statistics[u] = sums[0];
          break;
        }
        for (std::int32_t k = 0; k < count; ++k) tree.push(sums[k], *level++);
      }
      if (subtrees != 1) job.statistics[u] = core::canonical(tree.root());
    }
  }
};

// Levels of the tree over all kept rows that one tile covers.
inline constexpr int kTileLevels = 10;
inline constexpr int kPerLaneOfTile = (1 << kTileLevels) / 32;

ASYNC_EMB_FN constexpr std::int64_t tiles_of(std::int64_t count) {
  return (count + (1 << kTileLevels) - 1) >> kTileLevels;
}

// The roots of tiles of 1024 values each: missing ones are +0, which changes no sum of values that are not negative.
struct SumTiles {
  static constexpr int kLanes = 32;
  static constexpr bool kMeet = true;
  static constexpr int kStack = 0;
  static constexpr int kResident = 4;
  static const char* name() { return "decide (tiles)"; }

  const float* values;
  const BatchCounts* counts;
  int levels_below;  // each value is the root of a tile of tiles ... this many times
  float* roots;
  const std::int32_t* skip;

  ASYNC_EMB_INLINE std::int64_t count() const {
    std::int64_t count = counts->kept;
    for (int i = 0; i < levels_below; ++i) count = tiles_of(count);
    return count;
  }

  template <class Lanes>
  ASYNC_EMB_INLINE float root(Lanes lanes, std::int64_t tile) const {
    const std::int64_t first = tile << kTileLevels;
    const std::int64_t rest = count() - first;
    const int size = static_cast<int>(rest < (1 << kTileLevels) ? rest : 1 << kTileLevels);
    return core::tile_root<Lanes, kPerLaneOfTile, false>(lanes, values + first, size);
  }

  template <class Lanes>
  ASYNC_EMB_INLINE void operator()(Lanes lanes, Share share) const {
    if (*skip != 0) return;
    const std::int64_t tiles = tiles_of(count());
    for (std::int64_t tile = share.first; tile < tiles; tile += share.step) {
      const float sum = root(lanes, tile);
      if (lanes.index() == 0) roots[tile] = sum;
    }
  }
};

// The last tile's root, and what follows from it. One group.
struct DecideUpdate {
  static constexpr int kLanes = 32;
  static constexpr bool kMeet = true;
  static constexpr int kStack = 0;
  static constexpr int kResident = 4;
  static const char* name() { return "decide"; }

  Decide job;
  SumTiles last;

  template <class Lanes>
  ASYNC_EMB_INLINE void operator()(Lanes lanes, Share share) const {
    if (share.first != 0) return;
    if (*job.skip != 0) {
      if (lanes.index() == 0) *job.outcome = Outcome{};
      return;
    }
    const float sum = core::canonical(last.root(lanes, 0));
    if (lanes.index() != 0) return;
    bool pending = true;
    for (int rank = 0; rank < job.num_ranks; ++rank) pending = pending && *job.pending[rank] != 0;
    Outcome outcome;
    outcome.norm = core::gradient_norm(sum);
    const bool finite = (core::bits_of(outcome.norm) & 0x7f800000u) != 0x7f800000u;
    const RuleNumbers& rule = *job.numbers;
    const bool sound = core::can_be_applied(rule.learning_rate, rule.eps, rule.decay, rule.weight_decay, job.lazy,
                                            job.clips ? rule.max_grad_norm : 0.0f);
    outcome.valid = finite && sound && pending ? 1 : 0;
    outcome.pending = 1;
    outcome.clip = job.clips ? core::clip_factor(rule.max_grad_norm, outcome.norm) : 1.0f;
    *job.outcome = outcome;
    if (job.counters == nullptr) return;
    add_atomically(outcome.valid != 0 ? &job.counters->applied : &job.counters->skipped, 1);
    add_atomically(&job.counters->trained_tokens, static_cast<std::uint64_t>(job.counts->trained));
    add_atomically(&job.counters->unique_tokens, static_cast<std::uint64_t>(job.counts->kept));
  }
};

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::cuda
