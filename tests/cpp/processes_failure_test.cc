// A group over several processes ends as one, and every process says why.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "plain_model.h"
#include "several_processes.h"

namespace async_emb::context {
namespace {

TEST(Processes, NameARuleThatDiffers) {
  Setting setting(over({3, 3, 8, 8}));
  const auto failures = run_ranks(4, [&](int r) {
    RankCalls& rank = setting.rank(r);
    UpdateRule rule = plain_rule();
    if (r >= 2) rule.learning_rate = 0.5f;
    rank.lookup_done(rank.lookup_start(slice(setting.batches[0].ids, setting.spec, r)));
    rank.stage(slice(setting.batches[0].grads, setting.spec, r).data());
    rank.update_start(rule);
    rank.update_done();
  });
  for (const std::string& message : messages_of(failures)) {
    EXPECT_NE(
        message.find("async_emb 'users' update start of step 1: learning_rate is 0.0500000007 on process 3 and 0.5 "
                     "on process 8"),
        std::string::npos)
        << message;
  }
}

TEST(Processes, NameThePeerThatDoesNotCome) {
  ContextSpec spec = over({0, 0, 1, 1});
  spec.timeout_seconds = 0.3;
  Setting setting(spec);
  const auto failures = run_ranks(2, [&](int r) {
    setting.rank(r).lookup_done(setting.rank(r).lookup_start(slice(setting.batches[0].ids, spec, r)));
  });
  for (const std::string& message : messages_of(failures)) {
    EXPECT_EQ(
        message,
        "async_emb 'users' timed out after 0.3 s in lookup_start of step 1: missing rank 2 (device 12, process 1), "
        "rank 3 (device 13, process 1). Set ASYNC_EMB_TIMEOUT_SECONDS to wait longer");
  }
  // The late process is told as soon as it looks.
  for (int i = 0; i < 500 && !setting.group.pipelines[1]->failure(); ++i) {
    setting.group.pipelines[1]->check_timeout(Clock::now());
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  ASSERT_TRUE(setting.group.pipelines[1]->failure());
  EXPECT_EQ(setting.group.pipelines[1]->failure()->kind, FailureKind::kPeer);
  EXPECT_EQ(setting.group.pipelines[1]->failure()->message, setting.group.pipelines[0]->failure()->message);
}

TEST(Processes, NameThePeerThatDies) {
  Setting setting(over({0, 0, 1, 1}));
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    setting.group.network->kill(1);
  });
  const auto failures = run_ranks(2, [&](int r) {
    setting.rank(r).lookup_done(setting.rank(r).lookup_start(slice(setting.batches[0].ids, setting.spec, r)));
  });
  killer.join();
  for (const std::string& message : messages_of(failures)) {
    EXPECT_EQ(
        message,
        "async_emb 'users' lost rank 2 (device 12, process 1), rank 3 (device 13, process 1) in lookup_start of step "
        "1: the process has ended or its connection broke (connection closed)");
  }
}

TEST(Processes, AllEndWithTheReasonOfTheOneThatIsAborted) {
  Setting setting(over({0, 0, 1, 1}));
  std::thread operator_of_0([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    setting.group.pipelines[0]->fail({FailureKind::kAborted, "an operator gave up"});
  });
  std::thread watchdog([&] {
    for (int i = 0; i < 1000 && !setting.group.pipelines[1]->failure(); ++i) {
      setting.group.pipelines[1]->check_timeout(Clock::now());
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  });
  const auto failures = run_ranks(4, [&](int r) {
    if (r == 0) return;  // so that all others wait
    setting.rank(r).lookup_done(setting.rank(r).lookup_start(slice(setting.batches[0].ids, setting.spec, r)));
  });
  operator_of_0.join();
  watchdog.join();
  for (int r = 1; r < 4; ++r) EXPECT_EQ(messages_of(failures)[static_cast<std::size_t>(r)], "an operator gave up");
}

TEST(Processes, CloseWithoutFailingTheOthers) {
  Setting setting(over({0, 1}));
  setting.run(staleness_one(2));
  setting.group.pipelines[0]->fail({FailureKind::kUnknownContext, "closed"});
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  setting.group.pipelines[1]->check_timeout(Clock::now());
  EXPECT_FALSE(setting.group.pipelines[1]->failure());
}

TEST(Processes, EndEveryProgramThatIsAbortedOrKilledAtAnyTime) {
  Executor executor(2);
  std::mt19937 random(47);
  ContextSpec spec = over({0, 0, 1, 1});
  spec.timeout_seconds = 2;
  for (int repetition = 0; repetition < 40; ++repetition) {
    Setting setting(spec, static_cast<unsigned>(repetition), 2, &executor, 4);
    for (RankCalls& rank : setting.group.ranks) rank.stagger();
    const std::vector<Call> program = staleness_one(4);
    const auto expected = expect(setting.model, program, setting.batches, plain_rule());
    const auto pause = std::chrono::microseconds(random() % 4000);
    std::atomic<bool> over_now = false;
    std::thread killer([&] {
      std::this_thread::sleep_for(pause);
      if (repetition % 2 == 0) {
        setting.group.network->kill(1);
      } else {
        setting.group.pipelines[0]->fail({FailureKind::kAborted, "why"});
      }
      while (!over_now) {
        for (const auto& pipeline : setting.group.pipelines) pipeline->check_timeout(Clock::now());
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
    run_ranks(4, [&](int r) {
      float pin = 0;
      run_program(setting.rank(r), setting.spec, r, program, setting.batches, expected, plain_rule(), pin);
    });
    over_now = true;
    killer.join();
    for (const auto& pipeline : setting.group.pipelines) pipeline->drain();
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace async_emb::context
