// The emulated warp itself: lanes keep step, and disagreement does not go unnoticed.
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "emulated_warp.h"

namespace async_emb::testing {
namespace {

template <int kLanes, class Body>
void on_lanes(Body body) {
  Team& team = Team::of_this_thread();
  team.run(kLanes, [&](int lane) { body(EmulatedLanes<kLanes>{&team, lane}); });
}

template <int kLanes>
void expect_exchanges() {
  std::vector<float> swapped(kLanes), first(kLanes);
  std::vector<std::uint32_t> totals(kLanes), votes(kLanes);
  for (int round = 0; round < 3; ++round) {
    on_lanes<kLanes>([&](auto lanes) {
      const auto k = static_cast<std::size_t>(lanes.index());
      for (int mask = 1; mask < kLanes; mask *= 2) {
        EXPECT_EQ(lanes.exchange(static_cast<float>(k), mask), static_cast<float>(lanes.index() ^ mask));
      }
      swapped[k] = lanes.exchange(static_cast<float>(k), kLanes / 2);
      first[k] = lanes.broadcast(static_cast<float>(k) + 5, kLanes - 1);
      totals[k] = lanes.sum(static_cast<std::uint32_t>(k) + 1);
      votes[k] = lanes.ballot(k % 2 == 1);
      lanes.synchronize();
    });
    for (int k = 0; k < kLanes; ++k) {
      const auto at = static_cast<std::size_t>(k);
      EXPECT_EQ(swapped[at], static_cast<float>(k ^ (kLanes / 2)));
      EXPECT_EQ(first[at], static_cast<float>(kLanes + 4));
      EXPECT_EQ(totals[at], static_cast<std::uint32_t>(kLanes * (kLanes + 1) / 2));
      EXPECT_EQ(votes[at], 0xaaaaaaaau >> (32 - kLanes));
    }
  }
}

TEST(WarpEmulation, ExchangesBetweenAnyNumberOfLanes) {
  expect_exchanges<2>();
  expect_exchanges<4>();
  expect_exchanges<8>();
  expect_exchanges<16>();
  expect_exchanges<32>();
}

TEST(WarpEmulation, LetsEachThreadHaveItsTeam) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back(expect_exchanges<32>);
  for (auto& thread : threads) thread.join();
}

TEST(WarpEmulation, RunsTheFirstLaneAheadOfTheOthers) {
  // So a lane that reads what another wrote without a meeting in between reads it too early or too late.
  std::vector<int> seen(32, -1);
  int written = 0;
  on_lanes<32>([&](auto lanes) {
    seen[static_cast<std::size_t>(lanes.index())] = written;
    written = lanes.index() + 1;
    lanes.synchronize();
  });
  for (int k = 0; k < 32; ++k) EXPECT_EQ(seen[static_cast<std::size_t>(k)], k);
}

using WarpEmulationDeathTest = ::testing::Test;

TEST(WarpEmulationDeathTest, StopsWhereALaneDoesNotCome) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(on_lanes<4>([](auto lanes) {
                 if (lanes.index() != 2) lanes.synchronize();
               }),
               "lane");
  EXPECT_DEATH(on_lanes<4>([](auto lanes) {
                 if (lanes.index() == 2) lanes.synchronize();
               }),
               "lane 2 still works when another has finished");
}

TEST(WarpEmulationDeathTest, StopsWhereLanesAreInDifferentOperations) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(on_lanes<4>([](auto lanes) {
                 if (lanes.index() == 3) {
                   lanes.synchronize();
                 } else {
                   lanes.sum(1);
                 }
               }),
               "lane 3 is in another operation");
}

}  // namespace
}  // namespace async_emb::testing
