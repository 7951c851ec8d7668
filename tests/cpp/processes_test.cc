// A group over several processes gives what it gives in one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "plain_model.h"
#include "several_processes.h"

namespace async_emb::context {
namespace {

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

}  // namespace
}  // namespace async_emb::context
