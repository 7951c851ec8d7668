// What becomes of ids outside of the table, and of padding.
#include "core/ids.h"

#include <gtest/gtest.h>

#include <vector>

namespace async_emb::core {
namespace {

constexpr std::int64_t kLargest = 9223372036854775807;

struct Cleaned {
  std::vector<std::int32_t> rows;
  IdReport report;
};

template <class Id>
Cleaned clean(const std::vector<Id>& ids, std::int64_t rows, IdPolicy policy, bool has_padding = false,
              std::int64_t padding_id = 0) {
  Cleaned result{std::vector<std::int32_t>(ids.size()), {}};
  result.report = clean_ids(ids.data(), static_cast<std::int64_t>(ids.size()), rows, policy, has_padding, padding_id,
                            result.rows.data());
  return result;
}

using Rows = std::vector<std::int32_t>;

TEST(CleanIds, KeepsIdsInRange) {
  const Cleaned result = clean<std::int32_t>({0, 7, 3}, 8, IdPolicy::kError);
  EXPECT_EQ(result.rows, (Rows{0, 7, 3}));
  EXPECT_EQ(result.report.bad, 0);
  EXPECT_EQ(result.report.first_bad_position, -1);
}

TEST(CleanIds, DropsBadIdsAndReportsTheFirst) {
  for (const IdPolicy policy : {IdPolicy::kError, IdPolicy::kDrop}) {
    const Cleaned result = clean<std::int32_t>({5, 8, -1, 9, 2147483647, -2147483647 - 1, 0}, 8, policy);
    EXPECT_EQ(result.rows, (Rows{5, -1, -1, -1, -1, -1, 0}));
    EXPECT_EQ(result.report.bad, 5);
    EXPECT_EQ(result.report.first_bad_position, 1);
    EXPECT_EQ(result.report.first_bad_id, 8);
  }
}

TEST(CleanIds, ClampsToTheNearestRowAndStillCounts) {
  const Cleaned result = clean<std::int32_t>({-1, 8, 7, 2147483647, -2147483647 - 1}, 8, IdPolicy::kClamp);
  EXPECT_EQ(result.rows, (Rows{0, 7, 7, 7, 0}));
  EXPECT_EQ(result.report.bad, 4);
  EXPECT_EQ(result.report.first_bad_id, -1);
}

TEST(CleanIds, NeverNarrowsAWideId) {
  const std::vector<std::int64_t> ids = {4294967296, 4294967299, -4294967296, kLargest, -kLargest - 1, 3};
  EXPECT_EQ(clean(ids, 8, IdPolicy::kDrop).rows, (Rows{-1, -1, -1, -1, -1, 3}));
  EXPECT_EQ(clean(ids, 8, IdPolicy::kClamp).rows, (Rows{7, 7, 0, 7, 0, 3}));
  EXPECT_EQ(clean(ids, 8, IdPolicy::kDrop).report.first_bad_id, 4294967296);
}

TEST(CleanIds, PaddingIsNotBadWhereverItLies) {
  const Cleaned inside = clean<std::int32_t>({0, 1, 0}, 8, IdPolicy::kError, true, 0);
  EXPECT_EQ(inside.rows, (Rows{-1, 1, -1}));
  EXPECT_EQ(inside.report.padding, 2);
  EXPECT_EQ(inside.report.bad, 0);
  const Cleaned outside = clean<std::int64_t>({-1, 1, 9}, 8, IdPolicy::kClamp, true, -1);
  EXPECT_EQ(outside.rows, (Rows{-1, 1, 7}));
  EXPECT_EQ(outside.report.padding, 1);
  EXPECT_EQ(outside.report.bad, 1);
  EXPECT_EQ(outside.report.first_bad_position, 2);
}

TEST(CleanIds, AnIdClampedOntoPaddingHasNoRow) {
  const Cleaned first = clean<std::int32_t>({-5, 0, 1, 9}, 8, IdPolicy::kClamp, true, 0);
  EXPECT_EQ(first.rows, (Rows{-1, -1, 1, 7}));
  EXPECT_EQ(first.report.bad, 2);
  EXPECT_EQ(first.report.padding, 1);
  const Cleaned last = clean<std::int32_t>({-5, 7, 1, 9}, 8, IdPolicy::kClamp, true, 7);
  EXPECT_EQ(last.rows, (Rows{0, -1, 1, -1}));
}

TEST(CleanIds, HandlesNoIdsAndNoRows) {
  EXPECT_EQ(clean<std::int32_t>({}, 8, IdPolicy::kError).report.bad, 0);
  EXPECT_EQ(clean<std::int32_t>({0, -1, 5}, 0, IdPolicy::kClamp).rows, (Rows{-1, -1, -1}));
}

}  // namespace
}  // namespace async_emb::core
