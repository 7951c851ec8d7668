// The distinct ids of a batch, against an ordered map.
#include "core/unique.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <vector>

namespace async_emb::core {
namespace {

void expect_matches_map(const std::vector<std::int32_t>& ids) {
  std::map<std::int32_t, std::vector<std::int32_t>> expected;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0) expected[ids[i]].push_back(static_cast<std::int32_t>(i));
  }
  const std::int64_t count = static_cast<std::int64_t>(ids.size());
  std::vector<std::int32_t> unique(ids.size()), offsets(ids.size() + 1), positions(ids.size());
  std::vector<std::uint64_t> scratch(static_cast<std::size_t>(unique_scratch(count)));
  const std::int64_t distinct =
      unique_ids(ids.data(), count, unique.data(), offsets.data(), positions.data(), scratch.data());
  ASSERT_EQ(distinct, static_cast<std::int64_t>(expected.size()));
  std::size_t u = 0;
  for (const auto& [id, occurrences] : expected) {
    ASSERT_EQ(unique[u], id);
    ASSERT_EQ(offsets[u + 1] - offsets[u], static_cast<std::int32_t>(occurrences.size()));
    for (std::size_t k = 0; k < occurrences.size(); ++k) ASSERT_EQ(positions[offsets[u] + k], occurrences[k]);
    ++u;
  }
}

TEST(UniqueIds, OfNothingAreNone) {
  expect_matches_map({});
  expect_matches_map({-1});
  expect_matches_map({-1, -7, -2147483647 - 1});
}

TEST(UniqueIds, OfOneIdAreOne) {
  expect_matches_map({0});
  expect_matches_map(std::vector<std::int32_t>(5000, 2147483647));
}

TEST(UniqueIds, MatchAMapForEverySizeAndRange) {
  std::mt19937 random(3);
  for (const int count : {2, 3, 31, 1000, 4095, 4096, 4097, 20000}) {
    for (const std::int64_t rows : {1, 2, 7, 256, 257, 2048, 100000, 2147483647}) {
      std::uniform_int_distribution<std::int64_t> draw(-rows / 10 - 1, rows - 1);
      std::vector<std::int32_t> ids(static_cast<std::size_t>(count));
      for (auto& id : ids) id = static_cast<std::int32_t>(draw(random));
      expect_matches_map(ids);
    }
  }
}

TEST(UniqueIds, SkipDigitsThatAllIdsShare) {
  std::vector<std::int32_t> ids;
  for (int i = 0; i < 6000; ++i) ids.push_back(0x12345600 + (i * 37) % 100);
  expect_matches_map(ids);
  for (auto& id : ids) id = (id & 0xff) << 20;
  expect_matches_map(ids);
}

}  // namespace
}  // namespace async_emb::core
