// Canonical gradient sums on many lanes: the order of core/sums.h, with the blocks of a long segment spread over
// groups.
//
// 1. FirstBlocks sums the first 32 occurrences of every segment: all there are, for most. Each group has several rows
//    in flight.
// 2. LaterBlocks sums the other blocks. Cut the sorted occurrences into windows of 32: in each window at most one later
//    block starts, because such a block starts 32 after another of its segment. So every window is one job and has one
//    place for its sum, and nothing has to be counted or allotted.
// 3. CombineBlocks adds the block sums of each long segment first to last.
// 4. LongSquares sums the squares of those.
//
// A sum starts from -0, which leaves the bits of any first element as they are: -0 + x is x, for -0 and +0 too.
#pragma once

#include <cstdint>

#include "core/sums.h"
#include "cuda/fast_divide.h"
#include "cuda/grad_rows.h"
#include "cuda/launches.h"
#include "cuda/raw_pack.h"
#include "cuda/row_squares.h"
#include "cuda/share.h"

namespace async_emb::cuda {
inline namespace ASYNC_EMB_ISA {

inline constexpr int kBlock = static_cast<int>(core::kOccurrencesPerBlock);

// The job, and what its launch works out.
struct SumWork {
  SegmentSum job;
  GradRows grads;
  FastDivide column_tiles;               // of LaterBlocks, then of CombineBlocks
  std::int32_t subtrees = 0;             // that cover the shard's columns
  std::int32_t* long_segment = nullptr;  // [windows]: the segment whose second block starts there, or -1
  float* block_sums = nullptr;           // [windows, width]
};

// How a row lies in the registers of a group.
enum class Fit {
  kOnePack,   // every lane holds one pack
  kTwoPacks,  // every lane holds two
  kRagged,    // one pack or none
  kAny,       // more than registers hold: the squares are summed from memory, by 32 lanes, so all sums are written
};

// Packs of a row that are in flight at once.
constexpr int packs_of(Fit fit) { return fit == Fit::kOnePack || fit == Fit::kRagged ? 1 : 2; }

// kRows segments at once. For every fit but kAny the shard's columns start at a multiple of the next power of two.
template <class Grad, int N, int kLanesOfGroup, int kRows, Fit kFit>
struct FirstBlocks : SumWork {
  static constexpr int kLanes = kLanesOfGroup;
  static constexpr bool kMeet = true;
  static constexpr int kStack = 0;
  static constexpr int kResident = 3;
  static constexpr int kRowsAtOnce = kRows;
  static constexpr int kPacks = packs_of(kFit);
  static constexpr bool kFull = kFit == Fit::kOnePack || kFit == Fit::kTwoPacks;
  static const char* name() { return "segment_sum (first blocks)"; }

  struct Rows {
    std::int32_t first[kRows];
    std::int32_t occurrences[kRows];  // 0 where there is no row
    std::int32_t position[kRows];     // of the first occurrence
    core::FloatPack<N> sums[kRows][kPacks];
  };

  ASYNC_EMB_INLINE bool has(std::int64_t column) const { return kFull || column < job.width; }

  // The sums of kPacks packs of each row, N * kLanes columns apart.
  ASYNC_EMB_INLINE void sum(Rows& rows, std::int64_t column) const {
    constexpr int kNext = N * kLanes;
    std::int32_t next[kRows];
    int longest = 0;
    ASYNC_EMB_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const int count = rows.occurrences[r] < kBlock ? rows.occurrences[r] : kBlock;
      longest = count > longest ? count : longest;
      next[r] = rows.position[r];
      ASYNC_EMB_UNROLL
      for (int k = 0; k < kPacks; ++k) rows.sums[r][k] = all_of<N>(-0.0f);
    }
    for (int i = 0; i < longest; ++i) {
      RawPack<N, Grad> raw[kRows][kPacks] = {};
      ASYNC_EMB_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const Grad* const row = grads.template at<Grad>(next[r]) + column;
        ASYNC_EMB_UNROLL
        for (int k = 0; k < kPacks; ++k) {
          if (i < rows.occurrences[r] && has(column + k * kNext)) {
            raw[r][k] = core::load_pack<RawPack<N, Grad>>(row + k * kNext);
          }
        }
      }
      ASYNC_EMB_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const bool goes_on = i + 1 < kBlock && i + 1 < rows.occurrences[r];
        if (goes_on) next[r] = job.positions[rows.first[r] + i + 1];
      }
      ASYNC_EMB_UNROLL
      for (int r = 0; r < kRows; ++r) {
        ASYNC_EMB_UNROLL
        for (int k = 0; k < kPacks; ++k) {
          if (i < rows.occurrences[r] && has(column + k * kNext)) rows.sums[r][k] += widened<N, Grad>(raw[r][k]);
        }
      }
    }
  }

  // What is complete becomes canonical; the first block of a long segment waits for the others as it is.
  ASYNC_EMB_INLINE void store(Rows& rows, std::uint32_t u, std::int64_t column) const {
    ASYNC_EMB_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float* const to = job.sums + static_cast<std::int64_t>(u + r) * job.width + column;
      ASYNC_EMB_UNROLL
      for (int k = 0; k < kPacks; ++k) {
        if (rows.occurrences[r] <= kBlock) rows.sums[r][k] = core::canonical<N>(rows.sums[r][k]);
        const bool is_left = kFit != Fit::kAny && job.leaves_singles && rows.occurrences[r] == 1;
        if (rows.occurrences[r] > 0 && !is_left && has(column + k * N * kLanes)) {
          core::store_pack(rows.sums[r][k], to + k * N * kLanes);
        }
      }
    }
  }

  template <class Lanes>
  ASYNC_EMB_INLINE void operator()(Lanes lanes, Share share) const {
    if (*job.skip != 0) return;
    const auto kept = static_cast<std::uint32_t>(job.counts->kept);
    const auto step = static_cast<std::uint32_t>(share.step) * kRows;
    auto u = static_cast<std::uint32_t>(share.first) * kRows;
    if (u >= kept) return;
    // Edges are asked for two turns ahead and positions one, so that in its turn a row has only its gradients to wait
    // for.
    Edges edges = edges_at<kRows>(lanes, job.offsets, u, kept);
    Edges next_edges = edges_at<kRows>(lanes, job.offsets, u + step, kept);
    std::int32_t position = job.positions[edges.first];
    for (; u < kept; u += step) {
      Rows rows;
      ASYNC_EMB_UNROLL
      for (int r = 0; r < kRows; ++r) {
        rows.first[r] = broadcast(lanes, edges.first, r);
        const std::int32_t end = broadcast(lanes, edges.end, r);
        rows.occurrences[r] = u + r < kept ? end - rows.first[r] : 0;
        rows.position[r] = broadcast(lanes, position, r);
      }
      position = job.positions[next_edges.first];
      edges = next_edges;
      next_edges = edges_at<kRows>(lanes, job.offsets, u + 2 * step, kept);

      if constexpr (kFit == Fit::kAny) {
        for (std::int64_t column = lanes.index() * N; column < job.width; column += kPacks * N * kLanes) {
          sum(rows, column);
          store(rows, u, column);
        }
        lanes.synchronize();
        for (int r = 0; r < kRows; ++r) {
          if (rows.occurrences[r] == 0 || rows.occurrences[r] > kBlock) continue;
          core::sum_row_squares(lanes, job.sums + static_cast<std::int64_t>(u + r) * job.width, job.column_begin,
                                job.width, job.subtree_sums + static_cast<std::int64_t>(u + r) * subtrees);
        }
      } else {
        const std::int64_t column = lanes.index() * N;
        sum(rows, column);
        store(rows, u, column);
        float* to[kRows];
        ASYNC_EMB_UNROLL
        for (int r = 0; r < kRows; ++r) {
          const bool is_complete = rows.occurrences[r] > 0 && rows.occurrences[r] <= kBlock;
          to[r] = is_complete ? job.subtree_sums + static_cast<std::int64_t>(u + r) * subtrees : nullptr;
        }
        if constexpr (kFull) {
          write_root<N>(lanes, rows.sums, to);
        } else {
          write_subtrees<N>(lanes, rows.sums, job.width, to);
        }
      }
    }
  }
};

// The segment that holds sorted occurrence `index`: the last whose offset is not above it. offsets[0] <= index.
template <class Lanes>
ASYNC_EMB_INLINE std::int64_t find_segment(Lanes lanes, const std::int32_t* offsets, std::int64_t segments,
                                           std::int64_t index) {
  // The lanes cut what is left into as many parts as there are lanes, and count those that start at or before `index`.
  std::int64_t begin = 0;
  for (std::int64_t size = segments; size > 1;) {
    const std::int64_t part = (size + Lanes::kCount - 1) / Lanes::kCount;
    const std::int64_t mine = begin + lanes.index() * part;
    const bool at_or_before = lanes.index() * part < size && offsets[mine] <= index;
    const std::int64_t last = static_cast<std::int64_t>(lanes.sum(at_or_before ? 1u : 0u)) - 1;
    begin += last * part;
    size = size - last * part < part ? size - last * part : part;
  }
  return begin;
}

// One window and one tile of N * kLanes columns at a time.
template <class Grad, int N, int kLanesOfGroup>
struct LaterBlocks : SumWork {
  static constexpr int kLanes = kLanesOfGroup;
  static constexpr bool kMeet = true;
  static constexpr int kStack = 0;
  static constexpr int kResident = 2;
  static constexpr int kInFlight = 8;
  static const char* name() { return "segment_sum (later blocks)"; }

  template <class Lanes>
  ASYNC_EMB_INLINE void operator()(Lanes lanes, Share share) const {
    if (*job.skip != 0) return;
    const std::int64_t kept = job.counts->kept;
    const std::int64_t windows = (static_cast<std::int64_t>(job.counts->trained) + kBlock - 1) / kBlock;
    for (std::int64_t item = share.first; item < windows * column_tiles.divisor; item += share.step) {
      const std::int64_t window = quotient(column_tiles, static_cast<std::uint32_t>(item));
      const std::int64_t tile = item - window * column_tiles.divisor;
      const std::int64_t index = window * kBlock;
      const std::int64_t u = find_segment(lanes, job.offsets, kept, index);
      const std::int64_t first = job.offsets[u];
      const std::int64_t end = job.offsets[u + 1];
      const std::int64_t blocks_before = (index - first + kBlock - 1) / kBlock;
      const std::int64_t start = first + (blocks_before > 0 ? blocks_before : 1) * kBlock;
      const bool starts_here = start < end && start < index + kBlock;
      if (tile == 0 && lanes.index() == 0) {
        long_segment[window] = starts_here && start == first + kBlock ? static_cast<std::int32_t>(u) : -1;
      }
      const std::int64_t column = tile * N * Lanes::kCount + lanes.index() * N;
      if (!starts_here || column >= job.width) continue;
      const int count = static_cast<int>(end - start < kBlock ? end - start : kBlock);
      float* const to = block_sums + window * job.width + column;
      core::store_pack(sum(job.positions + start, count, column), to);
    }
  }

  ASYNC_EMB_INLINE core::FloatPack<N> sum(const std::int32_t* positions, int count, std::int64_t column) const {
    core::FloatPack<N> total = all_of<N>(-0.0f);
    for (int i = 0; i < count; i += kInFlight) {
      RawPack<N, Grad> raw[kInFlight];
      ASYNC_EMB_UNROLL
      for (int k = 0; k < kInFlight; ++k) {
        const std::int32_t position = positions[i + k < count ? i + k : count - 1];  // so that no load has to branch
        raw[k] = core::load_pack<RawPack<N, Grad>>(grads.template at<Grad>(position) + column);
      }
      ASYNC_EMB_UNROLL
      for (int k = 0; k < kInFlight; ++k) {
        if (i + k < count) total += widened<N, Grad>(raw[k]);
      }
    }
    return total;
  }
};

// Calls `body` with each item whose window has a long segment. Lanes look at items far apart, so that neighbouring long
// segments go to different groups.
template <class Lanes, class Body>
ASYNC_EMB_INLINE void for_each_long(Lanes lanes, Share share, const SumWork& work, const FastDivide& per_window,
                                    Body body) {
  const std::int64_t windows = (static_cast<std::int64_t>(work.job.counts->trained) + kBlock - 1) / kBlock;
  const std::int64_t items = windows * per_window.divisor;
  const auto segment_at = [&](std::int64_t item) {
    return item < items ? work.long_segment[quotient(per_window, static_cast<std::uint32_t>(item))] : -1;
  };
  for (std::int64_t first = share.first; first < items; first += share.step * Lanes::kCount) {
    std::uint32_t found = lanes.ballot(segment_at(first + lanes.index() * share.step) >= 0);
    for (; found != 0; found &= found - 1) {
      const std::int64_t item = first + ones_of((found & (0u - found)) - 1) * share.step;
      body(item, static_cast<std::int64_t>(segment_at(item)));
    }
  }
}

// One column a lane, 32 columns of one long segment at a time.
struct CombineBlocks : SumWork {
  static constexpr int kLanes = 32;
  static constexpr bool kMeet = true;
  static constexpr int kStack = 0;
  static constexpr int kResident = 2;
  static constexpr int kInFlight = 16;
  static const char* name() { return "segment_sum (combine)"; }

  template <class Lanes>
  ASYNC_EMB_INLINE void operator()(Lanes lanes, Share share) const {
    if (*job.skip != 0) return;
    for_each_long(lanes, share, *this, column_tiles, [&](std::int64_t item, std::int64_t u) {
      const std::int64_t window = quotient(column_tiles, static_cast<std::uint32_t>(item));
      const std::int64_t column = (item - window * column_tiles.divisor) * Lanes::kCount + lanes.index();
      if (column >= job.width) return;
      const std::int64_t occurrences = job.offsets[u + 1] - job.offsets[u];
      const std::int64_t later = (occurrences - 1) / kBlock;
      const float* const blocks = block_sums + window * job.width + column;
      float* const to = job.sums + u * job.width + column;
      *to = core::canonical(sum(*to, blocks, later));
    });
  }

  // The next blocks are on their way while these are added.
  ASYNC_EMB_INLINE float sum(float total, const float* blocks, std::int64_t count) const {
    float now[kInFlight];
    load(blocks, 0, count, now);
    for (std::int64_t b = 0; b < count; b += kInFlight) {
      float next[kInFlight];
      load(blocks, b + kInFlight, count, next);
      ASYNC_EMB_UNROLL
      for (int k = 0; k < kInFlight; ++k) total += now[k];
      ASYNC_EMB_UNROLL
      for (int k = 0; k < kInFlight; ++k) now[k] = next[k];
    }
    return total;
  }

  // -0 where there is no block: adding it changes nothing.
  ASYNC_EMB_INLINE void load(const float* blocks, std::int64_t begin, std::int64_t count,
                             float (&values)[kInFlight]) const {
    ASYNC_EMB_UNROLL
    for (int k = 0; k < kInFlight; ++k) {
      values[k] = begin + k < count ? blocks[(begin + k) * job.width] : -0.0f;
    }
  }
};

struct LongSquares : SumWork {
  static constexpr int kLanes = 32;
  static constexpr bool kMeet = true;
  static constexpr int kStack = 0;
  static constexpr int kResident = 3;
  static const char* name() { return "segment_sum (long squares)"; }

  template <class Lanes>
  ASYNC_EMB_INLINE void operator()(Lanes lanes, Share share) const {
    if (*job.skip != 0) return;
    for_each_long(lanes, share, *this, FastDivide{}, [&](std::int64_t, std::int64_t u) {
      core::sum_row_squares(lanes, job.sums + u * job.width, job.column_begin, job.width,
                            job.subtree_sums + u * subtrees);
    });
  }
};

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::cuda
