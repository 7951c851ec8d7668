// The rendezvous of the ranks of one process.
#include "comm/arrivals.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

namespace async_emb::comm {
namespace {

std::vector<int> first_ranks(int count) {
  std::vector<int> ranks(static_cast<std::size_t>(count));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

TEST(Arrivals, RefusesAnEmptyGroup) { EXPECT_THROW(Arrivals({}), std::invalid_argument); }

TEST(Arrivals, AwaitsTheRanksOfThisProcessAlone) {
  Arrivals group({1, 4});
  bool went_on = false;
  group.arrive(Channel::kLookup, 1, 4, [&] { went_on = true; });
  EXPECT_EQ(group.missing(Channel::kLookup, 1), std::vector<int>{1});
  EXPECT_FALSE(went_on);
  group.arrive(Channel::kLookup, 1, 1, [&] { went_on = true; });
  EXPECT_TRUE(went_on);
  EXPECT_THROW(group.arrive(Channel::kLookup, 1, 2, [] {}), std::out_of_range);
}

TEST(Arrivals, GoesOnWithTheLastArrivalWhateverTheOrder) {
  std::vector<int> order{0, 1, 2, 3};
  do {
    Arrivals group(first_ranks(4));
    int went_on = -1;
    for (const int rank : order) {
      EXPECT_EQ(went_on, -1);
      group.arrive(Channel::kLookup, 1, rank, [&, rank] { went_on = rank; });
    }
    EXPECT_EQ(went_on, order.back());
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(Arrivals, NamesWhoIsMissing) {
  Arrivals group(first_ranks(4));
  const auto nothing = [] {};
  group.arrive(Channel::kLookup, 7, 2, nothing);
  group.arrive(Channel::kLookup, 7, 0, nothing);
  EXPECT_EQ(group.missing(Channel::kLookup, 7), (std::vector<int>{1, 3}));
  EXPECT_EQ(group.missing(Channel::kLookup, 8), (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(group.missing(Channel::kUpdate, 7), (std::vector<int>{0, 1, 2, 3}));
  group.arrive(Channel::kLookup, 7, 1, nothing);
  group.arrive(Channel::kLookup, 7, 3, nothing);
  EXPECT_TRUE(group.missing(Channel::kLookup, 7).empty());
}

TEST(Arrivals, KeepsChannelsApart) {
  Arrivals group(first_ranks(2));
  int lookups = 0, updates = 0;
  group.arrive(Channel::kLookup, 1, 0, [&] { ++lookups; });
  group.arrive(Channel::kUpdate, 1, 1, [&] { ++updates; });
  EXPECT_EQ(lookups + updates, 0);
  group.arrive(Channel::kUpdate, 1, 0, [&] { ++updates; });
  EXPECT_EQ(updates, 1);
  group.arrive(Channel::kLookup, 1, 1, [&] { ++lookups; });
  EXPECT_EQ(lookups, 1);
}

TEST(Arrivals, GoesOnAfterAStepThatWasGivenUp) {
  Arrivals group(first_ranks(2));
  int completed = 0;
  group.arrive(Channel::kLookup, 5, 0, [&] { completed = 5; });  // rank 1 never comes: its call was refused
  group.arrive(Channel::kLookup, 6, 1, [&] { completed = 6; });
  EXPECT_EQ(completed, 0);
  group.arrive(Channel::kLookup, 6, 0, [&] { completed = 6; });
  EXPECT_EQ(completed, 6);
}

TEST(Arrivals, RefusesASecondArrivalAndChangesNothing) {
  Arrivals group(first_ranks(2));
  int completed = 0;
  group.arrive(Channel::kLookup, 2, 0, [&] { ++completed; });
  EXPECT_THROW(group.arrive(Channel::kLookup, 2, 0, [&] { ++completed; }), std::logic_error);
  EXPECT_THROW(group.arrive(Channel::kLookup, 1, 0, [&] { ++completed; }), std::logic_error);
  EXPECT_EQ(completed, 0);
  group.arrive(Channel::kLookup, 2, 1, [&] { ++completed; });
  EXPECT_EQ(completed, 1);
}

TEST(Arrivals, LetsAContinuationArriveAgain) {
  Arrivals group(first_ranks(1));
  int completed = 0;
  group.arrive(Channel::kLookup, 1, 0, [&] {
    ++completed;
    EXPECT_TRUE(group.missing(Channel::kLookup, 1).empty());  // it does not run under the group's lock
    group.arrive(Channel::kLookup, 2, 0, [&] { ++completed; });
  });
  EXPECT_EQ(completed, 2);
}

TEST(Arrivals, RunsEachContinuationOnceWithRanksOnThreads) {
  constexpr int kRanks = 4;
  constexpr int kSteps = 300;
  Arrivals group(first_ranks(kRanks));
  std::vector<std::atomic<int>> completed(kSteps + 1);
  std::vector<int> written(kRanks);  // unsynchronised: the rendezvous itself must order it
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      for (int step = 1; step <= kSteps; ++step) {
        written[static_cast<std::size_t>(rank)] = step;
        group.arrive(Channel::kUpdate, step, rank, [&, step] {
          for (const int last : written) EXPECT_EQ(last, step);
          ++completed[static_cast<std::size_t>(step)];
        });
        while (completed[static_cast<std::size_t>(step)] == 0) std::this_thread::yield();
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (int step = 1; step <= kSteps; ++step) EXPECT_EQ(completed[static_cast<std::size_t>(step)], 1);
}

}  // namespace
}  // namespace async_emb::comm
