// A group on GPUs of several processes gives what it gives in one, and what one process finds wrong all report.
#include "device_processes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

namespace async_emb::context {
namespace {

TEST(DeviceProcesses, GiveTheBitsOfThePlainTable) {
  for (const std::vector<int>& processes : kLayouts) {
    SCOPED_TRACE(name_of(processes));
    DeviceProcessesSetting setting(over(processes, 13));
    setting.run_ahead(staleness_one(22));
    for (const auto& pipeline : setting.group.pipelines) EXPECT_FALSE(pipeline->take_refusal());
  }
}

TEST(DeviceProcesses, GiveThemInEveryDtypeAndWithAHostThatWaits) {
  for (const core::DType dtype : {core::DType::kFloat32, core::DType::kBFloat16, core::DType::kFloat16}) {
    for (const std::vector<int>& processes : {std::vector<int>{0, 0, 1, 1}, {0, 1, 0, 1}, {4, 2, 9}}) {
      SCOPED_TRACE(name_of(processes) + ", " + core::name_of(dtype));
      DeviceProcessesSetting setting(over(processes, 13, dtype), 3, 6);
      setting.run(staleness_one(6));
    }
  }
}

TEST(DeviceProcesses, OfWhichOneHoldsNothingButPaddingTakePart) {
  DeviceProcessesSetting setting(over({0, 0, 1, 1}, 2));  // ranks 2 and 3 have no logical column
  setting.run_ahead(staleness_one(6));
}

TEST(DeviceProcesses, ApplyTheLazyRuleAndClip) {
  UpdateRule rule = plain_rule();
  rule.lazy = true;
  rule.decay = 0.01f;
  rule.weight_decay = 0.001f;
  rule.step = 40;
  rule.clips = true;
  rule.max_grad_norm = 0.5f;
  DeviceProcessesSetting setting(over({0, 0, 1, 1}));
  setting.run_ahead(staleness_one(5), rule);
}

TEST(DeviceProcesses, LeaveEveryByteWhereTheNormOfOneIsNotFinite) {
  for (std::size_t column = 0; column < 4; ++column) {
    DeviceProcessesSetting setting(over({0, 0, 1, 1}, 4));
    const float nan = std::nanf("");
    setting.batches[0].ids.assign(20, 1);
    setting.batches[0].pending = true;
    std::memcpy(setting.batches[0].grads.data() + column * sizeof(float), &nan, sizeof(nan));
    const std::vector<unsigned char> before = setting.model.table;
    setting.run_ahead(staleness_one(1));
    EXPECT_EQ(before, setting.model.table);
    for (const auto& pipeline : setting.group.pipelines) EXPECT_EQ(pipeline->stats().skipped_updates, 1);
  }
}

TEST(DeviceProcesses, LeaveEveryByteWhereOneSaysNotPending) {
  for (const int reluctant : {0, 1, 2, 3}) {
    DeviceProcessesSetting setting(over({0, 0, 1, 1}));
    const auto failures = run_ranks(4, [&](int r) {
      DeviceRankCalls& rank = setting.rank(r);
      rank.lookup_start(slice(setting.batches[0].ids, setting.spec, r));
      rank.lookup_done_later();
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

TEST(DeviceProcesses, TrainTheSegmentsOfTheCaller) {
  DeviceProcessesSetting setting(over({0, 0, 1, 1}));
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
  std::vector<Batch> batches{as_ids};
  expect(setting.model, {{Op::kLookupStart}, {Op::kLookupDone}, {Op::kStage}, {Op::kUpdateStart}, {Op::kUpdateDone}},
         batches, plain_rule());
  const auto failures = run_ranks(4, [&](int r) {
    DeviceRankCalls& rank = setting.rank(r);
    rank.lookup_start(slice(setting.batches[0].ids, spec, r));
    rank.lookup_done_later();
    rank.stage_segments(slice(as_ids.grads, spec, r).data(), slice(segments, spec, r), unique);
    rank.update_start(plain_rule());
    rank.update_done_later();
    rank.settle();
  });
  for (const auto& failure : failures) EXPECT_FALSE(failure) << failure->message;
  setting.model.expect_shards(setting.group.shards);
}

TEST(DeviceProcesses, AllReportTheFirstBadId) {
  ContextSpec spec = over({0, 0, 1, 1});
  spec.id_policy = core::IdPolicy::kError;
  DeviceProcessesSetting setting(spec);
  for (Batch& batch : setting.batches) {
    for (std::int32_t& id : batch.ids) id = std::clamp(id, 0, static_cast<std::int32_t>(kRows) - 1);
  }
  setting.batches[1].ids[13] = 70;
  setting.batches[1].ids[4] = 60;  // of another process than the 13th
  const auto run = [&](int batch) {
    const auto failures = run_ranks(4, [&](int r) {
      DeviceRankCalls& rank = setting.rank(r);
      rank.lookup_start(slice(setting.batches[static_cast<std::size_t>(batch)].ids, spec, r));
      rank.lookup_done_later();
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
    EXPECT_EQ(problem->rows, kRows);
    EXPECT_FALSE(pipeline->take_id_problem());
  }
}

TEST(DeviceProcesses, AllKnowTheBatchThatHasTooManyUniqueIds) {
  ContextSpec spec = over({0, 1});
  spec.num_unique = 3;
  DeviceProcessesSetting setting(spec);
  setting.batches[0].ids = {7, 5, 5, 9, 1, 12, 3, 7, 1, 1};
  setting.batches[0].pending = true;
  setting.run_ahead(staleness_one(1));
  for (const auto& pipeline : setting.group.pipelines) {
    const auto problem = pipeline->take_id_problem();
    ASSERT_TRUE(problem);
    EXPECT_TRUE(problem->too_many_unique);
    EXPECT_EQ(problem->unique, 6);
  }
}

TEST(DeviceProcesses, AllStopWhereTheDeviceOfOneRankRefuses) {
  for (const int culprit : {0, 1, 2, 3}) {
    SCOPED_TRACE(culprit);
    DeviceProcessesSetting setting(over({0, 0, 1, 1}));
    const ContextSpec& spec = setting.spec;
    const auto failures = run_ranks(4, [&](int r) {
      DeviceRankCalls& rank = setting.rank(r);
      rank.lookup_start(slice(setting.batches[0].ids, spec, r));
      std::vector<std::int32_t> ids = slice(setting.batches[0].ids, spec, r);
      if (r == culprit) ids.back() = ids.back() == 3 ? 4 : 3;
      rank.lookup_done_later(&ids);
      rank.stage(slice(setting.batches[0].grads, spec, r).data());
      rank.update_start(plain_rule());  // no host knows yet
      EXPECT_EQ(rank.update_done(), UpdateOutcome{});
      rank.lookup_start(slice(setting.batches[1].ids, spec, r));
      Tensor& rows = rank.lookup_done_later();
      rank.settle();
      EXPECT_TRUE(std::isnan(*rows.as<float>()));
    });
    for (const auto& failure : failures) EXPECT_FALSE(failure) << failure->message;
    setting.model.expect_shards(setting.group.shards);  // nothing was applied
    std::vector<std::string> told;
    for (const auto& pipeline : setting.group.pipelines) told.push_back(pipeline->take_refusal().value_or("nothing"));
    EXPECT_NE(told[0].find("lookup_done on rank " + std::to_string(culprit)), std::string::npos) << told[0];
    EXPECT_NE(told[0].find("token_ids of another batch: step 1"), std::string::npos) << told[0];
    EXPECT_EQ(told[0], told[1]);

    setting.model.machine.reset(2, 1, 1);
    setting.run({{Op::kLookupStart, 2}, {Op::kLookupDone}, {Op::kStage, 2}, {Op::kUpdateStart}, {Op::kUpdateDone}});
  }
}

TEST(DeviceProcesses, AllStopWhereTheHostOfOneRankRefuses) {
  for (const int culprit : {0, 3}) {
    SCOPED_TRACE(culprit);
    DeviceProcessesSetting setting(over({0, 0, 1, 1}));
    const ContextSpec& spec = setting.spec;
    const auto failures = run_ranks(4, [&](int r) {
      DeviceRankCalls& rank = setting.rank(r);
      rank.lookup_start(slice(setting.batches[0].ids, spec, r));
      rank.lookup_done_later();
      rank.stage(slice(setting.batches[0].grads, spec, r).data());
      if (r == culprit) rank.stage(slice(setting.batches[0].grads, spec, r).data());
      rank.update_start(plain_rule());
      EXPECT_EQ(rank.update_done(), UpdateOutcome{});
      rank.settle();
    });
    for (const auto& failure : failures) EXPECT_FALSE(failure) << failure->message;
    setting.model.expect_shards(setting.group.shards);
    for (const auto& pipeline : setting.group.pipelines) {
      const std::string told = pipeline->take_refusal().value_or("nothing");
      EXPECT_NE(told.find("stage_update on rank " + std::to_string(culprit)), std::string::npos) << told;
    }
  }
}

TEST(DeviceProcesses, KeepStagedGradientsForASnapshot) {
  const ContextSpec spec = over({0, 1, 0, 1});
  DeviceProcessesSetting setting(spec);
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

  DeviceProcessesSetting again(over({0, 0, 1, 1}));  // another layout
  for (const auto& pipeline : again.group.pipelines) pipeline->restore_staged(whole);
  const auto failures = run_ranks(4, [&](int r) {
    again.rank(r).update_start(plain_rule());
    again.rank(r).update_done_later();
    again.rank(r).settle();
  });
  for (const auto& failure : failures) EXPECT_FALSE(failure) << failure->message;
  setting.run({{Op::kUpdateStart}, {Op::kUpdateDone}});
  setting.model.expect_shards(again.group.shards);
}

TEST(DeviceProcesses, CountTheBytesTheySend) {
  const ContextSpec spec = over({0, 0, 1, 1}, 8);
  DeviceProcessesSetting setting(spec);
  setting.run({{Op::kLookupStart}, {Op::kLookupDone}});
  const auto aligned = [](std::int64_t bytes) { return (bytes + 255) / 256 * 256; };
  const std::int64_t head = aligned(sizeof(cuda::PeerWord)) + aligned(2 * 4);
  // To the one peer: a notice between the hosts, the ids of ten tokens, and four of eight columns of its ten tokens'
  // rows.
  const Stats stats = setting.group.pipelines[0]->stats();
  EXPECT_EQ(stats.bytes_sent, static_cast<std::int64_t>(sizeof(Notice)) + head + aligned(10 * 4) + 10 * 4 * 4);
  EXPECT_EQ(stats.bytes_moved, 2 * 5 * 8 * 4 * 3 / 4);
  EXPECT_EQ(stats.lookups, 1);
}

TEST(DeviceProcesses, AllocateNothingInAStep) {
  DeviceProcessesSetting setting(over({0, 0, 1, 1}));
  const auto bytes = [&] { return setting.group.pipelines[0]->arena_bytes(); };
  const std::int64_t before = bytes();
  std::vector<int> objects;
  for (const auto& gpu : setting.group.gpus) objects.push_back(gpu->objects());
  setting.run_ahead(staleness_one(4));
  EXPECT_EQ(bytes(), before);
  for (std::size_t i = 0; i < objects.size(); ++i) EXPECT_EQ(setting.group.gpus[i]->objects(), objects[i]) << i;
}

TEST(DeviceProcesses, NeedTheirOwnGpusToReadEachOther) {
  ContextSpec spec = over({0, 0, 1, 1});
  cuda::EmulatedDevice one(0), other(1);
  const auto network = std::make_shared<comm::ThreadNetwork>(2);
  const auto gpus = std::make_shared<comm::DeviceNetwork>(2);
  try {
    DevicePipeline pipeline(spec, spec.devices, {&one, &other, nullptr, nullptr}, map_processes(spec),
                            {network->transport(0), network->transport(0), gpus->transport(0)});
    FAIL() << "not refused";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("start one process for each GPU"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace async_emb::context
