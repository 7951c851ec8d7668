// Which columns a rank holds, and sizes that refuse to overflow.
#include "core/layout.h"

#include <gtest/gtest.h>

#include <string>

namespace async_emb::core {
namespace {

TEST(ColumnLayout, SharesColumnsInRankOrder) {
  const ColumnLayout layout(4, 64, 64);
  EXPECT_EQ(layout.shard_width(), 16);
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(layout.column_begin(rank), 16 * rank);
    EXPECT_EQ(layout.width(rank), 16);
    EXPECT_EQ(layout.levels(rank), (std::vector<std::int8_t>{4}));
  }
  EXPECT_EQ(layout.total_subtrees(), 4);
}

TEST(ColumnLayout, ARankMayHoldOnlyPadding) {
  const ColumnLayout layout(4, 12, 5);  // 3 columns each: 3, 2, none, none
  EXPECT_EQ(layout.width(0), 3);
  EXPECT_EQ(layout.column_begin(1), 3);
  EXPECT_EQ(layout.width(1), 2);
  for (const int rank : {2, 3}) {
    EXPECT_EQ(layout.column_begin(rank), 5);
    EXPECT_EQ(layout.width(rank), 0);
    EXPECT_EQ(layout.subtree_count(rank), 0);
    EXPECT_TRUE(layout.levels(rank).empty());
  }
  EXPECT_EQ(layout.subtree_begin(1), 2);  // rank 0: columns 0-1 and 2
  EXPECT_EQ(layout.levels(), (std::vector<std::int8_t>{1, 0, 0, 0}));
}

TEST(ColumnLayout, RefusesWhatIsNoLayout) {
  EXPECT_THROW(ColumnLayout(0, 8, 8), std::invalid_argument);
  EXPECT_THROW(ColumnLayout(3, 8, 8), std::invalid_argument);
  EXPECT_THROW(ColumnLayout(2, 8, 9), std::invalid_argument);
  EXPECT_THROW(ColumnLayout(2, 0, 0), std::invalid_argument);
}

std::string message_of(const auto& action) {
  try {
    action();
  } catch (const std::overflow_error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(CheckedSizes, NameTheQuantityAndItsFactors) {
  EXPECT_EQ(checked_product("bytes", {3, 4, 5}), 60);
  EXPECT_EQ(checked_product("bytes", {}), 1);
  EXPECT_EQ(checked_product("bytes", {std::int64_t{1} << 62, 0}), 0);
  EXPECT_EQ(message_of([] { checked_product("gradient bytes", {std::int64_t{1} << 40, 1 << 20, 8}); }),
            "async_emb: gradient bytes = 1099511627776 * 1048576 * 8 does not fit in 64 bits");
  EXPECT_EQ(message_of([] { checked_product("rows", {4, -2}); }), "async_emb: rows = 4 * -2 has a negative factor");
  EXPECT_EQ(message_of([] { checked_sum("arena bytes", {9223372036854775807, 1}); }),
            "async_emb: arena bytes = 9223372036854775807 + 1 does not fit in 64 bits");
  EXPECT_EQ(checked_int32("tokens", 2147483647), 2147483647);
  EXPECT_NE(message_of([] { checked_int32("tokens", 2147483648); }).find("tokens = 2147483648"), std::string::npos);
}

TEST(ArenaPlan, AlignsEveryArray) {
  ArenaPlan plan;
  EXPECT_EQ(plan.reserve("ids", {3}, 4), 0);
  EXPECT_EQ(plan.reserve("nothing", {0}, 4), 64);
  EXPECT_EQ(plan.reserve("sums", {5, 7}, 4), 64);
  EXPECT_EQ(plan.bytes(), 256);
  EXPECT_NE(message_of([&] { plan.reserve("sums", {std::int64_t{1} << 61, 2}, 4); }).find("sums"), std::string::npos);
  EXPECT_NE(message_of([&] { plan.reserve("sums", {9223372036854775807}, 1); }).find("sums"), std::string::npos);
  EXPECT_EQ(plan.bytes(), 256) << "a refused array takes no room";
}

}  // namespace
}  // namespace async_emb::core
