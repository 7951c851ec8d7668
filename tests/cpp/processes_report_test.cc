// What one process of a group finds wrong with a step, all of them report.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "plain_model.h"
#include "several_processes.h"

namespace async_emb::context {
namespace {

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

TEST(Processes, ReportAStartThatIsRefusedWhileAnUpdateExchanges) {
  for (const std::vector<int>& processes : kLayouts) {
    SCOPED_TRACE(name_of(processes));
    ContextSpec spec = over(processes);
    spec.timeout_seconds = 10;
    Setting setting(spec);
    setting.run({{Op::kLookupStart, 0}, {Op::kLookupDone}, {Op::kStage, 0}});
    const auto failures = run_ranks(spec.group_size, [&](int r) {
      setting.rank(r).update_start(plain_rule());
      // Processes come to this at different moments of the first one's exchanges.
      setting.group.pipelines[static_cast<std::size_t>(setting.group.map.process_of(r))]->update_begin(r, plain_rule());
      setting.rank(r).settle();
    });
    for (const auto& failure : failures) EXPECT_FALSE(failure) << failure->message;
    for (const std::string& told : take_refusals(setting)) {
      EXPECT_NE(told.find("update start of step 2 came before update_done of step 1"), std::string::npos) << told;
    }
    setting.model.apply({Op::kUpdateStart}, setting.batches, plain_rule());
    setting.run({{Op::kUpdateDone}, {Op::kLookupStart, 1}, {Op::kLookupDone}});
    if (HasFailure()) return;
  }
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

}  // namespace
}  // namespace async_emb::context
