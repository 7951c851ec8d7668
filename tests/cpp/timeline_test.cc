// The recorded order of events.
#include "context/timeline.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

namespace async_emb::context {
namespace {

TEST(Timeline, RecordsNothingUnlessAskedTo) {
  Timeline& timeline = Timeline::shared();
  EXPECT_FALSE(timeline.recording());
  timeline.record("lookup_begin", "users", 0, 1);
  timeline.start();
  EXPECT_TRUE(timeline.recording());
  EXPECT_TRUE(timeline.stop().empty());
  EXPECT_FALSE(timeline.recording());
}

TEST(Timeline, KeepsEventsInOrder) {
  Timeline& timeline = Timeline::shared();
  timeline.start();
  timeline.record("lookup_begin", "users", 3, 7);
  timeline.record("forward", "", 4, 8);
  const std::vector<TimelineEvent> events = timeline.stop();
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].name, "lookup_begin");
  EXPECT_EQ(events[0].table, "users");
  EXPECT_EQ(events[0].device, 3);
  EXPECT_EQ(events[0].step, 7);
  EXPECT_EQ(events[1].name, "forward");
  EXPECT_EQ(events[1].table, "");
  EXPECT_LE(events[0].nanoseconds, events[1].nanoseconds);
}

TEST(Timeline, StartsEmptyEachTime) {
  Timeline& timeline = Timeline::shared();
  timeline.start();
  timeline.record("a", "users", 0, 1);
  timeline.start();
  EXPECT_TRUE(timeline.stop().empty());
  EXPECT_TRUE(timeline.stop().empty());
}

TEST(Timeline, TakesEventsOfManyThreadsInTheOrderOfTheirTimes) {
  Timeline& timeline = Timeline::shared();
  timeline.start();
  std::vector<std::thread> threads;
  for (int device = 0; device < 4; ++device) {
    threads.emplace_back([&, device] {
      for (int step = 0; step < 200; ++step) timeline.record("event", "users", device, step);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::vector<TimelineEvent> events = timeline.stop();
  ASSERT_EQ(events.size(), 800u);
  std::vector<std::int64_t> next(4, 0);
  for (std::size_t i = 0; i < events.size(); ++i) {
    EXPECT_EQ(events[i].step, next[static_cast<std::size_t>(events[i].device)]++);
    if (i > 0) {
      ASSERT_LE(events[i - 1].nanoseconds, events[i].nanoseconds) << "listed order and times disagree";
    }
  }
}

}  // namespace
}  // namespace async_emb::context
