// The canonical sum of the gradient rows of one table row, and the sums of squares over the columns of a shard.
//
// Occurrences are added in token order in blocks of 32: within a block first to last, then the block sums first to
// last. A sum starts from its first element, not from zero, so that one occurrence of -0 stays -0.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/dyadic.h"
#include "core/platform.h"

namespace async_emb::core {
inline namespace ASYNC_EMB_ISA {

inline constexpr std::int64_t kOccurrencesPerBlock = 32;

// One block: the sums over occurrences [begin, end) of kPacks packs of columns. Pack j of this lane is at column
// (j * lanes + index) * N of those that `grads` points at.
template <class Lanes, int N, int kPacks, class Grad>
ASYNC_EMB_INLINE void sum_block(Lanes lanes, const Grad* grads, std::int64_t grad_row_stride,
                                const std::int32_t* positions, std::int64_t begin, std::int64_t end,
                                FloatPack<N> (&sums)[kPacks]) {
  const Grad* row = grads + positions[begin] * grad_row_stride + lanes.index() * N;
  for (int j = 0; j < kPacks; ++j) sums[j] = load<N>(row + j * Lanes::kCount * N);
  for (std::int64_t i = begin + 1; i < end; ++i) {
    row = grads + positions[i] * grad_row_stride + lanes.index() * N;
    for (int j = 0; j < kPacks; ++j) sums[j] += load<N>(row + j * Lanes::kCount * N);
  }
}

// The sums over all occurrences, of which there is at least one, of kPacks packs of columns.
template <class Lanes, int N, int kPacks, class Grad>
ASYNC_EMB_INLINE void sum_tile(Lanes lanes, const Grad* grads, std::int64_t grad_row_stride,
                               const std::int32_t* positions, std::int64_t occurrences, float* sums) {
  FloatPack<N> total[kPacks];
  std::int64_t end = occurrences < kOccurrencesPerBlock ? occurrences : kOccurrencesPerBlock;
  sum_block<Lanes, N>(lanes, grads, grad_row_stride, positions, 0, end, total);
  while (end < occurrences) {
    const std::int64_t begin = end;
    end = occurrences - begin < kOccurrencesPerBlock ? occurrences : begin + kOccurrencesPerBlock;
    FloatPack<N> block[kPacks];
    sum_block<Lanes, N>(lanes, grads, grad_row_stride, positions, begin, end, block);
    for (int j = 0; j < kPacks; ++j) total[j] += block[j];
  }
  for (int j = 0; j < kPacks; ++j) {
    store_pack(canonical<N>(total[j]), sums + (j * Lanes::kCount + lanes.index()) * N);
  }
}

// Columns [column, width) in tiles of kPacks packs of N, then in tiles of half as many packs, then in smaller packs.
// The last columns, fewer than there are lanes, go to the first lanes.
template <class Lanes, int N, int kPacks, class Grad>
ASYNC_EMB_INLINE void sum_columns(Lanes lanes, const Grad* grads, std::int64_t grad_row_stride, std::int64_t column,
                                  std::int64_t width, const std::int32_t* positions, std::int64_t occurrences,
                                  float* sums) {
  constexpr int kTile = kPacks * N * Lanes::kCount;
  for (; width - column >= kTile; column += kTile) {
    sum_tile<Lanes, N, kPacks>(lanes, grads + column, grad_row_stride, positions, occurrences, sums + column);
  }
  if constexpr (kPacks > 1) {
    sum_columns<Lanes, N, kPacks / 2>(lanes, grads, grad_row_stride, column, width, positions, occurrences, sums);
  } else if constexpr (N > 1) {
    sum_columns<Lanes, N / 2, 1>(lanes, grads, grad_row_stride, column, width, positions, occurrences, sums);
  } else if constexpr (Lanes::kCount > 1) {
    if (lanes.index() < width - column) {
      sum_tile<Lanes, 1, 1>(lanes, grads + column, grad_row_stride, positions, occurrences, sums + column);
    }
  }
}

// All columns of a shard. `grads` points at the shard's first column in the gradient row of token 0.
template <class Lanes, class Grad>
ASYNC_EMB_INLINE void sum_segment(Lanes lanes, const Grad* grads, std::int64_t grad_row_stride, std::int64_t width,
                                  const std::int32_t* positions, std::int64_t occurrences, float* sums) {
  constexpr int kPacks = Lanes::kCount == 1 ? 8 : 4;  // eight accumulators hide the latency of an addition
  sum_columns<Lanes, kPack, kPacks>(lanes, grads, grad_row_stride, 0, width, positions, occurrences, sums);
}

// The sum of squares of each of the `count` subtrees that cover the shard's columns; levels as subtree_levels writes
// them.
template <class Lanes>
ASYNC_EMB_INLINE void sum_squares(Lanes lanes, const float* sums, const std::int8_t* levels, int count,
                                  float* subtree_sums) {
  for (int k = 0; k < count; ++k) {
    const float root = canonical(block_root<Lanes, true>(lanes, sums, levels[k]));
    if (lanes.index() == 0) subtree_sums[k] = root;
    sums += std::int64_t{1} << levels[k];
  }
}

// The same for columns [column_begin, column_begin + width), with no need of an array of levels.
template <class Lanes>
ASYNC_EMB_INLINE void sum_row_squares(Lanes lanes, const float* sums, std::int64_t column_begin, std::int64_t width,
                                      float* subtree_sums) {
  const std::int64_t end = column_begin + width;
  while (column_begin < end) {
    const int level = subtree_level(column_begin, end);
    const float root = canonical(block_root<Lanes, true>(lanes, sums, level));
    if (lanes.index() == 0) *subtree_sums = root;
    ++subtree_sums;
    sums += std::int64_t{1} << level;
    column_begin += std::int64_t{1} << level;
  }
}

// The row statistic from the sums of all subtrees of a whole row, in column order.
ASYNC_EMB_FN float finish_tree(const float* subtree_sums, const std::int8_t* levels, std::int64_t count) {
  DyadicAccumulator<> tree;
  for (std::int64_t k = 0; k < count; ++k) tree.push(subtree_sums[k], levels[k]);
  return canonical(tree.root());
}

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::core
