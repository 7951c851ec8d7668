// Waits that last too long end, and say who is missing and where.
#include "context/watchdog.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ranks.h"

namespace async_emb::context {
namespace {

ContextSpec impatient_spec(int group_size) {
  ContextSpec spec = small_spec(group_size);
  spec.timeout_seconds = 0.2;
  return spec;
}

TEST(Watchdog, NamesTheRanksThatAreMissingFromALookup) {
  Executor executor(1);
  Group group(impatient_spec(3), 8, executor);
  watch(group.pipeline);
  RankCalls& rank = group.ranks[1];
  const auto began = Clock::now();
  PendingRows rows = rank.lookup_done_later(rank.lookup_start<std::int32_t>({0, 1, 2, 3}));
  const auto failure = rows.answer.wait();
  EXPECT_GE(Clock::now() - began, std::chrono::milliseconds(190));
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->kind, FailureKind::kTimeout);
  EXPECT_EQ(failure->message,
            "async_emb 'users' timed out after 0.2 s in lookup_start of step 1: missing rank 0 (device 10), rank 2 "
            "(device 12). "
            "Set ASYNC_EMB_TIMEOUT_SECONDS to wait longer");
  EXPECT_THROW(rank.settle(), Error) << "the lease ends with the same error";
  try {
    group.ranks[0].lookup_start<std::int32_t>({0, 1, 2, 3});
    ADD_FAILURE() << "a call after the timeout was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.what(), failure->message) << "every later call gives the first error";
  }
}

TEST(Watchdog, NamesTheRanksThatAreMissingFromAnUpdate) {
  Executor executor(1);
  Group group(impatient_spec(2), 8, executor);
  watch(group.pipeline);
  group.ranks[0].update_start({});
  const auto failure = group.ranks[0].update_done_later().answer.wait();
  ASSERT_TRUE(failure);
  EXPECT_NE(failure->message.find("in update start of step 1: missing rank 1 (device 11)."), std::string::npos)
      << failure->message;
}

TEST(Watchdog, WaitsForAsLongAsTheTimeoutAllows) {
  Executor executor(1);
  ContextSpec spec = small_spec(2);
  spec.timeout_seconds = 30;
  Group group(spec, 8, executor);
  watch(group.pipeline);
  const float pin = group.ranks[0].lookup_start<std::int32_t>({0, 1, 2, 3});
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_FALSE(group.ranks[0].table_is_back());
  group.ranks[1].lookup_start<std::int32_t>({0, 1, 2, 3});
  group.ranks[0].lookup_done(pin);
  for (RankCalls& rank : group.ranks) rank.settle();
}

TEST(Watchdog, TakesAStepThatNobodyWaitsForAsNoWait) {
  Executor executor(1);
  Group group(impatient_spec(2), 8, executor);
  watch(group.pipeline);
  group.ranks[0].lookup_begin<std::int32_t>({0, 1, 2, 3});  // no lease, no done
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  const float pin = group.ranks[1].lookup_start<std::int32_t>({0, 1, 2, 3});
  group.ranks[0].lookup_lease();
  group.ranks[1].lookup_done(pin);
  group.pipeline->check_timeout(Clock::now() + std::chrono::hours(1));
  EXPECT_NO_THROW(group.ranks[0].lookup_done(pin)) << "a step that is complete cannot be late";
  for (RankCalls& rank : group.ranks) rank.settle();
}

TEST(Watchdog, KeepsNoPipelineAlive) {
  Executor executor(1);
  std::weak_ptr<Pipeline> weak;
  {
    Group group(impatient_spec(1), 8, executor);
    watch(group.pipeline);
    weak = group.pipeline;
  }
  const auto deadline = Clock::now() + std::chrono::seconds(20);
  while (!weak.expired() && Clock::now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_TRUE(weak.expired());
}

}  // namespace
}  // namespace async_emb::context
