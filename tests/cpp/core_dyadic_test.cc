// Trees of additions: the same root however the index is cut.
#include "core/dyadic.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/lanes.h"
#include "core/layout.h"
#include "core/sums.h"

namespace async_emb::core {
namespace {

// The definition: pad with +0 to a power of two, then add neighbours until one value is left.
float padded_root(std::vector<float> values) {
  std::size_t size = 1;
  while (size < values.size()) size *= 2;
  values.resize(size, 0.0f);
  for (; size > 1; size /= 2) {
    for (std::size_t i = 0; i < size / 2; ++i) values[i] = values[2 * i] + values[2 * i + 1];
  }
  return values[0];
}

std::vector<float> random_values(std::size_t count, bool negative) {
  std::mt19937 random(static_cast<unsigned>(count));
  std::vector<float> values(count);
  for (auto& value : values) {
    value = std::ldexp(static_cast<float>(random() % 16777216), static_cast<int>(random() % 40) - 40);
    if (negative && random() % 2 == 0) value = -value;
  }
  return values;
}

TEST(DyadicSum, IsTheTreeOverThePaddedValues) {
  EXPECT_EQ(bits_of(dyadic_sum(OneLane(), nullptr, 0)), 0u);
  for (const std::size_t count : {1, 2, 3, 5, 31, 63, 64, 65, 127, 128, 129, 255, 300, 1000, 1023, 4097, 70001}) {
    const std::vector<float> values = random_values(count, false);
    EXPECT_EQ(bits_of(dyadic_sum(OneLane(), values.data(), static_cast<std::int64_t>(count))),
              bits_of(padded_root(values)))
        << count;
  }
}

TEST(DyadicSum, OfANaNIsTheCanonicalOne) {
  std::vector<float> values(300, 1.0f);
  values[200] = -std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(bits_of(dyadic_sum(OneLane(), values.data(), 300)), 0x7fc00000u);
}

TEST(Subtrees, AreAlignedMaximalAndInOrder) {
  for (std::int64_t begin = 0; begin < 70; ++begin) {
    for (std::int64_t end = begin; end < 140; ++end) {
      std::int8_t levels[kMaxSubtrees];
      const int count = subtree_levels(begin, end, levels);
      ASSERT_EQ(count, count_subtrees(begin, end));
      std::int64_t at = begin;
      for (int k = 0; k < count; ++k) {
        const std::int64_t size = std::int64_t{1} << levels[k];
        ASSERT_EQ(at % size, 0);
        ASSERT_LE(at + size, end);
        ASSERT_FALSE(at % (2 * size) == 0 && at + 2 * size <= end) << "a larger block would fit";
        at += size;
      }
      ASSERT_EQ(at, end);
    }
  }
  EXPECT_EQ(count_subtrees(1, std::int64_t{1} << 40), 40);
}

// Each rank sums its own subtrees; whoever has them all finishes the tree.
float root_over_ranks(const std::vector<float>& row, const ColumnLayout& layout) {
  std::vector<float> subtree_sums(static_cast<std::size_t>(layout.total_subtrees()));
  for (int rank = 0; rank < layout.group_size(); ++rank) {
    const std::vector<std::int8_t> levels = layout.levels(rank);
    sum_squares(OneLane(), row.data() + layout.column_begin(rank), levels.data(), static_cast<int>(levels.size()),
                subtree_sums.data() + layout.subtree_begin(rank));
  }
  const std::vector<std::int8_t> levels = layout.levels();
  return finish_tree(subtree_sums.data(), levels.data(), static_cast<std::int64_t>(levels.size()));
}

TEST(RowStatistic, HasTheSameBitsForAnyNumberOfRanks) {
  for (const std::int64_t emb_width : {1, 2, 6, 12, 60, 64, 120, 128, 210, 840, 3600}) {
    for (const std::int64_t logical_width : {emb_width, emb_width - 1, emb_width / 2 + 1, std::int64_t{1}}) {
      if (logical_width < 1) continue;
      const std::vector<float> row = random_values(static_cast<std::size_t>(logical_width), true);
      std::vector<float> squares;
      for (const float value : row) squares.push_back(value * value);
      const float expected = padded_root(squares);
      for (int ranks = 1; ranks <= emb_width && ranks <= 64; ++ranks) {
        if (emb_width % ranks != 0) continue;
        ASSERT_EQ(bits_of(root_over_ranks(row, ColumnLayout(ranks, emb_width, logical_width))), bits_of(expected))
            << "emb_width " << emb_width << " logical_width " << logical_width << " ranks " << ranks;
      }
    }
  }
}

TEST(RowStatistic, OfNoSubtreesIsZero) { EXPECT_EQ(bits_of(finish_tree(nullptr, nullptr, 0)), 0u); }

}  // namespace
}  // namespace async_emb::core
