// Updates through the bodies that a GPU runs that must leave something alone: all of a table, or the ids that are too
// many.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>

#include "cuda_problem.h"
#include "emulated_launches.h"

namespace async_emb::testing {
namespace {

using core::DType;

void expect_nothing_applied(const Result& got, const Problem& p, std::uint64_t skipped) {
  EXPECT_EQ(got.decided.valid, 0);
  EXPECT_TRUE(got.outcome.table == p.table);
  EXPECT_EQ(cpu::bits(got.outcome.state), cpu::bits(p.state));
  EXPECT_EQ(got.outcome.last_step, p.last_step);
  EXPECT_EQ(got.counters.applied, 0u);
  EXPECT_EQ(got.counters.skipped, skipped);
}

TEST(CudaSkipEmulation, AppliesNothingWhereTheNormIsNotFinite) {
  for (const float value : {std::numeric_limits<float>::infinity(), core::float_of(0xffc54321u), 1e30f}) {
    for (const std::size_t at : {std::size_t{0}, std::size_t{1500}}) {
      Problem p = cpu::random_problem(DType::kFloat32, 33, 600);
      p.ids.assign(p.ids.size(), 3);  // long, with blocks
      p.ids[0] = 1;
      core::store_pack(value, p.grads.data() + 4 * at);
      const Result got = run_launches(emulated_launches(), p);
      expect_nothing_applied(got, p, 1);
      expect_same_sums(got, p, {}, "not finite");
      EXPECT_EQ(got.decided.pending, 1);
      EXPECT_EQ(core::bits_of(got.decided.norm), value == value ? 0x7f800000u : core::kCanonicalNaN);
    }
  }
}

TEST(CudaSkipEmulation, AppliesNothingWhereARankIsNotPending) {
  const Problem p = cpu::random_problem(DType::kBFloat16, 16, 601);
  Layout layout;
  layout.pending = {1, 0, 1};
  const Result got = run_launches(emulated_launches(), p, layout);
  expect_nothing_applied(got, p, 1);
  EXPECT_EQ(core::bits_of(got.decided.norm), core::bits_of(core::gradient_norm(cpu::run_naive(p).total)));
  EXPECT_EQ(got.counters.unique_tokens, static_cast<std::uint64_t>(got.counts.kept));
  EXPECT_EQ(got.counters.trained_tokens, static_cast<std::uint64_t>(got.counts.trained));
}

TEST(CudaSkipEmulation, DoesNothingInASkippedRound) {
  const Problem p = cpu::random_problem(DType::kBFloat16, 16, 602);
  Layout layout;
  layout.skip = 1;
  const Result got = run_launches(emulated_launches(), p, layout);
  expect_nothing_applied(got, p, 0);
  EXPECT_EQ(got.decided.pending, 0);
  EXPECT_EQ(got.decided.norm, 0.0f);
  EXPECT_EQ(got.counters.trained_tokens, 0u);
  for (const float each : got.sums[0]) ASSERT_EQ(core::bits_of(each), 0xffffffffu) << "sums were written";
}

TEST(CudaSkipEmulation, UpdatesNothingWithoutTokensOrRows) {
  for (const std::vector<std::int32_t>& ids : {std::vector<std::int32_t>{}, std::vector<std::int32_t>(70, -1)}) {
    Problem p = cpu::random_problem(DType::kFloat32, 7, 603, ids.size());
    p.ids = ids;
    const Result got = run_launches(emulated_launches(), p);
    EXPECT_EQ(got.counts.distinct, 0);
    EXPECT_EQ(got.counts.trained, 0);
    EXPECT_EQ(got.decided.valid, 1) << "a norm of 0 is finite, as on the CPU";
    EXPECT_EQ(got.decided.norm, 0.0f);
    EXPECT_TRUE(got.outcome.table == p.table);
    EXPECT_EQ(cpu::bits(got.outcome.state), cpu::bits(p.state));
  }
}

TEST(CudaSkipEmulation, TrainsTheSmallestIdsUpToTheLimit) {
  for (const std::int64_t limit : {1, 20, 49}) {
    Problem p = cpu::random_problem(DType::kFloat32, 33, 604);
    Layout layout;
    layout.limit = limit;
    const Result got = run_launches(emulated_launches(), p, layout);
    std::vector<std::int32_t> sorted = p.ids;
    std::sort(sorted.begin(), sorted.end());
    sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
    sorted.erase(sorted.begin());  // -1
    EXPECT_EQ(got.finding.distinct, static_cast<std::int64_t>(sorted.size()));
    EXPECT_EQ(got.finding.step, 12);
    EXPECT_EQ(got.finding.position, -1);
    EXPECT_EQ(got.counts.distinct, static_cast<std::int32_t>(sorted.size()));
    EXPECT_EQ(got.counts.kept, limit);
    std::int64_t trained = 0;
    for (auto& id : p.ids) {
      if (id >= sorted[static_cast<std::size_t>(limit)]) id = -1;
      trained += id >= 0 ? 1 : 0;
    }
    EXPECT_EQ(got.counts.trained, trained);
    EXPECT_EQ(got.counters.trained_tokens, static_cast<std::uint64_t>(trained));
    expect_same(got, cpu::run_kernels(*cpu::all_kernels()[0], p), "limit " + std::to_string(limit));
  }
}

}  // namespace
}  // namespace async_emb::testing
