// Every kernel table converts fp16 as core words it, whether it uses instructions of the processor for that or not.
#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <vector>

#include "cpu_naive.h"

namespace async_emb::cpu {
namespace {

TEST(Float16Kernels, WidenEveryNumber) {
  constexpr int kCount = 0x10000;
  std::vector<std::uint16_t> grads(kCount);
  std::iota(grads.begin(), grads.end(), std::uint16_t{0});
  const std::int32_t offsets[] = {0, 1};
  const std::int32_t position = 0;
  for (const Kernels* kernels : all_kernels()) {
    std::vector<float> sums(kCount);
    float squares = 0;
    SegmentSum args;
    args.grad_dtype = DType::kFloat16;
    args.grads = grads.data();
    args.grad_row_stride = args.width = kCount;
    args.offsets = offsets;
    args.positions = &position;
    args.end = 1;
    args.sums = sums.data();
    args.subtree_sums = &squares;
    args.subtree_stride = 1;
    kernels->segment_sum(args);
    for (std::uint32_t h = 0; h < kCount; ++h) {
      ASSERT_EQ(core::bits_of(sums[h]), core::bits_of(core::canonical(core::float_of_float16<1>(h))))
          << kernels->name << " " << h;
    }
  }
}

TEST(Float16Kernels, RoundEveryKindOfNumber) {
  std::mt19937 random(19);
  std::vector<float> sums = {0.0f,
                             -0.0f,
                             core::float_of(0x7f800000u),
                             core::float_of(0xff800000u),
                             core::float_of(0x7f812345u),
                             core::float_of(0xffc00001u)};
  for (int i = 0; i < 100000; ++i) sums.push_back(core::float_of(static_cast<std::uint32_t>(random())));
  for (std::uint32_t h = 0; h < 0x7c00u; ++h) {  // ties between neighbours and the floats around them
    const std::uint32_t below = core::bits_of(core::float_of_float16<1>(h));
    const std::uint32_t tie = h < 0x7bffu
                                  ? core::bits_of((core::float_of(below) + core::float_of_float16<1>(h + 1)) / 2)
                                  : core::bits_of(65520.0f);
    for (const std::uint32_t bits : {below, tie - 1, tie, tie + 1}) {
      sums.push_back(core::float_of(bits));
      sums.push_back(core::float_of(bits | 0x80000000u));
    }
  }
  // With these numbers the rule is w <- 0 * 1 - 1 * G.
  RowwiseAdagrad args;
  args.table_dtype = DType::kFloat16;
  args.width = static_cast<std::int64_t>(sums.size());
  args.logical_width = 1;
  args.table_row_stride = args.width;
  args.sums = sums.data();
  args.learning_rate = 1;
  args.end = 1;
  const std::int32_t row = 0;
  const float statistic = 1;
  args.unique = &row;
  args.statistics = &statistic;
  std::uint32_t expected_saturated = 0;
  std::vector<std::uint16_t> expected;
  for (const float sum : sums) {
    expected.push_back(static_cast<std::uint16_t>(core::nearest_float16<1>(0.0f - sum, expected_saturated)));
  }
  for (const Kernels* kernels : all_kernels()) {
    std::vector<std::uint16_t> table(sums.size());
    float state = 0;
    args.table = table.data();
    args.row_state = &state;
    EXPECT_EQ(kernels->rowwise_adagrad(args), expected_saturated) << kernels->name;
    for (std::size_t i = 0; i < table.size(); ++i) {
      ASSERT_EQ(table[i], expected[i]) << kernels->name << " " << core::bits_of(sums[i]);
    }
  }
}

}  // namespace
}  // namespace async_emb::cpu
