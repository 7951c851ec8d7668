// Sums whose order is a fixed binary tree over the index: neighbours first, then pairs of neighbours, and so on.
//
// The tree over columns is what makes a row statistic independent of the number of ranks: a rank covers a few whole
// subtrees, sums those, and whoever holds the sums of all subtrees finishes the same tree. A missing index counts as
// +0, which changes no sum of values that are not negative; so a tree over any number of values is the tree over the
// next power of two.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/dtype.h"
#include "core/platform.h"

namespace async_emb::core {
inline namespace ASYNC_EMB_ISA {

// Level of the largest aligned power-of-two block that starts at `begin` and ends within `end`; begin < end.
ASYNC_EMB_FN constexpr int subtree_level(std::int64_t begin, std::int64_t end) {
  int level = 0;
  while (level < 61 && (begin >> level) % 2 == 0 && begin + (std::int64_t{2} << level) <= end) ++level;
  return level;
}

// Subtrees that cover columns [begin, end): aligned power-of-two blocks, as few as possible. At most 2 * 61.
ASYNC_EMB_FN constexpr int count_subtrees(std::int64_t column_begin, std::int64_t column_end) {
  int count = 0;
  for (; column_begin < column_end; ++count) column_begin += std::int64_t{1} << subtree_level(column_begin, column_end);
  return count;
}

// Writes the level (log2 of the columns) of each of those subtrees, in column order. Returns their number.
ASYNC_EMB_FN constexpr int subtree_levels(std::int64_t column_begin, std::int64_t column_end, std::int8_t* levels) {
  int count = 0;
  for (; column_begin < column_end; ++count) {
    const int level = subtree_level(column_begin, column_end);
    levels[count] = static_cast<std::int8_t>(level);
    column_begin += std::int64_t{1} << level;
  }
  return count;
}

inline constexpr int kMaxSubtrees = 2 * 61;  // of one contiguous range of columns

// Where an accumulator keeps the sums that wait for their right neighbours; a deeper one covers fewer values.
class ArrayStack {
 public:
  ArrayStack() = default;
  template <class Lanes>
  ASYNC_EMB_INLINE explicit ArrayStack(Lanes) {}

  ASYNC_EMB_INLINE float get(int depth) const { return at_[depth]; }
  ASYNC_EMB_INLINE void set(int depth, float sum) { at_[depth] = sum; }

 private:
  float at_[64];  // levels on the stack fall strictly, so there are never more than levels exist
};

// In one register of each of many lanes: an array that is indexed at run time would lie in memory on a GPU. Enough for
// 2^(lanes) blocks.
template <class Lanes>
class LaneStack {
 public:
  ASYNC_EMB_INLINE explicit LaneStack(Lanes lanes) : lanes_(lanes) {}
  ASYNC_EMB_INLINE float get(int depth) const { return lanes_.broadcast(mine_, depth); }
  ASYNC_EMB_INLINE void set(int depth, float sum) { mine_ = lanes_.index() == depth ? sum : mine_; }

 private:
  Lanes lanes_;
  float mine_ = 0.0f;
};

// In memory that the caller brings, an element every `stride`.
class BorrowedStack {
 public:
  ASYNC_EMB_INLINE BorrowedStack(float* memory, int stride) : memory_(memory), stride_(stride) {}
  ASYNC_EMB_INLINE float get(int depth) const { return memory_[depth * stride_]; }
  ASYNC_EMB_INLINE void set(int depth, float sum) { memory_[depth * stride_] = sum; }

 private:
  float* memory_;
  int stride_;
};

// Merges the sums of blocks that tile [0, n) in order, like the carries of a binary counter.
template <class Stack = ArrayStack>
class DyadicAccumulator {
 public:
  DyadicAccumulator() = default;
  ASYNC_EMB_INLINE explicit DyadicAccumulator(Stack stack) : stack_(stack) {}

  ASYNC_EMB_INLINE void push(float sum, int level) {
    // A block starts where the values so far end, so no level below its own is waiting.
    for (; (waiting_ >> level) % 2 != 0; ++level) {
      sum = stack_.get(--depth_) + sum;
      waiting_ ^= std::uint64_t{1} << level;
    }
    stack_.set(depth_, sum);
    waiting_ |= std::uint64_t{1} << level;
    ++depth_;
  }

  // The sum of the whole tree; what is missing on the right is +0. No blocks give +0.
  ASYNC_EMB_INLINE float root() const {
    if (depth_ == 0) return 0.0f;
    float sum = stack_.get(depth_ - 1);
    for (int i = depth_ - 2; i >= 0; --i) sum = stack_.get(i) + sum;
    return sum;
  }

 private:
  Stack stack_;
  std::uint64_t waiting_ = 0;  // bit l: a sum of level l is on the stack
  int depth_ = 0;
};

// The root over kSize values that one lane holds.
template <int kSize>
ASYNC_EMB_INLINE float fold(const float* values) {
  if constexpr (kSize == 1) {
    return values[0];
  } else {
    float halves[kSize / 2];
    ASYNC_EMB_UNROLL
    for (int i = 0; i < kSize / 2; ++i) halves[i] = values[2 * i] + values[2 * i + 1];
    return fold<kSize / 2>(halves);
  }
}

// The root over min(size, kPerLane * lanes) values, or over their squares. With several lanes neighbours sit in
// neighbouring lanes, so the first levels of the tree are exchanges between lanes.
template <class Lanes, int kPerLane, bool kSquares>
ASYNC_EMB_INLINE float tile_root(Lanes lanes, const float* values, int size) {
  float mine[kPerLane];
  ASYNC_EMB_UNROLL
  for (int j = 0; j < kPerLane; ++j) {
    const int i = j * Lanes::kCount + lanes.index();
    const float value = Lanes::kCount == 1 || i < size ? values[i] : 0.0f;
    mine[j] = kSquares ? value * value : value;
  }
  ASYNC_EMB_UNROLL
  for (int mask = 1; mask < Lanes::kCount; mask *= 2) {
    ASYNC_EMB_UNROLL
    for (int j = 0; j < kPerLane; ++j) mine[j] += lanes.exchange(mine[j], mask);
  }
  return fold<kPerLane>(mine);
}

// The root over one aligned block of 2^level values, or over their squares.
template <class Lanes, bool kSquares>
ASYNC_EMB_INLINE float block_root(Lanes lanes, const float* values, int level) {
  if constexpr (Lanes::kCount == 1) {
    switch (level) {
      case 0:
        return tile_root<Lanes, 1, kSquares>(lanes, values, 1);
      case 1:
        return tile_root<Lanes, 2, kSquares>(lanes, values, 2);
      case 2:
        return tile_root<Lanes, 4, kSquares>(lanes, values, 4);
      case 3:
        return tile_root<Lanes, 8, kSquares>(lanes, values, 8);
      case 4:
        return tile_root<Lanes, 16, kSquares>(lanes, values, 16);
      case 5:
        return tile_root<Lanes, 32, kSquares>(lanes, values, 32);
      case 6:
        return tile_root<Lanes, 64, kSquares>(lanes, values, 64);
      case 7:
        return tile_root<Lanes, 128, kSquares>(lanes, values, 128);
      default:
        break;
    }
  } else {
    const std::int64_t size = std::int64_t{1} << level;
    if (size <= Lanes::kCount) return tile_root<Lanes, 1, kSquares>(lanes, values, static_cast<int>(size));
    if (size == 2 * Lanes::kCount) return tile_root<Lanes, 2, kSquares>(lanes, values, 2 * Lanes::kCount);
  }
  constexpr int kPerLane = Lanes::kCount == 1 ? 128 : 4;
  constexpr int kTile = kPerLane * Lanes::kCount;
  using Stack = std::conditional_t<(Lanes::kCount >= 32), LaneStack<Lanes>, ArrayStack>;
  DyadicAccumulator<Stack> tree{Stack(lanes)};
  for (std::int64_t i = 0; i < std::int64_t{1} << level; i += kTile) {
    tree.push(tile_root<Lanes, kPerLane, kSquares>(lanes, values + i, kTile), 0);
  }
  return tree.root();
}

// The dyadic sum over any number of values.
template <class Lanes>
ASYNC_EMB_FN float dyadic_sum(Lanes lanes, const float* values, std::int64_t count) {
  constexpr int kTileLevel = 7;
  DyadicAccumulator<> tree;
  std::int64_t i = 0;
  for (; i + (1 << kTileLevel) <= count; i += 1 << kTileLevel) {
    tree.push(block_root<Lanes, false>(lanes, values + i, kTileLevel), kTileLevel);
  }
  while (i < count) {
    const int level = subtree_level(i, count);
    tree.push(block_root<Lanes, false>(lanes, values + i, level), level);
    i += std::int64_t{1} << level;
  }
  return canonical(tree.root());
}

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::core
