// Contexts by id: opening, finding, refusing, aborting, closing, and opening again.
#include "context/registry.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "context/executor.h"
#include "context/runs.h"
#include "ranks.h"

namespace async_emb::context {
namespace {

ContextSpec spec_with(std::int64_t id, const std::string& name = "users") {
  ContextSpec spec = small_spec(2);
  spec.id = id;
  spec.name = name;
  spec.key = "key of " + name;
  return spec;
}

std::string message_of(const std::function<void()>& call, FailureKind kind) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(static_cast<int>(error.kind()), static_cast<int>(kind)) << error.what();
    return error.what();
  }
  return "no error";
}

// One lookup on the registered pipelines' ranks.
void look_up(std::int64_t id, std::int64_t run = 1) {
  const ContextSpec spec = find_context(id)->spec();
  const auto failures = run_ranks(spec.group_size, [&](int rank) {
    const Member member = find_member(id, spec.devices[static_cast<std::size_t>(rank)], run);
    Shard shard(spec, 8);
    RankCalls calls(*member.pipeline, member.rank, shard, 8);
    calls.lookup_done(calls.lookup_start<std::int32_t>({0, 1, 2, 3}));
    calls.settle();
  });
  for (const auto& failure : failures) EXPECT_FALSE(failure) << failure->message;
}

TEST(Registry, FindsEveryGroupAndRankByDevice) {
  ContextSpec spec = spec_with(101);
  spec.devices = {7, 3, 5, 9};
  open_context(spec);
  EXPECT_TRUE(is_open(101));
  EXPECT_EQ(find_context(101)->groups().size(), 2u);
  for (int i = 0; i < 4; ++i) {
    const Member member = find_member(101, spec.devices[static_cast<std::size_t>(i)], 1);
    EXPECT_EQ(member.rank, i % 2);
    EXPECT_EQ(member.pipeline, find_context(101)->groups()[static_cast<std::size_t>(i / 2)]);
  }
  const auto open = open_contexts();
  EXPECT_EQ(std::count(open.begin(), open.end(), 101), 1);
  close_context(101);
}

TEST(Registry, SaysThatAContextWasNeverOpened) {
  const std::string expected =
      "async_emb context 102 is not open in this process: call open_context(handle) before the step";
  EXPECT_EQ(message_of([] { find_context(102); }, FailureKind::kUnknownContext), expected);
  EXPECT_EQ(message_of([] { find_member(102, 0, 1); }, FailureKind::kUnknownContext), expected);
  EXPECT_EQ(message_of([] { abort_context(102, "why"); }, FailureKind::kUnknownContext), expected);
}

TEST(Registry, SaysThatAContextWasClosed) {
  open_context(spec_with(103));
  close_context(103);
  close_context(103);
  EXPECT_FALSE(is_open(103));
  EXPECT_EQ(message_of([] { find_member(103, 10, 1); }, FailureKind::kUnknownContext),
            "async_emb context 'users' is closed: open it again with open_context(handle) before the step");
}

TEST(Registry, SaysThatADeviceHasNoRank) {
  open_context(spec_with(104));
  EXPECT_EQ(
      message_of([] { find_member(104, 99, 1); }, FailureKind::kInvalidArgument),
      "async_emb context 'users' has no rank on device 99: run the step on the mesh that the handle was made for");
  close_context(104);
}

TEST(Registry, OpensTheSameContextOnce) {
  open_context(spec_with(105));
  const auto first = find_context(105);
  open_context(spec_with(105));
  EXPECT_EQ(find_context(105), first);
  close_context(105);
}

TEST(Registry, RefusesGpusWhereThereAreNone) {
  ContextSpec spec = spec_with(115);
  spec.gpus = {0, 1};
  EXPECT_EQ(message_of([&] { open_context(spec); }, FailureKind::kInvalidArgument),
            "async_emb context 'users' is on GPUs, but the native module was built without CUDA");
  EXPECT_FALSE(is_open(115));
}

TEST(Registry, RefusesAnotherContextUnderTheSameId) {
  open_context(spec_with(106, "users"));
  const std::string message = message_of([] { open_context(spec_with(106, "items")); }, FailureKind::kInvalidArgument);
  for (const char* part : {"106", "'items'", "'users'", "key of items", "key of users", "another name"}) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
  EXPECT_EQ(find_context(106)->spec().name, "users");
  close_context(106);
}

TEST(Registry, RefusesDevicesThatMakeNoGroups) {
  ContextSpec spec = spec_with(107);
  spec.devices.push_back(50);
  EXPECT_EQ(message_of([&] { open_context(spec); }, FailureKind::kInvalidArgument),
            "async_emb context 'users' has 3 devices for groups of 2");
  EXPECT_FALSE(is_open(107));
}

TEST(Registry, AbortsEveryWaitAndRefusesLaterCalls) {
  open_context(spec_with(108));
  const Member member = find_member(108, 10, 1);
  Shard shard(member.pipeline->spec(), 8);
  RankCalls calls(*member.pipeline, member.rank, shard, 8);
  PendingRows rows = calls.lookup_done_later(calls.lookup_start<std::int32_t>({0, 1, 2, 3}));
  abort_context(108, "the other job is gone");
  const std::string expected = "async_emb context 'users' was aborted: the other job is gone";
  EXPECT_EQ(message_of([&] { rows.wait(); }, FailureKind::kAborted), expected);
  EXPECT_EQ(message_of([&] { calls.settle(); }, FailureKind::kAborted), expected);
  abort_context(108, "a second reason");
  EXPECT_EQ(message_of([&] { calls.lookup_start<std::int32_t>({0, 1, 2, 3}); }, FailureKind::kAborted), expected);
  EXPECT_TRUE(is_open(108));
  close_context(108);
  open_context(spec_with(108));
  look_up(108, 2);
  close_context(108);
}

TEST(Registry, AnswersCallsThatWaitWhenItCloses) {
  open_context(spec_with(109));
  const Member member = find_member(109, 11, 1);
  Shard shard(member.pipeline->spec(), 8);
  RankCalls calls(*member.pipeline, member.rank, shard, 8);
  PendingRows rows = calls.lookup_done_later(calls.lookup_start<std::int32_t>({0, 1, 2, 3}));
  close_context(109);
  const std::string message = message_of([&] { rows.wait(); }, FailureKind::kUnknownContext);
  EXPECT_NE(message.find("was closed while a call waited"), std::string::npos) << message;
  EXPECT_THROW(calls.settle(), Error);
  EXPECT_THROW(calls.lookup_start<std::int32_t>({0, 1, 2, 3}), Error)
      << "a call that found its pipeline before the close";
}

TEST(Registry, OpensAndClosesAgainWithoutMoreThreads) {
  open_context(spec_with(110));
  look_up(110);
  close_context(110);
  const int before = Executor::shared().threads();
  for (int i = 0; i < 50; ++i) {
    open_context(spec_with(110));
    look_up(110, 2 + i);
    close_context(110);
  }
  // Each lookup completes four calls at once, which may take as many threads; they are used again.
  EXPECT_LE(Executor::shared().threads(), std::max(before, Executor::shared().limit() + 4));
}

TEST(Registry, RefusesLateCallsOfARunThatWasUnderWayWhenItClosed) {
  const auto late = [](std::int64_t run) {
    return message_of([run] { find_member(113, 11, run); }, FailureKind::kUnknownContext);
  };
  const std::string refused =
      "async_emb context 'users' was closed while this step ran, and opened again since: finish the steps before close";
  open_context(spec_with(113));
  find_member(113, 10, 70);  // the first rank has come, the second not yet
  close_context(113);
  open_context(spec_with(113));
  EXPECT_EQ(late(70), refused);
  look_up(113, 71);
  close_context(113);
  open_context(spec_with(113));
  EXPECT_EQ(late(70), refused) << "two openings later";
  EXPECT_EQ(late(71), refused);
  EXPECT_EQ(late(72), "no error");
  close_context(113);
}

TEST(Registry, RemembersTheLatestRunsOfAContext) {
  open_context(spec_with(114));
  for (std::int64_t run = 0; run < 1000; ++run) {
    find_member(114, 10, run);
    find_member(114, 11, run);
  }
  close_context(114);
  open_context(spec_with(114));
  EXPECT_NO_THROW(find_member(114, 10, 999 - static_cast<std::int64_t>(Runs::kRemembered)));
  for (std::int64_t run = 1000 - static_cast<std::int64_t>(Runs::kRemembered); run < 1000; ++run) {
    EXPECT_THROW(find_member(114, 10, run), Error);
  }
  close_context(114);
}

TEST(Registry, FreesAClosedContext) {
  open_context(spec_with(111));
  std::weak_ptr<GroupPipeline> weak = find_context(111)->groups().front();
  look_up(111);
  close_context(111);
  const auto deadline = Clock::now() + std::chrono::seconds(20);
  while (!weak.expired() && Clock::now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_TRUE(weak.expired()) << "something still owns the pipeline";
}

TEST(Registry, IsSafeToUseFromManyThreads) {
  std::atomic<bool> stop{false};
  std::thread closer([&] {
    for (int i = 0; i < 200; ++i) {
      open_context(spec_with(112));
      close_context(112);
    }
    stop = true;
  });
  run_ranks(2, [&](int rank) {
    for (std::int64_t run = rank; !stop; run += 2) {
      try {
        const Member member = find_member(112, 10 + rank, run);
        Shard shard(member.pipeline->spec(), 8);
        RankCalls calls(*member.pipeline, member.rank, shard, 8);
        PendingRows rows = calls.lookup_done_later(calls.lookup_start<std::int32_t>({0, 1, 2, 3}));
        rows.answer.wait();
        calls.settle();
      } catch (const Error&) {
        // closed, in one of its ways; what counts is that every wait ends
      }
    }
  });
  closer.join();
}

}  // namespace
}  // namespace async_emb::context
