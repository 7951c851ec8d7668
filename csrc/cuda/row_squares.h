// The sums of squares of a row's subtrees, from gradient sums that still lie in the lanes' registers.
//
// Lane k holds columns k * N to k * N + N - 1 of a row that starts at a multiple of the next power of two: then every
// node of the dyadic tree appears in some lane on the way to the root, and the subtrees that cover the row are the
// binary digits of its width, the highest first.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/dyadic.h"
#include "cuda/share.h"

namespace async_emb::cuda {
inline namespace ASYNC_EMB_ISA {

// Subtree `width`'s digit `level` says there is: its place among the subtrees and among the nodes of its level.
struct Digit {
  bool present;
  int place;
  std::uint32_t node;
};

ASYNC_EMB_INLINE Digit digit_of(std::uint32_t width, int level) {
  const std::uint32_t upper = width >> level;
  return Digit{upper % 2 != 0, ones_of(upper >> 1), upper - 1};
}

// From the squares of one lane's N columns, level `kLevel` of the tree and those above it within the lane.
template <int kNodes, int kLevel, class Lanes, int kRows>
ASYNC_EMB_INLINE void fold_lane(Lanes lanes, const float (&nodes)[kRows][kNodes], std::uint32_t width,
                                float* const (&to)[kRows], float (&roots)[kRows]) {
  if constexpr (kNodes == 1) {
    static_cast<void>(lanes);
    ASYNC_EMB_UNROLL
    for (int r = 0; r < kRows; ++r) roots[r] = nodes[r][0];
  } else {
    const Digit digit = digit_of(width, kLevel);
    const std::uint32_t slot = digit.node % kNodes;
    if (digit.present && static_cast<std::uint32_t>(lanes.index()) == digit.node / kNodes) {
      ASYNC_EMB_UNROLL
      for (int r = 0; r < kRows; ++r) {
        // Chosen, not indexed: an array that is indexed at run time would lie in memory. Slots of digits are even.
        float chosen = nodes[r][0];
        ASYNC_EMB_UNROLL
        for (int k = 2; k < kNodes; k += 2) chosen = slot >= static_cast<std::uint32_t>(k) ? nodes[r][k] : chosen;
        if (to[r] != nullptr) to[r][digit.place] = core::canonical(chosen);
      }
    }
    float halves[kRows][kNodes / 2];
    ASYNC_EMB_UNROLL
    for (int r = 0; r < kRows; ++r) {
      ASYNC_EMB_UNROLL
      for (int k = 0; k < kNodes / 2; ++k) halves[r][k] = nodes[r][2 * k] + nodes[r][2 * k + 1];
    }
    fold_lane<kNodes / 2, kLevel + 1>(lanes, halves, width, to, roots);
  }
}

template <int N>
inline constexpr int kLevelOf = 1 + kLevelOf<N / 2>;
template <>
inline constexpr int kLevelOf<1> = 0;

// The squares of one pack of each row.
template <int N, int kRows, int kPacks>
ASYNC_EMB_INLINE void square(const core::FloatPack<N> (&sums)[kRows][kPacks], int pack, float (&squares)[kRows][N]) {
  ASYNC_EMB_UNROLL
  for (int r = 0; r < kRows; ++r) {
    if constexpr (N == 1) {
      squares[r][0] = sums[r][pack] * sums[r][pack];
    } else {
      ASYNC_EMB_UNROLL
      for (int k = 0; k < N; ++k) squares[r][k] = sums[r][pack][k] * sums[r][pack][k];
    }
  }
}

// Writes the subtree sums of each row to to[r], unless that is null. Lanes behind the row's end hold zeros.
template <int N, class Lanes, int kRows>
ASYNC_EMB_INLINE void write_subtrees(Lanes lanes, const core::FloatPack<N> (&sums)[kRows][1], std::int64_t width,
                                     float* const (&to)[kRows]) {
  const auto columns = static_cast<std::uint32_t>(width);
  float squares[kRows][N];
  square<N>(sums, 0, squares);
  float roots[kRows];
  fold_lane<N, 0>(lanes, squares, columns, to, roots);
  ASYNC_EMB_UNROLL
  for (int level = kLevelOf<N>, mask = 1; mask <= Lanes::kCount; ++level, mask *= 2) {
    const Digit digit = digit_of(columns, level);
    if (digit.present && static_cast<std::uint32_t>(lanes.index()) == digit.node * static_cast<std::uint32_t>(mask)) {
      ASYNC_EMB_UNROLL
      for (int r = 0; r < kRows; ++r) {
        if (to[r] != nullptr) to[r][digit.place] = core::canonical(roots[r]);
      }
    }
    if (mask == Lanes::kCount) break;
    ASYNC_EMB_UNROLL
    for (int r = 0; r < kRows; ++r) roots[r] += lanes.exchange(roots[r], mask);
  }
}

// The same for rows of just N * lanes * kPacks columns, which are one subtree.
template <int N, class Lanes, int kRows, int kPacks>
ASYNC_EMB_INLINE void write_root(Lanes lanes, const core::FloatPack<N> (&sums)[kRows][kPacks],
                                 float* const (&to)[kRows]) {
  float roots[kRows][kPacks];
  ASYNC_EMB_UNROLL
  for (int k = 0; k < kPacks; ++k) {
    float squares[kRows][N];
    square<N>(sums, k, squares);
    ASYNC_EMB_UNROLL
    for (int r = 0; r < kRows; ++r) roots[r][k] = core::fold<N>(squares[r]);
  }
  ASYNC_EMB_UNROLL
  for (int mask = 1; mask < Lanes::kCount; mask *= 2) {
    ASYNC_EMB_UNROLL
    for (int r = 0; r < kRows; ++r) {
      ASYNC_EMB_UNROLL
      for (int k = 0; k < kPacks; ++k) roots[r][k] += lanes.exchange(roots[r][k], mask);
    }
  }
  // One lane for all rows: a lane for each would index the arrays at run time, and they would lie in memory.
  if (lanes.index() == 0) {
    ASYNC_EMB_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (to[r] != nullptr) *to[r] = core::canonical(core::fold<kPacks>(roots[r]));
    }
  }
}

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::cuda
