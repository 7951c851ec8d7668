// The pipeline of GPUs, on emulated ones: the plain table's bits on any number of ranks and devices, with a host that
// runs ahead, buffers that are overwritten right after a call, and devices that cannot read each other.
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "device_setting.h"

namespace async_emb::context {
namespace {

struct DeviceSetting : SettingOn<DeviceGroup> {
  explicit DeviceSetting(const ContextSpec& spec, bool one_gpu = false, std::vector<int> clusters = {},
                         unsigned seed = 1, int number_of_batches = 12)
      : SettingOn(spec, seed, number_of_batches,
                  clusters.empty() ? std::vector<int>(static_cast<std::size_t>(spec.group_size), 0) : clusters,
                  one_gpu) {}
};

ContextSpec spec_of(int ranks, core::DType dtype = core::DType::kFloat32) {
  ContextSpec spec = small_spec(ranks, 6, 3);
  spec.dtype = dtype;
  spec.id_policy = core::IdPolicy::kDrop;
  return spec;
}

TEST(DevicePipeline, AgreesWithThePlainTableOnAnyNumberOfRanks) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    for (const bool one_gpu : {false, true}) {
      SCOPED_TRACE(std::to_string(ranks) + " ranks" + (one_gpu ? " on one GPU" : ""));
      DeviceSetting setting(spec_of(ranks), one_gpu);
      setting.run(staleness_one(8));
    }
  }
}

TEST(DevicePipeline, AgreesWithAHostThatRunsAhead) {
  for (const core::DType dtype : {core::DType::kFloat32, core::DType::kBFloat16, core::DType::kFloat16}) {
    DeviceSetting setting(spec_of(3, dtype));
    setting.run_ahead(staleness_one(12));
  }
}

TEST(DevicePipeline, AgreesBetweenDevicesThatCannotReadEachOther) {
  const std::vector<std::vector<int>> layouts = {{0, 1}, {0, 0, 1, 1}, {0, 1, 0, 2}, {0, 1, 1, 0}};
  for (const auto& clusters : layouts) {
    ContextSpec spec = spec_of(static_cast<int>(clusters.size()));
    std::swap(spec.token_blocks.front(), spec.token_blocks.back());
    DeviceSetting setting(spec, false, clusters);
    setting.run_ahead(staleness_one(6));
  }
}

TEST(DevicePipeline, LeavesPaddingColumnsAlone) {
  ContextSpec spec = spec_of(4);
  spec.logical_width = 7;  // the last ranks hold padding only, or in part
  DeviceSetting setting(spec);
  setting.run_ahead(staleness_one(8));
}

TEST(DevicePipeline, AppliesTheLazyRuleAndClips) {
  DeviceSetting setting(spec_of(2));
  UpdateRule rule = plain_rule();
  rule.lazy = true;
  rule.decay = 0.1f;
  rule.weight_decay = 0.01f;
  rule.clips = true;
  rule.max_grad_norm = 0.5f;
  rule.step = 7;
  setting.run_ahead(staleness_one(8), rule);
}

TEST(DevicePipeline, LeavesEveryByteWhereTheNormIsNotFinite) {
  DeviceSetting setting(spec_of(2));
  const float nan = std::nanf("");
  setting.batches[0].ids.assign(12, 5);
  setting.batches[0].pending = true;
  std::memcpy(setting.batches[0].grads.data() + 4, &nan, sizeof(nan));
  const std::vector<unsigned char> before = setting.model.table;
  setting.run_ahead(staleness_one(1));
  EXPECT_EQ(before, setting.model.table);
  EXPECT_EQ(setting.group.pipeline->stats().skipped_updates, 1);
  EXPECT_EQ(setting.group.pipeline->stats().updates, 0);
}

TEST(DevicePipeline, LeavesEveryByteWhereANumberOfTheRuleCannotBeApplied) {
  for (const UpdateRule& rule : unsound_rules()) {
    DeviceSetting setting(spec_of(2));
    setting.batches[0].pending = true;
    const std::vector<unsigned char> before = setting.model.table;
    setting.run_ahead(staleness_one(1), rule);
    EXPECT_EQ(before, setting.model.table);
    EXPECT_EQ(setting.group.pipeline->stats().skipped_updates, 1);
    EXPECT_EQ(setting.group.pipeline->stats().updates, 0);
  }
  for (const UpdateRule& rule : extreme_rules()) {
    DeviceSetting setting(spec_of(2));
    setting.batches[0].pending = true;
    setting.run_ahead(staleness_one(1), rule);
    EXPECT_EQ(setting.group.pipeline->stats().updates, 1);
  }
}

TEST(DevicePipeline, RestsATableThatLeavesAStepWithALookupUnderWay) {
  for (int repetition = 0; repetition < 10; ++repetition) {
    DeviceSetting setting(spec_of(3));
    std::vector<Tensor*> rows(3);
    const auto failures = run_ranks(3, [&](int r) {
      DeviceRankCalls& calls = setting.rank(r);
      calls.lookup_start(slice(setting.batches[0].ids, setting.spec, r));
      setting.group.pipeline->settle(r, calls.stream());
      // Whoever comes next may write to the table, though no rank has consumed the lookup.
      Tensor& table = setting.group.shards[static_cast<std::size_t>(r)]->table;
      static_cast<cuda::EmulatedStream*>(calls.stream())->put([&table] {
        std::memset(table.as<char>(), 0x11, table.bytes());
      });
      rows[static_cast<std::size_t>(r)] = &calls.lookup_done_later();
      calls.settle();
    });
    for (const auto& failure : failures) EXPECT_FALSE(failure) << failure->message;
    const std::vector<unsigned char> whole = setting.model.lookup(setting.batches[0].ids);
    for (int r = 0; r < 3; ++r) {
      const std::vector<unsigned char> mine = slice(whole, setting.spec, r);
      EXPECT_EQ(0, std::memcmp(rows[static_cast<std::size_t>(r)]->as<char>(), mine.data(), mine.size())) << r;
    }
  }
}

TEST(DevicePipeline, TrainsTheSmallestIdsWhereThereAreTooMany) {
  ContextSpec spec = spec_of(2);
  spec.num_unique = 3;
  DeviceSetting setting(spec);
  setting.run_ahead(staleness_one(3));
  const auto problem = setting.group.pipeline->take_id_problem();
  ASSERT_TRUE(problem);
  EXPECT_TRUE(problem->too_many_unique);
  EXPECT_GT(problem->unique, 3);
}

TEST(DevicePipeline, KeepsTheFirstOffender) {
  ContextSpec spec = spec_of(2);
  spec.id_policy = core::IdPolicy::kError;
  DeviceSetting setting(spec);
  setting.batches[0].ids.assign(12, 1);
  setting.batches[1].ids.assign(12, 1);
  setting.batches[1].ids[9] = 777;
  setting.batches[1].ids[4] = -3;
  setting.batches[2].ids[0] = 888;
  setting.run_ahead(staleness_one(3));
  const auto problem = setting.group.pipeline->take_id_problem();
  ASSERT_TRUE(problem);
  EXPECT_EQ(problem->step, 2);
  EXPECT_EQ(problem->position, 4);
  EXPECT_EQ(problem->id, -3);
  EXPECT_EQ(problem->rows, kRows);
  EXPECT_FALSE(setting.group.pipeline->take_id_problem());
}

TEST(DevicePipeline, CountsWhatItDoes) {
  DeviceSetting setting(spec_of(2));
  setting.run_ahead(staleness_one(5));
  const Stats stats = setting.group.pipeline->stats();
  EXPECT_EQ(stats.lookups, 5);
  EXPECT_EQ(stats.tokens, 5 * 12);
  EXPECT_EQ(stats.updates + stats.skipped_updates, 5);
  EXPECT_GT(stats.trained_tokens, stats.unique_tokens);
  EXPECT_GT(stats.bad_ids, 0);
  EXPECT_GT(setting.group.pipeline->arena_bytes(), 0);
}

TEST(DevicePipeline, TrainsTheSegmentsOfTheCaller) {
  DeviceSetting setting(spec_of(2));
  const std::vector<std::int32_t> segments = {0, 1, 1, -1, 0, 2};
  std::vector<std::int32_t> unique = {2, 5, 9};
  unique.resize(static_cast<std::size_t>(setting.spec.num_unique), kRows);
  Batch same = setting.batches[0];
  for (int rank = 0; rank < 2; ++rank) {
    for (int i = 0; i < 6; ++i) {
      const std::int32_t segment = segments[static_cast<std::size_t>(i)];
      same.ids[static_cast<std::size_t>(rank * 6 + i)] = segment < 0 ? -1 : unique[static_cast<std::size_t>(segment)];
    }
  }
  run_ranks(2, [&](int r) {
    DeviceRankCalls& calls = setting.rank(r);
    calls.lookup_start(slice(setting.batches[0].ids, setting.spec, r));
    calls.lookup_done_later();
    calls.stage_segments(slice(setting.batches[0].grads, setting.spec, r).data(), segments, unique);
    calls.update_start(plain_rule());
    calls.update_done_later();
    calls.settle();
  });
  same.pending = true;
  std::vector<Batch> batches = {same};
  expect(setting.model,
         {{Op::kLookupStart, 0}, {Op::kLookupDone}, {Op::kStage, 0}, {Op::kUpdateStart}, {Op::kUpdateDone}}, batches,
         plain_rule());
  setting.model.expect_shards(setting.group.shards);
}

TEST(DevicePipeline, HasRoomForTheIdsOfALookupAnUpdateAndSegmentsOfTheCaller) {
  DeviceSetting setting(spec_of(2));
  std::vector<std::int32_t> unique(static_cast<std::size_t>(setting.spec.num_unique), kRows);
  std::iota(unique.begin(), unique.begin() + 3, 4);
  const auto failures = run_ranks(2, [&](int r) {
    DeviceRankCalls& calls = setting.rank(r);
    const auto ids = [&](std::size_t k) { return slice(setting.batches[k].ids, setting.spec, r); };
    calls.lookup_start(ids(0));
    for (std::size_t k = 0; k < 6; ++k) {
      calls.lookup_done_later();
      calls.update_start(plain_rule());
      calls.lookup_start_beside_update(ids(k + 1));
      calls.update_done_later();
      calls.stage_segments(slice(setting.batches[k].grads, setting.spec, r).data(), {0, 1, 2, -1, 0, 2}, unique);
    }
    calls.settle();
  });
  for (const auto& failure : failures) EXPECT_FALSE(failure) << failure->message;
  EXPECT_FALSE(setting.group.pipeline->take_refusal());
}

TEST(DevicePipeline, GivesBackStagedGradientsAndTakesThem) {
  DeviceSetting setting(spec_of(2));
  std::vector<Call> program = staleness_one(3);
  program.resize(program.size() - 2);  // up to the last stage
  setting.run_ahead(program);
  const auto staged = setting.group.pipeline->staged();
  ASSERT_TRUE(staged);
  DeviceSetting other(spec_of(2));
  other.model.table = setting.model.table;
  other.model.state = setting.model.state;
  other.model.last_step = setting.model.last_step;
  other.model.write_shards(other.group.shards);
  other.group.pipeline->restore_staged(*staged);
  for (DeviceSetting* each : {&setting, &other}) {
    run_ranks(2, [&](int r) {
      each->rank(r).update_start(plain_rule());
      each->rank(r).update_done_later();
      each->rank(r).settle();
    });
  }
  expect(setting.model, {{Op::kUpdateStart}, {Op::kUpdateDone}}, setting.batches, plain_rule());
  setting.model.expect_shards(setting.group.shards);
  setting.model.expect_shards(other.group.shards);
}

}  // namespace
}  // namespace async_emb::context
