// A group over several processes gives what it gives in one, and ends as one: bits, refusals, reports, failures.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "context/pipeline.h"
#include "plain_model.h"
#include "ranks.h"

namespace async_emb::context {
namespace {

ContextSpec over(const std::vector<int>& processes, std::int64_t logical_width = 7,
                 core::DType dtype = core::DType::kFloat32) {
  const int group_size = static_cast<int>(processes.size());
  ContextSpec spec = small_spec(group_size, 5, (logical_width + group_size - 1) / group_size);
  spec.processes = processes;
  spec.logical_width = logical_width;
  spec.dtype = dtype;
  spec.id_policy = core::IdPolicy::kDrop;
  spec.timeout_seconds = 60;
  for (int rank = 0; rank < group_size; ++rank) {
    spec.token_blocks[static_cast<std::size_t>(rank)] = group_size - 1 - rank;
  }
  return spec;
}

const std::vector<std::vector<int>> kLayouts = {{0, 1},
                                                {1, 0},
                                                {0, 0, 1, 1},
                                                {0, 1, 0, 1},
                                                {4, 2, 9},
                                                {0, 0, 0, 1},
                                                {0, 0, 1, 1, 2, 2, 3, 3},
                                                {0, 1, 2, 3, 4, 5, 6, 7},
                                                {0, 0, 0, 0, 1, 1, 1, 1}};

std::string name_of(const std::vector<int>& processes) {
  std::string name = "processes";
  for (const int process : processes) name += " " + std::to_string(process);
  return name;
}

std::vector<std::string> take_refusals(Setting& setting) {
  std::vector<std::string> told;
  for (const auto& pipeline : setting.group.pipelines) told.push_back(pipeline->take_refusal().value_or("nothing"));
  return told;
}

TEST(Processes, GiveTheBitsOfThePlainTable) {
  for (const std::vector<int>& processes : kLayouts) {
    for (const core::DType dtype : {core::DType::kFloat32, core::DType::kBFloat16, core::DType::kFloat16}) {
      SCOPED_TRACE(name_of(processes) + ", " + core::name_of(dtype));
      Setting setting(over(processes, 13, dtype));
      setting.run(staleness_one(8));
      for (const auto& pipeline : setting.group.pipelines) EXPECT_FALSE(pipeline->take_refusal());
    }
  }
}

TEST(Processes, OfWhichOneHoldsNothingButPaddingTakePart) {
  Setting setting(over({0, 0, 1, 1}, 2));  // ranks 2 and 3 have no logical column
  setting.run(staleness_one(5));
}

TEST(Processes, ShareFewerDistinctRowsThanTheyAre) {
  for (const std::vector<std::int32_t>& distinct : {std::vector<std::int32_t>{-1}, {1}, {4, 2}, {9, 0, 5}}) {
    SCOPED_TRACE(distinct.size());
    Setting setting(over({0, 1, 2, 3}));
    for (Batch& batch : setting.batches) {
      for (std::size_t i = 0; i < batch.ids.size(); ++i) batch.ids[i] = distinct[i % distinct.size()];
    }
    setting.run(staleness_one(3));
  }
}

TEST(Processes, ApplyTheLazyRuleAndClip) {
  UpdateRule rule = plain_rule();
  rule.lazy = true;
  rule.decay = 0.01f;
  rule.weight_decay = 0.001f;
  rule.step = 40;
  rule.clips = true;
  rule.max_grad_norm = 0.5f;
  Setting setting(over({0, 0, 1, 1}));
  setting.run(staleness_one(5), rule);
}

TEST(Processes, CutBigBatchesWithoutChangingABit) {
  ContextSpec spec = over({0, 0, 1, 1}, 512);
  spec.tokens_per_rank = 300;
  spec.num_unique = spec.tokens();
  Setting setting(spec, 5, 8, nullptr, 2);
  setting.run(staleness_one(2));
}

TEST(Processes, LeaveEveryByteWhereTheNormOfOneIsNotFinite) {
  for (std::size_t column = 0; column < 4; ++column) {
    Setting setting(over({0, 0, 1, 1}, 4));
    const float nan = std::nanf("");
    setting.batches[0].ids.assign(20, 1);
    std::memcpy(setting.batches[0].grads.data() + column * sizeof(float), &nan, sizeof(nan));
    setting.run(staleness_one(1));
    for (const auto& pipeline : setting.group.pipelines) EXPECT_EQ(pipeline->stats().skipped_updates, 1);
  }
}

TEST(Processes, LeaveEveryByteWhereOneSaysNotPending) {
  for (const int reluctant : {0, 1, 2, 3}) {
    Setting setting(over({0, 0, 1, 1}));
    const auto failures = run_ranks(4, [&](int r) {
      RankCalls& rank = setting.rank(r);
      rank.lookup_done(rank.lookup_start(slice(setting.batches[0].ids, setting.spec, r)));
      rank.stage(slice(setting.batches[0].grads, setting.spec, r).data(), r != reluctant);
      rank.update_start(plain_rule());
      const UpdateOutcome outcome = rank.update_done();
      EXPECT_EQ(outcome.valid, 0);
      EXPECT_EQ(outcome.pending, 1);
      EXPECT_GT(outcome.norm, 0.0f);
      rank.settle();
    });
    for (const auto& failure : failures) EXPECT_FALSE(failure) << failure->message;
    setting.model.expect_shards(setting.group.shards);
  }
}

TEST(Processes, TrainTheSegmentsOfTheCaller) {
  Setting setting(over({0, 0, 1, 1}));
  const ContextSpec& spec = setting.spec;
  // Token i is trained as row i modulo 7, but for every fourth.
  std::vector<std::int32_t> unique(static_cast<std::size_t>(spec.num_unique), kRows);
  std::iota(unique.begin(), unique.begin() + 7, 0);
  std::vector<std::int32_t> segments;
  Batch as_ids = setting.batches[0];
  as_ids.pending = true;
  for (std::size_t i = 0; i < as_ids.ids.size(); ++i) {
    segments.push_back(i % 4 == 3 ? -1 : static_cast<std::int32_t>(i % 7));
    as_ids.ids[i] = segments.back();
  }
  PlainModel model(spec, kRows, 1);
  std::vector<Batch> batches{as_ids};
  const std::vector<Call> program{
      {Op::kLookupStart}, {Op::kLookupDone}, {Op::kStage}, {Op::kUpdateStart}, {Op::kUpdateDone}};
  const Expected want = expect(model, program, batches, plain_rule()).back();
  const auto failures = run_ranks(4, [&](int r) {
    RankCalls& rank = setting.rank(r);
    rank.lookup_done(rank.lookup_start(slice(setting.batches[0].ids, spec, r)));
    rank.stage_segments(slice(as_ids.grads, spec, r).data(), slice(segments, spec, r), unique);
    rank.update_start(plain_rule());
    EXPECT_EQ(core::bits_of(rank.update_done().norm), core::bits_of(want.update.norm));
    rank.settle();
  });
  for (const auto& failure : failures) EXPECT_FALSE(failure) << failure->message;
  model.expect_shards(setting.group.shards);
}

TEST(Processes, GoThroughRandomProgramsInAnyOrderOfTheirThreads) {
  Executor executor(2);
  for (unsigned seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE(seed);
    Setting setting(over(kLayouts[seed % kLayouts.size()]), seed, 2, &executor);
    for (RankCalls& rank : setting.group.ranks) rank.stagger();
    setting.run(staleness_one(12));
    if (HasFailure()) return;
  }
}

TEST(Processes, AllRefuseWhatTheyAllRefuse) {
  Setting setting(over({0, 0, 1, 1}));
  setting.run({{Op::kLookupStart, 0},
               {Op::kLookupStart, 1},
               {Op::kLookupDone},
               {Op::kStage},
               {Op::kUpdateStart},
               {Op::kUpdateDone}});
  for (const std::string& told : take_refusals(setting)) {
    EXPECT_NE(told.find("lookup_start of step 2 came before lookup_done of step 1"), std::string::npos) << told;
  }
  // What was armed is still there.
  setting.model.forgive();
  setting.run({{Op::kLookupDone}, {Op::kStage, 0}, {Op::kUpdateStart}, {Op::kUpdateDone}});
  setting.run({{Op::kLookupStart, 2}, {Op::kLookupDone}, {Op::kStage, 2}, {Op::kUpdateStart}, {Op::kUpdateDone}});
}

TEST(Processes, AllStopWhereOneRankAloneRefuses) {
  for (const int culprit : {0, 1, 2, 3}) {
    SCOPED_TRACE(culprit);
    Setting setting(over({0, 0, 1, 1}));
    const ContextSpec& spec = setting.spec;
    const std::vector<Call> program{{Op::kLookupStart, 0}, {Op::kLookupDone},     {Op::kStage, 0},  {Op::kUpdateStart},
                                    {Op::kUpdateDone},     {Op::kLookupStart, 1}, {Op::kLookupDone}};
    const auto failures = run_ranks(4, [&](int r) {
      RankCalls& rank = setting.rank(r);
      const float pin = rank.lookup_start(slice(setting.batches[0].ids, spec, r));
      std::vector<std::int32_t> ids = slice(setting.batches[0].ids, spec, r);
      if (r == culprit) ids.back() = ids.back() == 3 ? 4 : 3;
      rank.lookup_done(pin, &ids);
      rank.stage(slice(setting.batches[0].grads, spec, r).data());
      rank.update_start(plain_rule());
      EXPECT_EQ(rank.update_done(), UpdateOutcome{});
      rank.lookup_done(rank.lookup_start(slice(setting.batches[1].ids, spec, r)));
      rank.settle();
    });
    for (const auto& failure : failures) EXPECT_FALSE(failure) << failure->message;
    for (const std::string& told : take_refusals(setting)) {
      EXPECT_NE(told.find("lookup_done on rank " + std::to_string(culprit)), std::string::npos) << told;
      EXPECT_NE(told.find("token_ids of another batch"), std::string::npos) << told;
    }
    setting.model.expect_shards(setting.group.shards);  // nothing was applied

    for (const auto& pipeline : setting.group.pipelines) pipeline->return_to_first_step();
    std::vector<float> norms(4);
    PlainModel& model = setting.model;
    for (const Op op : {Op::kLookupStart, Op::kLookupDone, Op::kStage})
      model.apply({op, 2}, setting.batches, plain_rule());
    const auto again = run_ranks(4, [&](int r) {
      RankCalls& rank = setting.rank(r);
      // A rank may have kept what it had staged, another not: then nobody applies it.
      rank.update_start(plain_rule());
      EXPECT_EQ(rank.update_done(), UpdateOutcome{});
      rank.settle();
    });
    for (const auto& failure : again) EXPECT_FALSE(failure) << failure->message;
    model.expect_shards(setting.group.shards);
  }
}

TEST(Processes, AllReportTheFirstBadId) {
  ContextSpec spec = over({0, 0, 1, 1});
  spec.id_policy = core::IdPolicy::kError;
  Setting setting(spec);
  for (Batch& batch : setting.batches) {
    for (std::int32_t& id : batch.ids) id = std::clamp(id, 0, static_cast<std::int32_t>(kRows) - 1);
  }
  setting.batches[1].ids[13] = 70;
  setting.batches[1].ids[4] = 60;  // of another process than the 13th
  const auto run = [&](int batch) {
    const auto failures = run_ranks(4, [&](int r) {
      RankCalls& rank = setting.rank(r);
      rank.lookup_done(rank.lookup_start(slice(setting.batches[static_cast<std::size_t>(batch)].ids, spec, r)));
      rank.settle();
    });
    for (const auto& failure : failures) EXPECT_FALSE(failure) << failure->message;
  };
  run(0);
  for (const auto& pipeline : setting.group.pipelines) EXPECT_FALSE(pipeline->take_id_problem());
  run(1);
  run(2);
  for (const auto& pipeline : setting.group.pipelines) {
    const auto problem = pipeline->take_id_problem();
    ASSERT_TRUE(problem);
    EXPECT_EQ(problem->step, 2);
    EXPECT_EQ(problem->position, 4);
    EXPECT_EQ(problem->id, 60);
    EXPECT_FALSE(pipeline->take_id_problem());
  }
}

TEST(Processes, ReportNoBadIdOfAStepThatIsNotOver) {
  ContextSpec spec = over({0, 1}, 2);
  spec.id_policy = core::IdPolicy::kError;
  Setting setting(spec);
  std::vector<float> pins(2);
  const auto start = [&](int r) {
    pins[static_cast<std::size_t>(r)] = setting.rank(r).lookup_start(std::vector<std::int32_t>{0, 1, 2, 3, 99});
    setting.rank(r).settle();
  };
  run_ranks(2, start);
  for (const auto& pipeline : setting.group.pipelines) EXPECT_FALSE(pipeline->take_id_problem());
  run_ranks(2, [&](int r) { setting.rank(r).lookup_done(pins[static_cast<std::size_t>(r)]); });
  for (const auto& pipeline : setting.group.pipelines) EXPECT_TRUE(pipeline->take_id_problem());
}

TEST(Processes, AllKnowTheBatchThatHasTooManyUniqueIds) {
  ContextSpec spec = over({0, 1});
  spec.num_unique = 3;
  Setting setting(spec);
  setting.batches[0].ids = {7, 5, 5, 9, 1, 12, 3, 7, 1, 1};
  setting.batches[0].pending = true;
  setting.run({{Op::kLookupStart}, {Op::kLookupDone}, {Op::kStage}, {Op::kUpdateStart}, {Op::kUpdateDone}});
  for (const auto& pipeline : setting.group.pipelines) {
    const auto problem = pipeline->take_id_problem();
    ASSERT_TRUE(problem);
    EXPECT_TRUE(problem->too_many_unique);
    EXPECT_EQ(problem->unique, 6);
  }
}

TEST(Processes, KeepStagedGradientsForASnapshot) {
  const ContextSpec spec = over({0, 1, 0, 1});
  Setting setting(spec);
  setting.batches[0].pending = true;
  setting.run({{Op::kLookupStart}, {Op::kLookupDone}, {Op::kStage}});
  StagedGradients whole;
  const std::int64_t block = spec.tokens_per_rank * spec.emb_width * 4;
  whole.ids.resize(static_cast<std::size_t>(spec.tokens()));
  whole.grads.resize(static_cast<std::size_t>(block * spec.group_size));
  for (int process = 0; process < 2; ++process) {
    const auto mine = setting.group.pipelines[static_cast<std::size_t>(process)]->staged();
    ASSERT_TRUE(mine);
    ASSERT_EQ(mine->ids.size(), 10u);
    ASSERT_EQ(mine->grads.size(), static_cast<std::size_t>(2 * block));
    std::vector<int> ranks = setting.group.map.ranks[static_cast<std::size_t>(process)];
    std::sort(ranks.begin(), ranks.end(), [&](int a, int b) {
      return spec.token_blocks[static_cast<std::size_t>(a)] < spec.token_blocks[static_cast<std::size_t>(b)];
    });
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      const int token_block = spec.token_blocks[static_cast<std::size_t>(ranks[i])];
      std::copy_n(mine->ids.begin() + static_cast<std::ptrdiff_t>(i) * 5, 5, whole.ids.begin() + token_block * 5);
      std::copy_n(mine->grads.begin() + static_cast<std::ptrdiff_t>(i) * block, block,
                  whole.grads.begin() + token_block * block);
    }
  }
  EXPECT_EQ(0, std::memcmp(whole.grads.data(), setting.batches[0].grads.data(), whole.grads.size()));

  Setting again(over({0, 0, 1, 1}));  // another layout
  for (const auto& pipeline : again.group.pipelines) pipeline->restore_staged(whole);
  const auto failures = run_ranks(4, [&](int r) {
    again.rank(r).update_start(plain_rule());
    again.rank(r).update_done();
    again.rank(r).settle();
  });
  for (const auto& failure : failures) EXPECT_FALSE(failure) << failure->message;
  setting.run({{Op::kUpdateStart}, {Op::kUpdateDone}});
  setting.model.expect_shards(again.group.shards);
}

TEST(Processes, CountTheBytesTheySend) {
  const ContextSpec spec = over({0, 0, 1, 1}, 8);
  Setting setting(spec);
  setting.run({{Op::kLookupStart}, {Op::kLookupDone}});
  const std::int64_t notice = (sizeof(Notice) + 63) / 64 * 64;
  // To the one peer: the ids of ten tokens, and four of eight columns of its ten tokens' rows.
  EXPECT_EQ(setting.group.pipeline->stats().bytes_sent, notice + 10 * 4 + 10 * 4 * 4);
  EXPECT_EQ(setting.group.pipeline->stats().bytes_moved, 2 * 5 * 8 * 4 * 3 / 4 * 4 / 4);
}

// ---- failures ----

std::vector<std::string> messages_of(const std::vector<std::optional<Failure>>& failures) {
  std::vector<std::string> messages;
  for (const auto& failure : failures) messages.push_back(failure ? failure->message : "none");
  return messages;
}

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
