// Refusals: a call at the wrong time applies nothing, every rank's program ends, and the context can be used again.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "plain_model.h"
#include "ranks.h"

namespace async_emb::context {
namespace {

const std::vector<std::int32_t> kIds{0, 1, 2, 3};

bool is_nan(const std::vector<char>& rows) {
  std::vector<float> values(rows.size() / sizeof(float));
  std::memcpy(values.data(), rows.data(), rows.size());
  for (const float value : values) {
    if (!std::isnan(value)) return false;
  }
  return true;
}

TEST(PipelineRefusal, SaysWhatHappenedAndIsSticky) {
  Setting setting(small_spec(1));
  RankCalls& rank = setting.rank(0);
  Pipeline& pipeline = *setting.group.pipeline;
  EXPECT_FALSE(pipeline.take_refusal());
  EXPECT_EQ(rank.update_done(), (UpdateOutcome{0, 0, 0}));
  const float pin = rank.lookup_start(kIds);  // right in itself, but later than the refusal
  EXPECT_TRUE(is_nan(rank.lookup_done(pin)));
  rank.settle();
  EXPECT_EQ(pipeline.stats().refused_calls, 3);
  EXPECT_EQ(pipeline.stats().lookups, 0);
  EXPECT_EQ(
      pipeline.take_refusal(),
      "async_emb 'users' update_done on rank 0 (device 10): update_done with nothing armed: update step 0 was the last "
      "started and is consumed; call an update start first. Nothing was applied; tables and state are as before this "
      "call");
  EXPECT_FALSE(pipeline.take_refusal()) << "taking it clears it";
  setting.run(staleness_one(3));
}

TEST(PipelineRefusal, NamesStepAndPositionWhereRowsAreOfAnotherBatch) {
  Setting setting(small_spec(2));
  run_ranks(2, [&](int r) {
    RankCalls& rank = setting.rank(r);
    const float pin = rank.lookup_start(kIds);
    const std::vector<std::int32_t> others{0, 1, 7, -4};
    EXPECT_TRUE(is_nan(rank.lookup_done(pin, &others)));
    rank.settle();
  });
  const auto refusal = setting.group.pipeline->take_refusal();
  ASSERT_TRUE(refusal);
  EXPECT_NE(refusal->find("token_ids of another batch: step 1 was armed with row 2 at position "), std::string::npos)
      << *refusal;
  EXPECT_NE(refusal->find("but token_ids have 7 there"), std::string::npos) << *refusal;
  EXPECT_EQ(refusal->find("first-step state"), std::string::npos) << "all ranks stand at the same call";
  // The rows are still there for the right call.
  setting.model.apply({Op::kLookupStart, 0}, setting.batches, plain_rule());
  setting.batches[0].ids = {0, 1, 2, 3, 0, 1, 2, 3};
  setting.pins = {pin_of(1), pin_of(1)};
  PlainModel before(setting.spec, kRows, 1);
  run_ranks(2, [&](int r) {
    const std::vector<char> rows = setting.rank(r).lookup_done(pin_of(1), &kIds);
    EXPECT_EQ(0, std::memcmp(rows.data(), before.lookup(kIds).data(), rows.size()));
  });
  EXPECT_FALSE(setting.group.pipeline->take_refusal());
}

TEST(PipelineRefusal, LeavesBothDonesAnsweredWhereOneIsCalledTwice) {
  Setting setting(small_spec(2));
  RankCalls& rank = setting.rank(0);
  const float pin = rank.lookup_start(kIds);
  PendingRows first = rank.lookup_done_later(pin);
  PendingRows second = rank.lookup_done_later(pin);
  EXPECT_TRUE(is_nan(second.wait()));
  EXPECT_FALSE(first.answer.ready());
  const float peers = setting.rank(1).lookup_start(kIds);
  EXPECT_FALSE(is_nan(first.wait()));
  EXPECT_FALSE(is_nan(setting.rank(1).lookup_done(peers)));
  for (int r : {0, 1}) setting.rank(r).settle();
  const auto refusal = setting.group.pipeline->take_refusal();
  ASSERT_TRUE(refusal);
  EXPECT_NE(refusal->find("lookup_done of step 1 was called again"), std::string::npos) << *refusal;

  setting.rank(0).update_start(plain_rule());
  PendingUpdate waiting = setting.rank(0).update_done_later();
  EXPECT_EQ(setting.rank(0).update_done(), UpdateOutcome());
  setting.rank(1).update_start(plain_rule());
  EXPECT_EQ(waiting.wait(), UpdateOutcome());
  EXPECT_EQ(setting.rank(1).update_done(), UpdateOutcome());
  EXPECT_NE(setting.group.pipeline->take_refusal()->find("update_done of step 1 was called again"), std::string::npos);
  for (int r : {0, 1}) setting.rank(r).settle();
  EXPECT_FALSE(setting.group.pipeline->take_refusal());
}

TEST(PipelineRefusal, StillLendsTheTableThatPeersWaitFor) {
  Setting setting(small_spec(2));
  const float pin = setting.rank(0).lookup_start(kIds);
  PendingRows rows = setting.rank(0).lookup_done_later(pin);
  // Rank 1 refuses its done and its next start before it lends the table of the first one.
  setting.rank(1).lookup_begin(kIds);
  EXPECT_TRUE(is_nan(setting.rank(1).lookup_done(99.0f)));
  setting.rank(1).lookup_begin(kIds);
  setting.rank(1).lookup_lease();
  setting.rank(1).lookup_lease();  // that of the refused start
  EXPECT_FALSE(is_nan(rows.wait()));
  for (int r : {0, 1}) setting.rank(r).settle();
  EXPECT_NE(setting.group.pipeline->take_refusal()->find("stale pin of step 99, but step 1 is armed"),
            std::string::npos);
  setting.model.machine.reset(1, 0, 0);
  setting.run(staleness_one(2));
}

TEST(PipelineRefusal, EndsTheWaitsOfPeersThatWereFaster) {
  Setting setting(small_spec(3));
  std::vector<PendingRows> rows;
  for (int r : {0, 1, 2}) {
    const float pin = setting.rank(r).lookup_start(kIds);
    rows.push_back(setting.rank(r).lookup_done_later(r == 2 ? pin + 1 : pin));  // rank 2 comes last: its pin is stale
    if (r == 2) break;
  }
  EXPECT_TRUE(is_nan(rows[2].wait()));
  for (int r : {0, 1}) {
    EXPECT_FALSE(is_nan(rows[static_cast<std::size_t>(r)].wait()));
    setting.rank(r).update_start(plain_rule());  // after the refusal: passed through
    EXPECT_EQ(setting.rank(r).update_done(), UpdateOutcome());
  }
  for (int r : {0, 1, 2}) setting.rank(r).settle();
  const auto refusal = setting.group.pipeline->take_refusal();
  ASSERT_TRUE(refusal);
  EXPECT_NE(refusal->find("on rank 2 (device 12)"), std::string::npos) << *refusal;
  EXPECT_NE(refusal->find("back in its first-step state"), std::string::npos) << *refusal;
  setting.run(staleness_one(2));
}

TEST(PipelineRefusal, VoidsTheUpdateThatFasterPeersHaveStarted) {
  Setting setting(small_spec(2));
  const float pin = setting.rank(0).lookup_start(kIds);
  setting.rank(1).lookup_start(kIds);
  setting.rank(0).lookup_done(pin);
  setting.rank(0).stage(setting.batches[0].grads.data());
  setting.rank(0).update_start(plain_rule());
  PendingUpdate update = setting.rank(0).update_done_later();
  EXPECT_FALSE(update.answer.ready());
  EXPECT_TRUE(is_nan(setting.rank(1).lookup_done(0.0f)));
  EXPECT_EQ(update.wait(), UpdateOutcome());
  for (int r : {0, 1}) setting.rank(r).settle();
  EXPECT_TRUE(setting.group.pipeline->take_refusal());
  EXPECT_FALSE(setting.group.pipeline->staged()) << "gradients that only one rank staged are dropped";
  setting.model.expect_shards(setting.group.shards);
  setting.run(staleness_one(4));
}

TEST(PipelineRefusal, VoidsAStepWhoseStartAPeerHasRefused) {
  for (const bool update : {false, true}) {
    Setting setting(small_spec(2));
    // The programs differ here, which they should not: rank 1 refuses the call that starts a step on rank 0.
    EXPECT_TRUE(is_nan(setting.rank(1).lookup_done(1.0f)));
    if (update) {
      setting.rank(0).update_start(plain_rule());
      EXPECT_EQ(setting.rank(0).update_done(), UpdateOutcome());
    } else {
      EXPECT_TRUE(is_nan(setting.rank(0).lookup_done(setting.rank(0).lookup_start(kIds))));
    }
    setting.rank(0).settle();
    EXPECT_TRUE(setting.group.pipeline->take_refusal());
    setting.run(staleness_one(2));
  }
}

TEST(PipelineRefusal, StagesSegmentsAlikeAfterRanksStoodApart) {
  ContextSpec spec = small_spec(2);
  Setting setting(spec);
  const float pin = setting.rank(0).lookup_start(kIds);
  setting.rank(1).lookup_start(kIds);
  setting.rank(0).lookup_done(pin);
  setting.rank(0).stage(setting.batches[0].grads.data());  // counts on this rank alone
  setting.rank(1).lookup_done(0.0f);
  for (int r : {0, 1}) setting.rank(r).settle();
  EXPECT_TRUE(setting.group.pipeline->take_refusal());
  std::vector<std::int32_t> unique(static_cast<std::size_t>(spec.num_unique), kRows);
  for (std::int32_t i = 0; i < 4; ++i) unique[static_cast<std::size_t>(i)] = i;
  run_ranks(2, [&](int r) {
    RankCalls& rank = setting.rank(r);
    rank.lookup_done(rank.lookup_start(kIds));
    rank.stage_segments(slice(setting.batches[0].grads, spec, r).data(), kIds, unique);
    rank.update_start(plain_rule());
    EXPECT_EQ(rank.update_done().valid, 1);
    rank.settle();
  });
  EXPECT_FALSE(setting.group.pipeline->take_refusal());
  Batch same = setting.batches[0];
  same.ids = {0, 1, 2, 3, 0, 1, 2, 3};
  same.pending = true;
  for (const Op op : {Op::kLookupStart, Op::kLookupDone, Op::kStage, Op::kUpdateStart}) {
    setting.model.apply({op, 0}, {same}, plain_rule());
  }
  setting.model.expect_shards(setting.group.shards);
}

TEST(PipelineRefusal, WaitsForARankThatIsFarBehind) {
  Setting setting(small_spec(4));
  const std::vector<Call> program = staleness_one(3);
  const auto expected = expect(setting.model, program, setting.batches, plain_rule());
  run_ranks(4, [&](int r) {
    if (r == 2) std::this_thread::sleep_for(std::chrono::milliseconds(150));
    run_program(setting.rank(r), setting.spec, r, program, setting.batches, expected, plain_rule(),
                setting.pins[static_cast<std::size_t>(r)]);
  });
  setting.model.expect_shards(setting.group.shards);
  EXPECT_GE(setting.group.pipeline->stats().exposed_wait_ns, 3 * 100'000'000) << "three ranks waited for the fourth";
}

// Mostly calls that may come now, and with `disorder` of a hundred any call.
std::vector<Call> random_program(StateMachine machine, int calls, unsigned disorder, std::mt19937& random) {
  std::vector<Call> program;
  bool looked_up = false;
  while (static_cast<int>(program.size()) < calls) {
    const Call call{static_cast<Op>(random() % 6), static_cast<int>(random() % 12)};
    const bool disordered = random() % 100 < disorder;
    if (call.op == Op::kLookupStart && !machine.check_lookup_start()) {
      machine.lookup_start();
    } else if (call.op == Op::kLookupBeside && !machine.check_lookup_start_beside_update(looked_up)) {
      machine.lookup_start();
    } else if (call.op == Op::kLookupDone && machine.lookup().pending()) {
      machine.lookup_done();
      looked_up = true;
    } else if (call.op == Op::kStage && !machine.check_stage()) {
      machine.stage();
    } else if (call.op == Op::kUpdateStart && !machine.check_update_start()) {
      machine.update_start();
    } else if (call.op == Op::kUpdateDone && machine.update().pending()) {
      machine.update_done();
    } else if (!disordered) {
      continue;
    }
    program.push_back(call);
  }
  return program;
}

ContextSpec dropping_spec(int group_size) {
  ContextSpec spec = small_spec(group_size);
  spec.id_policy = core::IdPolicy::kDrop;
  return spec;
}

TEST(PipelineRefusal, ChangesNothingWhereverItComes) {
  for (const int group_size : {1, 2, 3, 4, 8}) {
    Setting setting(dropping_spec(group_size), 11);
    std::mt19937 random(17);
    const std::int64_t bytes = setting.group.pipeline->arena_bytes();
    for (RankCalls& rank : setting.group.ranks) rank.stagger();
    for (int repetition = 0; repetition < 120; ++repetition) {
      setting.run(random_program(setting.model.machine, 14, 4, random));
      const auto refusal = setting.group.pipeline->take_refusal();
      ASSERT_EQ(refusal.has_value(), setting.model.refuses());
      if (refusal) {
        EXPECT_EQ(refusal->find("first-step state"), std::string::npos)
            << "all ranks refuse the same call: " << *refusal;
      }
      setting.model.forgive();
      if (HasFailure()) return;
    }
    EXPECT_LE(setting.group.pipeline->arena_bytes(), bytes + most_batch_bytes(setting.spec)) << "batches of ids leak";
  }
}

class PipelineRefusalAlone : public ::testing::TestWithParam<int> {};

TEST_P(PipelineRefusalAlone, EndsEveryProgram) {
  const int group_size = 2 + GetParam() % 3;
  Setting setting(dropping_spec(group_size), 3);
  const std::int64_t bytes = setting.group.pipeline->arena_bytes();
  std::mt19937 random(static_cast<unsigned>(29 + GetParam()));
  for (RankCalls& rank : setting.group.ranks) rank.stagger();
  for (int repetition = 0; repetition < 250; ++repetition) {
    const std::vector<Call> program = random_program(setting.model.machine, 14, 0, random);
    std::vector<std::size_t> dones;
    for (std::size_t i = 0; i < program.size(); ++i) {
      if (program[i].op == Op::kLookupDone) dones.push_back(i);
    }
    if (dones.empty()) continue;
    const std::size_t refused = dones[random() % dones.size()];
    const int alone = static_cast<int>(random() % static_cast<unsigned>(group_size));
    std::vector<Expected> expected;
    for (std::size_t i = 0; i < program.size(); ++i) {
      expected.push_back(setting.model.apply(program[i], setting.batches, plain_rule()));
      if (i == refused) setting.model.refuse();
    }
    if (setting.model.machine.update().pending()) {  // started before the refusal: its done may be faster than that
      PlainModel done = setting.model;
      done.forgive();
      const Expected outcome = done.apply({Op::kUpdateDone}, setting.batches, plain_rule());
      for (std::size_t i = refused + 1; i < program.size(); ++i) {
        if (program[i].op != Op::kUpdateDone) continue;
        expected[i].update = outcome.update;
        expected[i].or_refused = true;
        break;
      }
    }
    const auto failures = run_ranks(group_size, [&](int r) {
      run_program(setting.rank(r), setting.spec, r, program, setting.batches, expected, plain_rule(),
                  setting.pins[static_cast<std::size_t>(r)], r == alone ? refused : SIZE_MAX);
    });
    for (const auto& failure : failures) ASSERT_FALSE(failure) << failure->message;
    const auto refusal = setting.group.pipeline->take_refusal();
    ASSERT_TRUE(refusal);
    ASSERT_NE(refusal->find("lookup_done on rank " + std::to_string(alone)), std::string::npos) << *refusal;
    ASSERT_NE(refusal->find("first-step state"), std::string::npos) << *refusal;
    setting.model.expect_shards(setting.group.shards);
    setting.model.machine.reset(setting.model.machine.lookup().armed, setting.model.machine.update().armed, 0);
    setting.model.forgive();
    if (HasFailure()) return;
  }
  EXPECT_LE(setting.group.pipeline->arena_bytes(), bytes + most_batch_bytes(setting.spec)) << "batches of ids leak";
}

INSTANTIATE_TEST_SUITE_P(Seeds, PipelineRefusalAlone, ::testing::Range(0, 8));

}  // namespace
}  // namespace async_emb::context
