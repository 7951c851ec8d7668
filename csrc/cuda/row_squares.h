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
    if (digit.present && static_cast<std::uint32_t>(lanes.index()) == digit.node / kNodes) {
      ASYNC_EMB_UNROLL
      for (int k = 0; k < kNodes; k += 2) {  // a digit's node is the left one of its pair
        ASYNC_EMB_UNROLL
        for (int r = 0; r < kRows; ++r) {
          if (static_cast<std::uint32_t>(k) == digit.node % kNodes && to[r] != nullptr) {
            to[r][digit.place] = core::canonical(nodes[r][k]);
          }
        }
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
constexpr int level_of() {
  return N == 1 ? 0 : 1 + level_of<N == 1 ? 1 : N / 2>();
}

// Writes the subtree sums of each row to to[r], unless that is null. With one pack a lane the row may have any width up
// to N * lanes; with two it must be just twice that.
template <int N, class Lanes, int kRows, int kTiles>
ASYNC_EMB_INLINE void write_subtrees(Lanes lanes, const core::FloatPack<N> (&sums)[kRows][kTiles], std::int64_t width,
                                     float* const (&to)[kRows]) {
  static_assert(kTiles == 1 || kTiles == 2);
  const auto columns = static_cast<std::uint32_t>(width);
  float roots[kTiles][kRows];
  ASYNC_EMB_UNROLL
  for (int t = 0; t < kTiles; ++t) {
    float squares[kRows][N];
    ASYNC_EMB_UNROLL
    for (int r = 0; r < kRows; ++r) {
      ASYNC_EMB_UNROLL
      for (int k = 0; k < N; ++k) {
        float value;
        if constexpr (N == 1) {
          value = sums[r][t];
        } else {
          value = sums[r][t][k];
        }
        squares[r][k] = value * value;
      }
    }
    fold_lane<N, 0>(lanes, squares, kTiles == 1 ? columns : 0, to, roots[t]);
  }
  ASYNC_EMB_UNROLL
  for (int level = level_of<N>(), mask = 1; mask <= Lanes::kCount; ++level, mask *= 2) {
    const Digit digit = digit_of(columns, level);
    if (kTiles == 1 && digit.present &&
        static_cast<std::uint32_t>(lanes.index()) == digit.node * static_cast<std::uint32_t>(mask)) {
      ASYNC_EMB_UNROLL
      for (int r = 0; r < kRows; ++r) {
        if (to[r] != nullptr) to[r][digit.place] = core::canonical(roots[0][r]);
      }
    }
    if (mask == Lanes::kCount) break;
    ASYNC_EMB_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      ASYNC_EMB_UNROLL
      for (int r = 0; r < kRows; ++r) roots[t][r] += lanes.exchange(roots[t][r], mask);
    }
  }
  if (kTiles == 2 && lanes.index() == 0) {
    ASYNC_EMB_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (to[r] != nullptr) to[r][0] = core::canonical(roots[0][r] + roots[kTiles - 1][r]);
    }
  }
}

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::cuda
