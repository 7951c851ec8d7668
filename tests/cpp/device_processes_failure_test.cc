// A group on GPUs of several processes ends as one, and every process says why: also where an exchange between GPUs is
// on the streams already, which no stream would ever end.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "device_processes.h"

namespace async_emb::context {
namespace {

// Short enough for what waits for a part of it.
ContextSpec impatient(const std::vector<int>& processes) {
  ContextSpec spec = over(processes);
  spec.timeout_seconds = 3;
  return spec;
}

// What ends the pipeline, once the watchdog has looked.
std::string failure_of(DevicePipeline& pipeline) {
  for (int i = 0; i < 1000 && !pipeline.failure(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  const auto failure = pipeline.failure();
  return failure ? failure->message : "none";
}

TEST(DeviceProcesses, NameANumberOfTheRuleThatDiffersAndApplyNothing) {
  DeviceProcessesSetting setting(impatient({3, 3, 8, 8}));
  run_ranks(4, [&](int r) {
    DeviceRankCalls& rank = setting.rank(r);
    UpdateRule rule = plain_rule();
    if (r >= 2) rule.learning_rate = 0.5f;
    rank.lookup_start(slice(setting.batches[0].ids, setting.spec, r));
    rank.lookup_done_later();
    rank.stage(slice(setting.batches[0].grads, setting.spec, r).data());
    rank.update_start(rule);
    try {
      EXPECT_EQ(rank.update_done(), UpdateOutcome{});
    } catch (const Error&) {  // the watchdog was faster
    }
  });
  for (const auto& pipeline : setting.group.pipelines) {
    EXPECT_EQ(failure_of(*pipeline),
              "async_emb 'users' update start of step 1: learning_rate is 0.0500000007 on process 3 and 0.5 on process "
              "8. All processes must run one program with one configuration");
    pipeline->drain();
  }
  for (auto& shard : setting.group.shards) shard->rest();
  setting.model.expect_shards(setting.group.shards);
}

TEST(DeviceProcesses, NameAFormOfTheRuleThatDiffers) {
  DeviceProcessesSetting setting(over({0, 1}));
  const auto failures = run_ranks(2, [&](int r) {
    DeviceRankCalls& rank = setting.rank(r);
    UpdateRule rule = plain_rule();
    rule.lazy = r == 1;
    rank.lookup_start(slice(setting.batches[0].ids, setting.spec, r));
    rank.lookup_done_later();
    rank.stage(slice(setting.batches[0].grads, setting.spec, r).data());
    rank.update_start(rule);
    rank.update_done_later();
  });
  for (const std::string& message : messages_of(failures)) {
    EXPECT_NE(message.find("update start of step 1: whether the rule is lazy is false on process 0 and true on process "
                           "1"),
              std::string::npos)
        << message;
  }
}

TEST(DeviceProcesses, NameThePeerThatDoesNotCome) {
  ContextSpec spec = over({0, 0, 1, 1});
  spec.timeout_seconds = 0.3;
  DeviceProcessesSetting setting(spec);
  const auto failures = run_ranks(2, [&](int r) {
    setting.rank(r).lookup_start(slice(setting.batches[0].ids, spec, r));
    setting.rank(r).lookup_done_later();
  });
  for (const std::string& message : messages_of(failures)) {
    EXPECT_EQ(
        message,
        "async_emb 'users' timed out after 0.3 s in lookup_start of step 1: missing rank 2 (device 12, process 1), "
        "rank 3 (device 13, process 1). Set ASYNC_EMB_TIMEOUT_SECONDS to wait longer");
  }
  EXPECT_EQ(failure_of(*setting.group.pipelines[1]), setting.group.pipelines[0]->failure()->message);
}

TEST(DeviceProcesses, NameThePeerThatDiesBeforeItComes) {
  DeviceProcessesSetting setting(impatient({0, 0, 1, 1}));
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    setting.group.kill(1);
  });
  const auto failures = run_ranks(2, [&](int r) {
    setting.rank(r).lookup_start(slice(setting.batches[0].ids, setting.spec, r));
    setting.rank(r).lookup_done_later();
  });
  killer.join();
  for (const std::string& message : messages_of(failures)) {
    EXPECT_EQ(
        message,
        "async_emb 'users' lost rank 2 (device 12, process 1), rank 3 (device 13, process 1) in lookup_start of step "
        "1: the process has ended or its connection broke (connection closed)");
  }
}

// The hosts have agreed, and then the GPU of one waits for one that is not there any more.
TEST(DeviceProcesses, NameThePeerThatDiesInAnExchangeOfGpus) {
  DeviceProcessesSetting setting(impatient({0, 0, 1, 1}));
  setting.group.network->silence(1);
  std::vector<Tensor*> rows(4);
  std::vector<Tensor*> outcomes(4);
  const auto failures = run_ranks(4, [&](int r) {
    DeviceRankCalls& rank = setting.rank(r);
    rank.lookup_start(slice(setting.batches[0].ids, setting.spec, r));
    rows[static_cast<std::size_t>(r)] = &rank.lookup_done_later();
    rank.stage(slice(setting.batches[0].grads, setting.spec, r).data());
    rank.update_start(plain_rule());
    outcomes[static_cast<std::size_t>(r)] = &rank.update_done_later();
  });
  for (const auto& failure : failures) EXPECT_FALSE(failure) << failure->message;  // the hosts are far ahead
  setting.group.kill(1);
  DevicePipeline& survivor = *setting.group.pipelines[0];
  EXPECT_EQ(failure_of(survivor),
            "async_emb 'users' lost rank 2 (device 12, process 1), rank 3 (device 13, process 1) in update start of "
            "step 1: the process has ended or its connection broke (connection closed)");
  // The streams end, deliver nothing, and leave the tables alone.
  for (const int r : {0, 1}) {
    setting.group.gpus[static_cast<std::size_t>(r)]->synchronize(setting.rank(r).stream());
    EXPECT_TRUE(std::isnan(*rows[static_cast<std::size_t>(r)]->as<float>()));
    EXPECT_EQ(DeviceRankCalls::outcome_of(*outcomes[static_cast<std::size_t>(r)]), UpdateOutcome{});
  }
  survivor.drain();
  setting.group.pipelines[1]->fail({FailureKind::kAborted, "killed"});
  setting.group.pipelines[1]->drain();
  for (auto& shard : setting.group.shards) shard->rest();
  setting.model.expect_shards(setting.group.shards);
}

TEST(DeviceProcesses, NameTheOneWhoseGpuDoesNotCome) {
  ContextSpec spec = over({0, 1});
  spec.timeout_seconds = 0.4;
  DeviceProcessesSetting setting(spec);
  std::atomic<bool> goes_on = false;
  // Something endless is on the stream of rank 1 before its call.
  static_cast<cuda::EmulatedStream*>(setting.rank(1).stream())->put([&] {
    while (!goes_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  const auto failures = run_ranks(2, [&](int r) {
    setting.rank(r).lookup_start(slice(setting.batches[0].ids, spec, r));
    setting.rank(r).lookup_done_later();
  });
  for (const auto& failure : failures) EXPECT_FALSE(failure) << failure->message;
  for (const auto& pipeline : setting.group.pipelines) {
    EXPECT_EQ(
        failure_of(*pipeline),
        "async_emb 'users' timed out after 0.4 s in lookup_start of step 1: missing rank 1 (device 11, process 1). "
        "Set ASYNC_EMB_TIMEOUT_SECONDS to wait longer");
  }
  goes_on = true;
}

TEST(DeviceProcesses, NameTheLinkWhereAllGpusHaveCome) {
  ContextSpec spec = over({0, 1});
  spec.timeout_seconds = 1.5;  // in which both have to come, also under a sanitizer
  DeviceProcessesSetting setting(spec);
  setting.group.network->silence(0);
  setting.group.network->silence(1);
  run_ranks(2, [&](int r) {
    setting.rank(r).lookup_start(slice(setting.batches[0].ids, spec, r));
    setting.rank(r).lookup_done_later();
  });
  for (const auto& pipeline : setting.group.pipelines) {
    EXPECT_NE(failure_of(*pipeline).find("lookup_start of step 1: the GPUs of all processes have come to the exchange, "
                                         "but it was not over in time"),
              std::string::npos)
        << failure_of(*pipeline);
  }
}

TEST(DeviceProcesses, AllEndWithTheReasonOfTheOneThatIsAborted) {
  DeviceProcessesSetting setting(impatient({0, 0, 1, 1}));
  std::thread operator_of_0([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    setting.group.pipelines[0]->fail({FailureKind::kAborted, "an operator gave up"});
  });
  const auto failures = run_ranks(4, [&](int r) {
    if (r == 0) return;  // so that all others wait
    setting.rank(r).lookup_start(slice(setting.batches[0].ids, setting.spec, r));
    setting.rank(r).lookup_done_later();
  });
  operator_of_0.join();
  for (int r = 1; r < 4; ++r) EXPECT_EQ(messages_of(failures)[static_cast<std::size_t>(r)], "an operator gave up");
}

TEST(DeviceProcesses, CloseWithoutFailingTheOthers) {
  DeviceProcessesSetting setting(over({0, 1}));
  setting.run_ahead(staleness_one(2));
  setting.group.pipelines[0]->drain();
  setting.group.pipelines[0]->fail({FailureKind::kUnknownContext, "closed"});
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  setting.group.pipelines[1]->check_timeout(Clock::now());
  EXPECT_FALSE(setting.group.pipelines[1]->failure());
}

TEST(DeviceProcesses, EndEveryProgramThatIsAbortedOrKilledAtAnyTime) {
  std::mt19937 random(47);
  ContextSpec spec = over({0, 0, 1, 1});
  spec.timeout_seconds = 2;
  for (int repetition = 0; repetition < 20; ++repetition) {
    SCOPED_TRACE(repetition);
    DeviceProcessesSetting setting(spec, static_cast<unsigned>(repetition), 4);
    const auto pause = std::chrono::microseconds(random() % 4000);
    std::thread killer([&] {
      std::this_thread::sleep_for(pause);
      if (repetition % 2 == 0) {
        setting.group.kill(1);
      } else {
        setting.group.pipelines[0]->fail({FailureKind::kAborted, "why"});
      }
    });
    run_ranks(4, [&](int r) {
      DeviceRankCalls& rank = setting.rank(r);
      for (const Call& call : staleness_one(4)) {
        const Batch& batch = setting.batches[static_cast<std::size_t>(call.batch)];
        if (call.op == Op::kLookupStart) rank.lookup_start(slice(batch.ids, spec, r));
        if (call.op == Op::kLookupBeside) rank.lookup_start_beside_update(slice(batch.ids, spec, r));
        if (call.op == Op::kLookupDone) rank.lookup_done_later();
        if (call.op == Op::kStage) rank.stage(slice(batch.grads, spec, r).data());
        if (call.op == Op::kUpdateStart) rank.update_start(plain_rule());
        if (call.op == Op::kUpdateDone) rank.update_done_later();
      }
    });
    killer.join();
    for (const auto& pipeline : setting.group.pipelines) {
      if (repetition % 2 == 0) pipeline->fail({FailureKind::kAborted, "killed"});
      EXPECT_NE(failure_of(*pipeline), "none");
      pipeline->drain();
    }
    for (auto& shard : setting.group.shards) shard->rest();
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace async_emb::context
