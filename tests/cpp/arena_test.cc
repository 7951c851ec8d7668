// The memory of a pipeline: sizes from the spec, overflow found before anything is allocated.
#include "context/arena.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace async_emb::context {
namespace {

ContextSpec spec_of(int group_size, std::int64_t tokens_per_rank, std::int64_t emb_width, std::int64_t logical_width,
                    std::int64_t num_unique, core::DType dtype) {
  ContextSpec spec;
  spec.group_size = group_size;
  spec.tokens_per_rank = tokens_per_rank;
  spec.emb_width = emb_width;
  spec.logical_width = logical_width;
  spec.num_unique = num_unique;
  spec.dtype = dtype;
  return spec;
}

core::ColumnLayout layout_of(const ContextSpec& spec) { return {spec.group_size, spec.emb_width, spec.logical_width}; }

std::vector<int> all_ranks(const ContextSpec& spec) {
  std::vector<int> ranks(static_cast<std::size_t>(spec.group_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

TEST(Buffer, IsAlignedToCacheLines) {
  for (const std::int64_t bytes : {1, 63, 64, 65, 1000}) {
    const Buffer buffer(bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.as<char>()) % 64, 0u);
    EXPECT_EQ(buffer.bytes(), bytes);
    for (std::int64_t i = 0; i < bytes; ++i) buffer.as<char>()[i] = 1;
  }
}

TEST(Buffer, OfNothingHasNoMemory) {
  EXPECT_EQ(Buffer(0).as<char>(), nullptr);
  EXPECT_EQ(Buffer().bytes(), 0);
}

TEST(Arena, HasTheSizesOfTheSpec) {
  // Columns of the ranks: [0, 3), [3, 6), [6, 7), none; the subtrees of the statistic: {2, 1}, {1, 2}, {1}, {}.
  const ContextSpec spec = spec_of(4, 5, 12, 7, 9, core::DType::kBFloat16);
  const Arena arena(spec, layout_of(spec), all_ranks(spec));
  ASSERT_EQ(arena.rows.size(), 4u);
  ASSERT_EQ(arena.sums.size(), 4u);
  for (const Buffer& rows : arena.rows) EXPECT_EQ(rows.bytes(), 5 * 12 * 2);
  const std::vector<std::int64_t> columns{3, 3, 1, 0};
  for (std::size_t rank = 0; rank < 4; ++rank) EXPECT_EQ(arena.sums[rank].bytes(), 9 * columns[rank] * 4);
  EXPECT_EQ(arena.grads.bytes(), 20 * 12 * 2);
  EXPECT_EQ(arena.subtree_sums.bytes(), 9 * 5 * 4);
  EXPECT_EQ(arena.statistics.bytes(), 9 * 4);
  EXPECT_EQ(arena.sort_scratch.bytes(), cpu::unique_ids_scratch(20) * 8);
  EXPECT_EQ(arena.bytes(), 4 * 120 + 9 * 7 * 4 + 480 + 180 + 36 + arena.sort_scratch.bytes());
}

TEST(Arena, HoldsWhatTheRanksOfThisProcessNeed) {
  const ContextSpec spec = spec_of(4, 5, 12, 7, 9, core::DType::kBFloat16);
  const Arena arena(spec, layout_of(spec), {1, 2});
  for (const std::size_t rank : {std::size_t{0}, std::size_t{3}}) {
    EXPECT_EQ(arena.rows[rank].bytes(), 0);
    EXPECT_EQ(arena.sums[rank].bytes(), 0);
  }
  EXPECT_EQ(arena.rows[1].bytes(), 5 * 12 * 2);
  EXPECT_EQ(arena.sums[2].bytes(), 9 * 1 * 4);
  EXPECT_EQ(arena.grads.bytes(), 20 * 6 * 2);        // the columns of two ranks, of everybody's tokens
  EXPECT_EQ(arena.subtree_sums.bytes(), 9 * 5 * 4);  // those of the others come from their processes
}

TEST(Arena, NeedsNoMoreUniqueRowsThanTokens) {
  const ContextSpec spec = spec_of(2, 3, 4, 4, 1000, core::DType::kFloat32);
  const Arena arena(spec, layout_of(spec), all_ranks(spec));
  EXPECT_EQ(arena.statistics.bytes(), 6 * 4);
}

TEST(Arena, KeepsNoGradientsOfAContextThatOnlyLooksUp) {
  ContextSpec spec = spec_of(2, 3, 4, 4, 7, core::DType::kFloat16);
  spec.lookup_only = true;
  const Arena arena(spec, layout_of(spec), all_ranks(spec));
  EXPECT_EQ(arena.bytes(), 2 * 3 * 4 * 2);
}

TEST(Arena, RefusesSizesThatOverflow) {
  const auto message = [](const ContextSpec& spec) -> std::string {
    try {
      const Arena arena(spec, layout_of(spec), all_ranks(spec));
    } catch (const std::overflow_error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_NE(message(spec_of(2, std::int64_t{1} << 62, 4, 4, 7, core::DType::kFloat32)).find("tokens of a batch"),
            std::string::npos);
  EXPECT_NE(message(spec_of(2, std::int64_t{1} << 30, 4, 4, 7, core::DType::kFloat32)).find("2147483648"),
            std::string::npos);
  EXPECT_NE(message(spec_of(1, 1 << 20, std::int64_t{1} << 50, 4, 7, core::DType::kFloat32)).find("looked-up rows"),
            std::string::npos);
}

TEST(BatchIds, HoldTheIdsOfTheWholeGroup) {
  const BatchIds batch(20);
  EXPECT_EQ(batch.bytes(), (20 + 20 + 21 + 20) * 4);
  EXPECT_EQ(batch.holders, 0);
  EXPECT_FALSE(batch.indexed);
}

}  // namespace
}  // namespace async_emb::context
