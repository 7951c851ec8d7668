// What an update does to a table, in numbers that can be worked out by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cpu_naive.h"

namespace async_emb::cpu {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

class Update : public ::testing::TestWithParam<const Kernels*> {
 protected:
  Outcome run(const Problem& p) { return run_kernels(*GetParam(), p); }
};

TEST_P(Update, SumsDuplicatesBeforeTheRule) {
  const Problem p = zero_problem(DType::kFloat32, 3, 2, {1, 1}, {1, 1, 1, 1});
  const Outcome out = run(p);
  EXPECT_EQ(read(p.dtype, out.table, 2), -1.0f);
  EXPECT_EQ(read(p.dtype, out.table, 3), -1.0f);
  EXPECT_EQ(out.state, (std::vector<float>{0, 4, 0}));
  for (const int other : {0, 1, 4, 5}) EXPECT_EQ(core::bits_of(read(p.dtype, out.table, other)), 0u);
}

TEST_P(Update, SumsAThousandBFloat16OnesToAThousand) {
  const Problem p =
      zero_problem(DType::kBFloat16, 1, 1, std::vector<std::int32_t>(1000, 0), std::vector<float>(1000, 1));
  EXPECT_EQ(run(p).statistics, (std::vector<float>{1e6f}));
}

TEST_P(Update, AddsEpsOutsideOfTheRoot) {
  Problem p = zero_problem(DType::kFloat32, 1, 1, {0}, {2});
  p.eps = 1;
  const Outcome out = run(p);
  EXPECT_EQ(out.state[0], 4.0f);
  EXPECT_FLOAT_EQ(read(p.dtype, out.table, 0), -2.0f / 3.0f);
}

TEST_P(Update, DecaysWeightsApartFromTheGradient) {
  Problem p = zero_problem(DType::kFloat32, 1, 1, {0}, {2});
  write(p.dtype, p.table, 0, 2.0f);
  p.weight_decay = 0.5f;
  EXPECT_EQ(read(p.dtype, run(p).table, 0), 0.0f);
}

TEST_P(Update, LeavesRowsWithAZeroStatisticAlone) {
  // Row 0 gets zeros, row 1 gets gradients that cancel, row 2 one whose square is zero in fp32. Row 3 is not in the
  // batch.
  Problem p = zero_problem(DType::kFloat32, 4, 2, {0, 1, 1, 2}, {0, -0.0f, 3, -1, -3, 1, 1e-30f, 0});
  for (std::int64_t i = 0; i < 8; ++i)
    core::store_pack(0x7f812345u + static_cast<std::uint32_t>(i), p.table.data() + 4 * i);
  p.state = {5, kNaN, -0.0f, 7};
  p.lazy = true;
  p.step = 9;
  p.decay = 1;
  const Outcome out = run(p);
  EXPECT_EQ(out.table, p.table) << "signalling NaN payloads included";
  EXPECT_EQ(bits(out.state), bits(p.state));
  EXPECT_EQ(out.last_step, p.last_step);
}

TEST_P(Update, LeavesARowAloneThatClippingReducesToZero) {
  Problem p = zero_problem(DType::kFloat32, 1, 1, {0}, {2});
  p.clip = 0;
  const Outcome out = run(p);
  EXPECT_EQ(out.table, p.table);
  EXPECT_EQ(out.state, p.state);
}

TEST_P(Update, TakesNoStepWhereTheDenominatorIsZero) {
  // The mean of squares is below the smallest denormal, so the state stays 0 though the row is touched.
  Problem p = zero_problem(DType::kFloat32, 1, 4, {0}, {3e-23f, 0, 0, 0});
  write(p.dtype, p.table, 0, 2.0f);
  p.weight_decay = 0.5f;
  const Outcome out = run(p);
  EXPECT_EQ(out.statistics[0], std::numeric_limits<float>::denorm_min());
  EXPECT_EQ(out.state[0], 0.0f);
  EXPECT_EQ(read(p.dtype, out.table, 0), 1.0f) << "weight decay still applies";
}

TEST_P(Update, StoresCanonicalNaNs) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    Problem p = zero_problem(dtype, 2, 1, {0, 1}, {1, 1});
    p.state[0] = core::float_of(0xffc12345u);
    if (dtype == DType::kFloat32) core::store_pack(0xff812345u, p.table.data() + 4);
    if (dtype != DType::kFloat32) core::store_pack(std::uint16_t{0xffffu}, p.table.data() + 2);
    const Outcome out = run(p);
    EXPECT_EQ(core::bits_of(out.state[0]), 0x7fc00000u);
    const std::uint32_t expected = dtype == DType::kFloat32    ? 0x7fc00000u
                                   : dtype == DType::kBFloat16 ? 0x7fc0u
                                                               : 0x7e00u;
    for (std::int64_t i = 0; i < 2; ++i) {
      const unsigned char* const at = out.table.data() + i * core::size_of(dtype);
      const std::uint32_t stored =
          dtype == DType::kFloat32 ? core::load_pack<std::uint32_t>(at) : core::load_pack<std::uint16_t>(at);
      EXPECT_EQ(stored, expected) << core::name_of(dtype);
    }
  }
}

TEST_P(Update, ANaNGradientShowsInTheTotal) {
  Problem p = zero_problem(DType::kFloat32, 3, 2, {0, 1, 2}, {1, 1, core::float_of(0xffc54321u), 1, 1, 1});
  EXPECT_EQ(core::bits_of(run(p).total), 0x7fc00000u);
  p = zero_problem(DType::kFloat32, 3, 2, {0, 1, 2}, {1, 1, std::numeric_limits<float>::infinity(), 1, 1, 1});
  EXPECT_EQ(run(p).total, std::numeric_limits<float>::infinity());
}

TEST_P(Update, SaturatesFloat16AndCounts) {
  for (const bool stochastic : {false, true}) {
    Problem p = zero_problem(DType::kFloat16, 2, 19, {1}, std::vector<float>(19, -4.0f));
    p.learning_rate = 1e6f;
    p.stochastic = stochastic;
    const Outcome out = run(p);
    EXPECT_EQ(out.saturated, 19);
    for (std::int64_t i = 19; i < 38; ++i) EXPECT_EQ(read(p.dtype, out.table, i), 65504.0f);
  }
}

TEST_P(Update, LazyDecayCountsTheStepsSinceTheLast) {
  Problem p = zero_problem(DType::kFloat32, 3, 1, {0, 1, 2}, {1, 1, 1});
  p.state = {1, 1, 1};
  p.last_step = {6, 10, 50};  // 4 steps ago, now, and in the future
  p.lazy = true;
  p.step = 10;
  p.decay = 0.25f;
  p.weight_decay = 0;
  const Outcome out = run(p);
  EXPECT_FLOAT_EQ(out.state[0], std::exp(-1.0f) + 1.0f);
  EXPECT_EQ(out.state[1], 2.0f);
  EXPECT_EQ(out.state[2], 2.0f);
  EXPECT_EQ(out.last_step, (std::vector<std::int32_t>{10, 10, 10}));
}

TEST_P(Update, LazyDecayOverTheLongestTimeDoesNotWrap) {
  Problem p = zero_problem(DType::kFloat32, 1, 1, {0}, {1});
  p.state = {1};
  p.last_step = {-2147483647 - 1};
  p.lazy = true;
  p.step = 2147483647;
  p.decay = 1e-9f;
  p.weight_decay = 0;
  EXPECT_FLOAT_EQ(run(p).state[0], std::exp(-2.147483647f) + 1.0f);
}

TEST_P(Update, OfAnEmptyBatchDoesNothing) {
  Problem p = zero_problem(DType::kFloat32, 2, 3, {}, {});
  Outcome out = run(p);
  EXPECT_EQ(out.table, p.table);
  EXPECT_EQ(core::bits_of(out.total), 0u);
  p = zero_problem(DType::kFloat32, 2, 3, {-1, -1}, {1, 1, 1, 1, 1, 1});
  out = run(p);
  EXPECT_EQ(out.table, p.table);
  EXPECT_EQ(core::bits_of(out.total), 0u);
}

TEST_P(Update, OfARankThatHoldsOnlyPaddingStillUpdatesTheState) {
  const Problem p = zero_problem(DType::kFloat32, 3, 2, {1, 1}, {1, 1, 1, 1});
  const Outcome out = run_kernels(*GetParam(), p, 4);  // run_kernels checks that the states of all ranks agree
  EXPECT_EQ(out.state, (std::vector<float>{0, 4, 0}));
}

TEST_P(Update, OfColumnsWithoutWidthTouchesNothing) {
  const Problem p = zero_problem(DType::kFloat32, 3, 0, {1, 1}, {});
  const Outcome out = run(p);
  EXPECT_EQ(bits(out.statistics), (std::vector<std::uint32_t>{0}));
  EXPECT_EQ(out.state, p.state);
}

INSTANTIATE_TEST_SUITE_P(AllKernels, Update, ::testing::ValuesIn(all_kernels()),
                         [](const auto& info) { return std::string(info.param->name); });

}  // namespace
}  // namespace async_emb::cpu
