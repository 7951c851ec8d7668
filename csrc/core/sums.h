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

// One block: `sums` over occurrences [begin, end) of at most kColumns columns. This lane's columns are index(), index()
// + lanes, ...; with one lane all kColumns exist, with several the columns from `columns` on do not.
template <class Lanes, int kColumns, int kPerLane, class Grad>
ASYNC_EMB_INLINE void sum_block(Lanes lanes, const Grad* ASYNC_EMB_RESTRICT grads, std::int64_t grad_row_stride,
                                const std::int32_t* positions, std::int64_t begin, std::int64_t end,
                                std::int64_t columns, float (&sums)[kPerLane]) {
  const Grad* ASYNC_EMB_RESTRICT row = grads + positions[begin] * grad_row_stride;
  for (int j = 0; j < kPerLane; ++j) {
    const int column = j * Lanes::kCount + lanes.index();
    sums[j] = Lanes::kCount == 1 || column < columns ? to_float(row[column]) : 0.0f;
  }
  for (std::int64_t i = begin + 1; i < end; ++i) {
    row = grads + positions[i] * grad_row_stride;
    for (int j = 0; j < kPerLane; ++j) {
      const int column = j * Lanes::kCount + lanes.index();
      sums[j] += Lanes::kCount == 1 || column < columns ? to_float(row[column]) : 0.0f;
    }
  }
}

// kColumns columns of the sum; `grads` points at the first of them in the gradient row of token 0. At least one
// occurrence.
template <class Lanes, int kColumns, class Grad>
ASYNC_EMB_INLINE void sum_tile(Lanes lanes, const Grad* grads, std::int64_t grad_row_stride,
                               const std::int32_t* positions, std::int64_t occurrences, std::int64_t columns,
                               float* ASYNC_EMB_RESTRICT sums) {
  constexpr int kPerLane = (kColumns + Lanes::kCount - 1) / Lanes::kCount;
  float total[kPerLane];
  std::int64_t begin = 0;
  std::int64_t end = occurrences < kOccurrencesPerBlock ? occurrences : kOccurrencesPerBlock;
  sum_block<Lanes, kColumns>(lanes, grads, grad_row_stride, positions, begin, end, columns, total);
  while (end < occurrences) {
    begin = end;
    end = occurrences - begin < kOccurrencesPerBlock ? occurrences : begin + kOccurrencesPerBlock;
    float block[kPerLane];
    sum_block<Lanes, kColumns>(lanes, grads, grad_row_stride, positions, begin, end, columns, block);
    for (int j = 0; j < kPerLane; ++j) total[j] += block[j];
  }
  for (int j = 0; j < kPerLane; ++j) {
    const int column = j * Lanes::kCount + lanes.index();
    if (Lanes::kCount == 1 || column < columns) sums[column] = canonical(total[j]);
  }
}

// All columns of a shard. `grads` points at the shard's first column in the gradient row of token 0.
template <class Lanes, class Grad>
ASYNC_EMB_INLINE void sum_segment(Lanes lanes, const Grad* grads, std::int64_t grad_row_stride, std::int64_t width,
                                  const std::int32_t* positions, std::int64_t occurrences, float* sums) {
  std::int64_t column = 0;
  if constexpr (Lanes::kCount == 1) {
    for (; column + 64 <= width; column += 64) {
      sum_tile<Lanes, 64>(lanes, grads + column, grad_row_stride, positions, occurrences, 64, sums + column);
    }
    const std::int64_t left = width - column;
    if (left & 32) {
      sum_tile<Lanes, 32>(lanes, grads + column, grad_row_stride, positions, occurrences, 32, sums + column);
      column += 32;
    }
    if (left & 16) {
      sum_tile<Lanes, 16>(lanes, grads + column, grad_row_stride, positions, occurrences, 16, sums + column);
      column += 16;
    }
    if (left & 8) {
      sum_tile<Lanes, 8>(lanes, grads + column, grad_row_stride, positions, occurrences, 8, sums + column);
      column += 8;
    }
    if (left & 4) {
      sum_tile<Lanes, 4>(lanes, grads + column, grad_row_stride, positions, occurrences, 4, sums + column);
      column += 4;
    }
    for (; column < width; ++column) {
      sum_tile<Lanes, 1>(lanes, grads + column, grad_row_stride, positions, occurrences, 1, sums + column);
    }
  } else {
    constexpr int kTile = 4 * Lanes::kCount;
    for (; column < width; column += kTile) {
      sum_tile<Lanes, kTile>(lanes, grads + column, grad_row_stride, positions, occurrences, width - column,
                             sums + column);
    }
  }
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

// The row statistic from the sums of all subtrees of a whole row, in column order.
ASYNC_EMB_FN float finish_tree(const float* subtree_sums, const std::int8_t* levels, std::int64_t count) {
  DyadicAccumulator tree;
  for (std::int64_t k = 0; k < count; ++k) tree.push(subtree_sums[k], levels[k]);
  return canonical(tree.root());
}

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::core
