// Failures: every wait ends, once; no buffer goes back while work uses it; the context stays failed.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "plain_model.h"
#include "ranks.h"

namespace async_emb::context {
namespace {

const std::vector<std::int32_t> kIds{0, 1, 2, 3};

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(PipelineFailure, RefusesOtherBuffersInTheUpdateThanInTheLookup) {
  Setting setting(small_spec(2));
  Shard copy(setting.spec, kRows);
  setting.run({{Op::kLookupStart}, {Op::kLookupDone}, {Op::kStage}});
  std::vector<std::string> messages(2);
  run_ranks(2, [&](int r) {
    RankCalls other(*setting.group.pipeline, r, r == 1 ? copy : *setting.group.shards[0], kRows);
    messages[static_cast<std::size_t>(r)] = message_of([&] {
      other.update_start(plain_rule());
      other.update_done();
    });
    other.take_back();
  });
  EXPECT_EQ(messages[0], messages[1]) << "peers get the error of the rank that failed";
  EXPECT_EQ(messages[0].substr(0, 61), "async_emb 'users' update start on rank 1 (device 11) of step ");
  EXPECT_NE(messages[0].find("lookup and update see different table buffers"), std::string::npos) << messages[0];
  EXPECT_NE(messages[0].find("donate"), std::string::npos) << messages[0];
  for (int r : {0, 1}) {
    EXPECT_EQ(message_of([&] { setting.rank(r).lookup_start(kIds); }), messages[0]) << "the first error sticks";
    EXPECT_EQ(message_of([&] { setting.rank(r).update_done(); }), messages[0]);
  }
  setting.model.expect_shards(setting.group.shards);
}

// One rank makes a call that can neither go on nor be refused; its peer waits in a lookup or update. All must hear of
// it.
template <typename Wrong>
std::string failure_of_both(Setting& setting, bool update, Wrong wrong) {
  std::string peers;
  std::string own;
  const auto failures = run_ranks(2, [&](int r) {
    RankCalls& rank = setting.rank(r);
    if (r == 1) {
      own = message_of([&] { wrong(rank); });
      return;
    }
    peers = message_of([&] {
      if (update) {
        rank.update_start(plain_rule());
        rank.update_done();
      } else {
        rank.lookup_done(rank.lookup_start(kIds));
      }
    });
    const auto lease = rank.take_back();  // none, where rank 1 was faster
    EXPECT_EQ(lease.value_or(Failure{FailureKind::kInternal, peers}).message, peers);
  });
  for (const auto& failure : failures) EXPECT_FALSE(failure) << failure->message;
  EXPECT_EQ(own, peers);
  setting.model.expect_shards(setting.group.shards);
  return own;
}

TEST(PipelineFailure, TellsPeersOfATableThatDoesNotFit) {
  Setting lookup(small_spec(2));
  ContextSpec wide = lookup.spec;
  wide.emb_width *= 2;
  Shard other(wide, kRows);
  const std::string expected = ": table is float32[23, 4], but the context needs float32[23, 2] on each device";
  EXPECT_NE(failure_of_both(lookup, false,
                            [&](RankCalls& rank) {
                              rank.lookup_begin(kIds);
                              RankCalls(*lookup.group.pipeline, 1, other, kRows).lookup_lease();
                            })
                .find("lookup_start on rank 1 (device 11) of step 1" + expected),
            std::string::npos);

  Setting update(small_spec(2));
  EXPECT_NE(failure_of_both(update, true,
                            [&](RankCalls& rank) {
                              rank.update_begin(plain_rule());
                              RankCalls(*update.group.pipeline, 1, other, kRows).update_lease();
                            })
                .find("update start on rank 1 (device 11) of step 1" + expected),
            std::string::npos);
}

TEST(PipelineFailure, TellsPeersOfAnotherNumberOfRows) {
  Setting setting(small_spec(2));
  setting.rank(0).lookup_begin(kIds);
  Shard other(setting.spec, kRows + 1);
  RankCalls longer(*setting.group.pipeline, 1, other, kRows + 1);
  const std::string message = message_of([&] { longer.lookup_start(kIds); });
  EXPECT_NE(message.find("of step 1: the table has 24 rows here and 23 on another rank"), std::string::npos) << message;
  EXPECT_EQ(message_of([&] { setting.rank(0).lookup_lease(); }), message);
}

TEST(PipelineFailure, TellsPeersOfARuleThatDiffers) {
  Setting setting(small_spec(2));
  const std::string message = failure_of_both(setting, true, [&](RankCalls& rank) {
    UpdateRule lazy = plain_rule();
    lazy.lazy = true;
    rank.update_start(lazy);
    rank.update_done();
  });
  EXPECT_NE(message.find("whether the rule is lazy is"), std::string::npos) << message;
}

TEST(PipelineFailure, TellsWhoWaitsForARankThatIsAbsent) {
  for (const bool goes_first : {false, true}) {
    Setting setting(small_spec(2));
    Pipeline& pipeline = *setting.group.pipeline;
    if (goes_first) pipeline.set_absent(1, "has closed the table");
    EXPECT_FALSE(pipeline.failure());
    const float pin = setting.rank(0).lookup_start(kIds);
    if (!goes_first) pipeline.set_absent(1, "has closed the table");
    std::thread watchdog([&] {
      for (int i = 0; i < 5000 && !pipeline.failure(); ++i) {
        pipeline.check_timeout(Clock::now());
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
    const std::string message = message_of([&] { setting.rank(0).lookup_done(pin); });
    watchdog.join();
    EXPECT_EQ(message,
              "async_emb 'users' lookup_start of step 1 waits for rank 1 (device 11), which has closed the table");
  }
  Setting setting(small_spec(2));
  setting.group.pipeline->set_absent(1, "has closed the table");
  setting.group.pipeline->set_absent(1, "");
  setting.run(staleness_one(2));
}

TEST(PipelineFailure, KeepsAContextUsableAfterArgumentsThatFitNoStep) {
  Setting setting(small_spec(2));
  Pipeline& pipeline = *setting.group.pipeline;
  for (int r : {0, 1}) {
    RankCalls& rank = setting.rank(r);
    EXPECT_THROW(rank.lookup_start<std::int32_t>({1, 2, 3}), Error);
    Tensor floats(kFloat32, {4});
    EXPECT_THROW(pipeline.lookup_begin(r, floats.view(), kRows), Error);
    Tensor ids(kInt32, {4});
    EXPECT_THROW(pipeline.lookup_begin(r, ids.view(), -1), Error);
    EXPECT_THROW(pipeline.lookup_begin(r, ids.view(), std::int64_t{1} << 31), Error);
    Tensor grads(kFloat32, {4, 3});
    EXPECT_THROW(pipeline.stage_update(r, grads.view(), nullptr, nullptr, true), Error);
    Tensor rows(kFloat32, {4, 4});
    const DLTensor of_floats = floats.view();
    EXPECT_THROW(pipeline.lookup_done(r, 1, &of_floats, rows.view(), [](const Failure*) { ADD_FAILURE(); }), Error);
    EXPECT_THROW(pipeline.lookup_done(r, 1, nullptr, grads.view(), [](const Failure*) { ADD_FAILURE(); }), Error);
    const DLTensor of_ids = ids.view();
    EXPECT_THROW(pipeline.stage_update(r, rows.view(), &of_ids, nullptr, true), Error);
  }
  setting.run(staleness_one(2));
  EXPECT_FALSE(pipeline.take_refusal());
}

TEST(PipelineFailure, AnswersLookupsThatWaitForAPeer) {
  Setting setting(small_spec(3));
  const float pin = setting.rank(0).lookup_start(kIds);
  PendingRows rows = setting.rank(0).lookup_done_later(pin);
  setting.rank(1).lookup_start(kIds);
  setting.group.pipeline->fail({FailureKind::kAborted, "why"});
  setting.group.pipeline->fail({FailureKind::kInternal, "later"});
  EXPECT_EQ(rows.answer.wait()->message, "why");
  for (int r : {0, 1}) EXPECT_EQ(message_of([&] { setting.rank(r).settle(); }), "why");
  EXPECT_EQ(message_of([&] { setting.rank(2).lookup_start(kIds); }), "why");
  setting.group.pipeline->drain();
}

TEST(PipelineFailure, KeepsBuffersUntilTheLookupThatUsesThemHasEnded) {
  Setting setting(small_spec(2), 1, 2);
  Blockade blockade(*setting.own_executor);
  std::vector<PendingRows> rows;
  for (int r : {0, 1}) rows.push_back(setting.rank(r).lookup_done_later(setting.rank(r).lookup_start(kIds)));
  setting.group.pipeline->fail({FailureKind::kAborted, "why"});
  std::atomic<bool> drained{false};
  std::thread drain([&] {
    setting.group.pipeline->drain();
    drained = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(drained);
  for (int r : {0, 1}) {
    EXPECT_FALSE(setting.rank(r).table_is_back());
    EXPECT_FALSE(rows[static_cast<std::size_t>(r)].answer.ready()) << "the work may still write the rows";
  }
  blockade.release();
  for (int r : {0, 1}) {
    EXPECT_EQ(rows[static_cast<std::size_t>(r)].answer.wait()->message, "why");
    EXPECT_EQ(message_of([&] { setting.rank(r).settle(); }), "why");
  }
  drain.join();
}

TEST(PipelineFailure, LeavesEveryByteWhereItComesBeforeTheUpdateIsApplied) {
  Setting setting(small_spec(2), 1, 2);
  setting.batches[0].pending = true;
  setting.run({{Op::kLookupStart}, {Op::kLookupDone}, {Op::kStage}});
  Blockade blockade(*setting.own_executor);
  std::vector<PendingUpdate> updates;
  for (int r : {0, 1}) {
    setting.rank(r).update_start(plain_rule());
    updates.push_back(setting.rank(r).update_done_later());
  }
  setting.group.pipeline->fail({FailureKind::kAborted, "why"});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  for (int r : {0, 1}) EXPECT_FALSE(setting.rank(r).table_is_back());
  blockade.release();
  for (int r : {0, 1}) {
    EXPECT_EQ(updates[static_cast<std::size_t>(r)].answer.wait()->message, "why");
    EXPECT_EQ(message_of([&] { setting.rank(r).settle(); }), "why");
  }
  setting.model.expect_shards(setting.group.shards);
  EXPECT_EQ(setting.group.pipeline->stats().updates, 0);
}

TEST(Pipeline, CallsOutWithoutItsLock) {
  Executor executor(1);
  const ContextSpec spec = small_spec(1);
  Group group(spec, kRows, executor);
  Pipeline& pipeline = *group.pipeline;
  Shard& shard = *group.shards[0];
  shard.lend();
  Tensor ids(kInt32, {4}, kIds.data());
  Tensor rows(kFloat32, {4, 2});
  std::promise<void> ended;
  UpdateOutcome outcome;
  // The whole step runs inside of completions, as XLA continues a program.
  const float pin = pipeline.lookup_begin(0, ids.view(), kRows);
  pipeline.lookup_done(0, pin, nullptr, rows.view(), [&](const Failure*) {
    pipeline.stage_update(0, rows.view(), nullptr, nullptr, true);
    pipeline.update_begin(0, plain_rule());
    pipeline.update_lease(0, shard.table.view(), shard.row_state.view(), nullptr, [&](const Failure*) {
      pipeline.update_done(0, {&outcome.norm, &outcome.valid, &outcome.pending}, [&](const Failure*) {
        pipeline.update_done(0, {&outcome.norm, &outcome.valid, &outcome.pending}, [&](const Failure*) {  // refused
          pipeline.fail({FailureKind::kAborted, "why"});
          ended.set_value();
        });
      });
    });
  });
  pipeline.lookup_lease(0, shard.table.view(), [&](const Failure*) { pipeline.stats(); });
  ASSERT_EQ(ended.get_future().wait_for(std::chrono::seconds(30)), std::future_status::ready);
}

}  // namespace
}  // namespace async_emb::context
