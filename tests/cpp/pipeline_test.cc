// Lookups and updates of a group against a plain table: bits, order, and what leaves every byte as it was.
#include "context/pipeline.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "context/timeline.h"
#include "plain_model.h"
#include "ranks.h"

namespace async_emb::context {
namespace {

ContextSpec spec_of(int group_size, std::int64_t logical_width, core::DType dtype) {
  ContextSpec spec = small_spec(group_size, 5, (logical_width + group_size - 1) / group_size);
  spec.logical_width = logical_width;
  spec.dtype = dtype;
  spec.id_policy = core::IdPolicy::kDrop;
  spec.has_padding_id = true;
  spec.padding_id = 2;
  // Blocks of the token array need not lie in rank order.
  for (int rank = 0; rank < group_size; ++rank)
    spec.token_blocks[static_cast<std::size_t>(rank)] = group_size - 1 - rank;
  return spec;
}

TEST(Pipeline, AgreesWithThePlainTableOnAnyNumberOfRanks) {
  for (const core::DType dtype : {core::DType::kFloat32, core::DType::kBFloat16, core::DType::kFloat16}) {
    for (const int group_size : {1, 2, 3, 4, 8}) {
      SCOPED_TRACE(std::string(core::name_of(dtype)) + " on " + std::to_string(group_size) + " ranks");
      Setting setting(spec_of(group_size, 7, dtype));
      setting.run(staleness_one(10));
    }
  }
}

TEST(Pipeline, AgreesWithThePlainTableInTheExactSchedule) {
  Setting setting(spec_of(3, 6, core::DType::kFloat32));
  std::vector<Call> program;
  for (int k = 0; k < 10; ++k) {
    for (const Op op : {Op::kLookupStart, Op::kLookupDone, Op::kStage, Op::kUpdateStart, Op::kUpdateDone}) {
      program.push_back({op, k});
    }
  }
  setting.run(program);
}

TEST(Pipeline, AppliesTheLazyRuleAndClips) {
  UpdateRule rule = plain_rule();
  rule.lazy = true;
  rule.decay = 0.01f;
  rule.weight_decay = 0.001f;
  rule.step = 40;
  rule.clips = true;
  rule.max_grad_norm = 0.5f;
  Setting setting(spec_of(4, 7, core::DType::kFloat32));
  setting.run(staleness_one(5), rule);
  rule.step = 60;
  setting.return_to_first_step();
  setting.run(staleness_one(5), rule);
}

TEST(Pipeline, CutsBigBatchesWithoutChangingABit) {
  ContextSpec spec = small_spec(2, 350, 512);
  spec.id_policy = core::IdPolicy::kDrop;
  Setting setting(spec, 5, 8, nullptr, 2);  // 8 threads for 2 ranks: several parts each
  setting.run(staleness_one(2));
}

TEST(Pipeline, ReadsInt64IdsAsWritten) {
  ContextSpec spec = small_spec(1);
  spec.id_policy = core::IdPolicy::kDrop;
  Setting setting(spec);
  RankCalls& rank = setting.group.ranks[0];
  const std::vector<std::int64_t> ids{3, std::int64_t{1} << 32, -1, (std::int64_t{1} << 32) + 3};
  const std::vector<char> rows = rank.lookup_done(rank.lookup_start(ids));
  const std::vector<unsigned char> expected = setting.model.lookup({3, -1, -1, -1});
  EXPECT_EQ(0, std::memcmp(rows.data(), expected.data(), expected.size()));
  rank.settle();
}

TEST(Pipeline, StagesForTheConsumedBatchWhileTheNextIsArmed) {
  Setting setting(small_spec(2), 3);
  setting.batches[0].ids = {0, 1, 2, 3, 4, 5, 6, 7};
  setting.batches[1].ids = {8, 9, 10, 11, 12, 13, 14, 15};
  setting.batches[0].pending = true;
  setting.run({{Op::kLookupStart, 0},
               {Op::kLookupDone},
               {Op::kLookupStart, 1},
               {Op::kStage, 0},
               {Op::kLookupDone},
               {Op::kUpdateStart},
               {Op::kUpdateDone}},
              plain_rule());
  EXPECT_GT(setting.model.state[3], 0.0f);
  EXPECT_EQ(setting.model.state[9], 0.0f);
}

TEST(Pipeline, LeavesEveryByteWhereTheNormIsNotFinite) {
  for (const float poison : {std::nanf(""), std::numeric_limits<float>::infinity(), 3e38f}) {
    Setting setting(small_spec(2));
    setting.batches[0].ids.assign(8, 1);
    std::memcpy(setting.batches[0].grads.data(), &poison, sizeof(poison));
    setting.run(staleness_one(1));  // the model does not change the table then
    EXPECT_EQ(setting.group.pipeline->stats().skipped_updates, 1);
    EXPECT_EQ(setting.group.pipeline->stats().updates, 0);
  }
}

TEST(Pipeline, LeavesEveryByteWhereANumberOfTheRuleCannotBeApplied) {
  for (const UpdateRule& rule : unsound_rules()) {
    Setting setting(small_spec(2));
    setting.batches[0].pending = true;
    const std::vector<unsigned char> before = setting.model.table;
    setting.run(staleness_one(1), rule);
    EXPECT_EQ(before, setting.model.table);
    EXPECT_EQ(setting.group.pipeline->stats().skipped_updates, 1);
    EXPECT_EQ(setting.group.pipeline->stats().updates, 0);
  }
  for (const UpdateRule& rule : extreme_rules()) {
    Setting setting(small_spec(2));
    setting.batches[0].pending = true;
    setting.run(staleness_one(1), rule);
    EXPECT_EQ(setting.group.pipeline->stats().updates, 1);
  }
}

TEST(Pipeline, LeavesEveryByteWhereOneRankSaysNotPending) {
  for (const int reluctant : {0, 1, 2}) {
    Setting setting(small_spec(3));
    std::vector<float> pins;
    for (int r : {0, 1, 2})
      pins.push_back(setting.rank(r).lookup_start(slice(setting.batches[0].ids, setting.spec, r)));
    for (int r : {0, 1, 2}) {
      setting.rank(r).lookup_done(pins[static_cast<std::size_t>(r)]);
      setting.rank(r).settle();
      setting.rank(r).stage(slice(setting.batches[0].grads, setting.spec, r).data(), r != reluctant);
    }
    for (int r : {0, 1, 2}) setting.rank(r).update_start(plain_rule());
    for (int r : {0, 1, 2}) {
      const UpdateOutcome outcome = setting.rank(r).update_done();
      EXPECT_EQ(outcome.valid, 0);
      EXPECT_EQ(outcome.pending, 1);
      EXPECT_GT(outcome.norm, 0.0f);
      setting.rank(r).settle();
    }
    setting.model.expect_shards(setting.group.shards);
  }
}

TEST(Pipeline, TrainsTheSmallestIdsWhereThereAreTooMany) {
  ContextSpec spec = small_spec(2);
  spec.num_unique = 3;
  Setting setting(spec);
  for (int i = 0; i < 2; ++i) {  // staged again for the same rows, it is found again
    setting.batches[0].ids = {7, 5, 5, 9, 1, 12, 3, 7};
    setting.batches[0].pending = true;
    setting.run(i == 0 ? std::vector<Call>{{Op::kLookupStart},
                                           {Op::kLookupDone},
                                           {Op::kStage},
                                           {Op::kUpdateStart},
                                           {Op::kUpdateDone}}
                       : std::vector<Call>{{Op::kStage}, {Op::kUpdateStart}, {Op::kUpdateDone}},
                plain_rule());
    const auto problem = setting.group.pipeline->take_id_problem();
    ASSERT_TRUE(problem);
    EXPECT_TRUE(problem->too_many_unique);
    EXPECT_EQ(problem->unique, 6);
    EXPECT_EQ(problem->rows, kRows);
  }
  EXPECT_GT(setting.model.state[5], 0.0f);
  EXPECT_EQ(setting.model.state[7], 0.0f);
}

TEST(Pipeline, KeepsTheFirstOffenderOfTheEarliestStep) {
  Executor executor(2);
  ContextSpec spec = small_spec(2);
  spec.token_blocks = {1, 0};
  Group group(spec, kRows, executor);
  const auto step = [&](const std::vector<std::int64_t>& of_rank0, const std::vector<std::int64_t>& of_rank1) {
    run_ranks(2, [&](int rank) {
      RankCalls& calls = group.ranks[static_cast<std::size_t>(rank)];
      const std::vector<char> rows = calls.lookup_done(calls.lookup_start(rank == 0 ? of_rank0 : of_rank1));
      float first = -1;
      std::memcpy(&first, rows.data(), sizeof(first));
      EXPECT_EQ(first, 0.0f) << "a bad id reads zeros";
      calls.settle();
    });
  };
  step({-7, 0, 0, 0}, {kRows, 0, 1, -1});
  step({-9, 0, 0, 0}, {-9, 0, 0, 0});
  const auto problem = group.pipeline->take_id_problem();
  ASSERT_TRUE(problem);
  EXPECT_FALSE(problem->too_many_unique);
  EXPECT_EQ(problem->step, 1);
  EXPECT_EQ(problem->position, 0) << "rank 1 holds the first block of tokens";
  EXPECT_EQ(problem->id, kRows);
  EXPECT_EQ(problem->rows, kRows);
  EXPECT_FALSE(group.pipeline->take_id_problem()) << "taking it clears it";
  EXPECT_EQ(group.pipeline->stats().bad_ids, 5);
}

TEST(Pipeline, TrainsTheSegmentsOfTheCallerAsItsOwn) {
  ContextSpec spec = small_spec(2);
  spec.num_unique = 5;
  spec.has_padding_id = true;
  spec.padding_id = 2;
  Setting setting(spec);
  const Batch& batch = setting.batches[0];
  const std::vector<std::int32_t> unique{1, 2, 4, kRows, kRows};
  const std::vector<std::int32_t> segments{0, 0, -1, 2, 1, 2, 2, 0};  // ids 1 1 - 4 2 4 4 1, and 2 is padding
  run_ranks(2, [&](int rank) {
    RankCalls& calls = setting.group.ranks[static_cast<std::size_t>(rank)];
    calls.lookup_done(calls.lookup_start(slice(batch.ids, setting.spec, rank)));
    calls.stage_segments(slice(batch.grads, setting.spec, rank).data(), slice(segments, setting.spec, rank), unique);
    calls.update_start(plain_rule());
    EXPECT_EQ(calls.update_done().valid, 1);
    calls.settle();
  });
  setting.group.pipeline->take_id_problem();  // of the lookup's own random ids
  PlainModel& model = setting.model;
  Batch same = batch;
  same.ids = {1, 1, -1, 4, 2, 4, 4, 1};
  same.pending = true;
  const std::vector<Batch> batches{same};
  for (const Op op : {Op::kLookupStart, Op::kLookupDone, Op::kStage, Op::kUpdateStart, Op::kUpdateDone}) {
    model.apply({op, 0}, batches, plain_rule());
  }
  model.expect_shards(setting.group.shards);
}

TEST(Pipeline, ReportsSegmentsThatLeadNowhere) {
  Executor executor(1);
  ContextSpec spec = small_spec(1);
  spec.num_unique = 2;
  Group group(spec, kRows, executor);
  RankCalls& rank = group.ranks[0];
  rank.lookup_done(rank.lookup_start<std::int32_t>({0, 1, 1, 0}));
  const std::vector<float> grads(8, 1.0f);
  rank.stage_segments(grads.data(), {0, 1, 2, -3}, {4, kRows});
  const auto problem = group.pipeline->take_id_problem();
  ASSERT_TRUE(problem);
  EXPECT_EQ(problem->position, 1);
  EXPECT_EQ(problem->id, kRows);
  EXPECT_EQ(group.pipeline->stats().bad_ids, 3);
  rank.settle();
}

TEST(Pipeline, HoldsFewBatchesHoweverLongItRuns) {
  Setting setting(small_spec(2));
  const std::int64_t empty = setting.group.pipeline->arena_bytes();
  for (int i = 0; i < 20; ++i) {
    setting.run(staleness_one(8));
    setting.return_to_first_step();
  }
  EXPECT_LE(setting.group.pipeline->arena_bytes(), empty + most_batch_bytes(setting.spec));
}

TEST(Pipeline, GivesBackStagedGradientsAndTakesThem) {
  Setting first(small_spec(2), 7);
  first.batches[0].pending = true;
  first.run({{Op::kLookupStart}, {Op::kLookupDone}, {Op::kStage}});
  EXPECT_FALSE(Setting(small_spec(2)).group.pipeline->staged());
  const auto staged = first.group.pipeline->staged();
  ASSERT_TRUE(staged);
  EXPECT_TRUE(staged->pending);
  EXPECT_EQ(0, std::memcmp(staged->grads.data(), first.batches[0].grads.data(), staged->grads.size()));

  Setting second(small_spec(2), 7);
  second.group.pipeline->restore_staged(*staged);
  ASSERT_TRUE(second.group.pipeline->staged());
  EXPECT_EQ(second.group.pipeline->staged()->ids, staged->ids);
  EXPECT_THROW(second.group.pipeline->restore_staged(*staged), Error) << "what is staged already is not overwritten";
  run_ranks(2, [&](int rank) {
    RankCalls& calls = second.group.ranks[static_cast<std::size_t>(rank)];
    calls.update_start(plain_rule());
    EXPECT_EQ(calls.update_done().valid, 1);
    calls.settle();
    calls.stage(
        slice(first.batches[1].grads, first.spec, rank).data());  // refused: there is no batch that it belongs to
  });
  const auto refusal = second.group.pipeline->take_refusal();
  ASSERT_TRUE(refusal);
  EXPECT_NE(refusal->find("stage_update number 2 has no batch to belong to"), std::string::npos) << *refusal;
  first.run({{Op::kUpdateStart}, {Op::kUpdateDone}});
  first.model.expect_shards(second.group.shards);
}

TEST(Pipeline, RefusesToRestoreWhatDoesNotFit) {
  Setting setting(small_spec(2));
  EXPECT_THROW(setting.group.pipeline->restore_staged({.ids = {1}, .grads = {}}), Error);
  StagedGradients staged{.ids = std::vector<std::int32_t>(8, kRows), .grads = std::vector<char>(8 * 4 * 4)};
  setting.group.pipeline->restore_staged(staged);  // ids of a table with more rows: found when the table is lent
  const auto failures = run_ranks(2, [&](int rank) {
    RankCalls& calls = setting.group.ranks[static_cast<std::size_t>(rank)];
    calls.update_start(plain_rule());
    calls.update_done();
    calls.settle();
  });
  for (const auto& failure : failures) {
    ASSERT_TRUE(failure);
    EXPECT_NE(failure->message.find("the table has 23 rows, but the staged gradients are for one with at least 24"),
              std::string::npos)
        << failure->message;
  }
  setting.model.expect_shards(setting.group.shards);
}

TEST(Pipeline, RecordsItsEventsInTheirOrder) {
  Setting setting(small_spec(1));
  Timeline::shared().start();
  setting.run({{Op::kLookupStart}, {Op::kLookupDone}, {Op::kStage}, {Op::kUpdateStart}, {Op::kUpdateDone}});
  std::string names;
  for (const TimelineEvent& event : Timeline::shared().stop()) {
    EXPECT_EQ(event.table, "users");
    EXPECT_EQ(event.device, 10);
    EXPECT_EQ(event.step, 1);
    if (event.name != "lookup_done" && event.name != "update_done") names += event.name + " ";
  }
  EXPECT_EQ(names, "lookup_begin lookup_lease lookup_ready stage_update update_begin update_lease update_ready ");
}

}  // namespace
}  // namespace async_emb::context
