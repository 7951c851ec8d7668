// The bodies that a GPU runs, on emulated warps: updates have the very bits that the CPU's kernels give.
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "cuda_problem.h"
#include "emulated_launches.h"

namespace async_emb::testing {
namespace {

using core::DType;

constexpr std::int64_t kWidths[] = {1, 2, 3, 5, 8, 17, 31, 32, 33, 64, 100, 128, 130, 256, 512, 515};
constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

// Against every kernel table of the CPU, which have one outcome; with all sums written, and without those of single
// occurrences.
void expect_like_the_cpu(const Problem& p, Layout layout = {}) {
  const Result got = run_launches(emulated_launches(), p, layout);
  const std::string what = describe(p, layout);
  for (const cpu::Kernels* kernels : cpu::all_kernels()) {
    expect_same(got, cpu::run_kernels(*kernels, p), what + " " + kernels->name);
  }
  expect_same_sums(got, p, layout, what);
  EXPECT_EQ(got.decided.valid, 1) << what << ": nothing was applied, so nothing was compared";
  EXPECT_EQ(got.counters.applied, 1u) << what;
  EXPECT_EQ(got.finding.step, 0) << what;

  layout.leaves_singles = true;
  const Result without = run_launches(emulated_launches(), p, layout);
  expect_same(without, got.outcome, got.decided.norm, what + " without singles");
  EXPECT_EQ(cpu::bits(without.subtree_sums), cpu::bits(got.subtree_sums)) << what;
}

TEST(CudaEmulation, WritesNoSumOfASingleOccurrence) {
  for (const std::int64_t width : {3, 64, 100, 256}) {
    Problem p = cpu::random_problem(DType::kFloat32, width, 99, 4);
    p.ids = {5, 2, 5, 9};
    Layout layout;
    layout.leaves_singles = true;
    const Result got = run_launches(emulated_launches(), p, layout);
    for (std::int64_t i = 0; i < 3 * width; ++i) {
      const bool is_single = i / width != 1;
      EXPECT_EQ(core::bits_of(got.sums[0][static_cast<std::size_t>(i)]) == 0xffffffffu, is_single) << i;
    }
  }
}

TEST(CudaEmulation, RefusesToReadSingleGradientsOfAnotherDtype) {
  cuda::SegmentSum sums;
  sums.grad_dtype = DType::kBFloat16;
  sums.leaves_singles = true;
  cuda::RowwiseAdagrad update;
  update.sum_job = &sums;
  update.max_segments = 1;
  EXPECT_THROW(emulated_launches().rowwise_adagrad(update, nullptr), std::runtime_error);
}

// The draws of stochastic rounding belong to columns of the whole row, wherever a shard begins.
TEST(CudaEmulation, RoundsAShardByItsPlaceInTheRow) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const std::int64_t begin : {0, 1, 2, 4, 6, 8, 20}) {
      Problem p = cpu::random_problem(dtype, 16, 77, 1);
      const std::int32_t row = 3;
      const std::vector<float> sums(16, 0.37f), statistics = {2.0f};
      const cuda::BatchCounts counts{1, 1, 1};
      const cuda::RuleNumbers numbers{.learning_rate = 0.1f, .eps = 1e-8f, .step = 4, .seed = 5, .rounding_step = 6};
      const cuda::Outcome outcome{1, 1, 1, 1};
      cuda::Counters counters;
      Buffer table = buffer_of(p.table), aligned_sums = buffer_of(sums);
      cuda::RowwiseAdagrad job;
      job.table_dtype = dtype;
      job.table = table.at();
      job.table_row_stride = job.width = 16;
      job.column_begin = begin;
      job.logical_width = 64;
      job.row_state = p.state.data();
      job.unique = &row;
      job.sums = aligned_sums.as<float>();
      job.statistics = statistics.data();
      job.counts = &counts;
      job.max_segments = 1;
      job.numbers = &numbers;
      job.outcome = &outcome;
      job.stochastic_rounding = true;
      job.counters = &counters;
      std::vector<float> state = p.state;
      emulated_launches().rowwise_adagrad(job, nullptr);

      cpu::RowwiseAdagrad expected;
      expected.table_dtype = dtype;
      expected.table = p.table.data();
      expected.table_row_stride = expected.width = 16;
      expected.column_begin = begin;
      expected.logical_width = 64;
      expected.row_state = state.data();
      expected.unique = &row;
      expected.sums = sums.data();
      expected.statistics = statistics.data();
      expected.end = 1;
      expected.learning_rate = 0.1f;
      expected.eps = 1e-8f;
      expected.stochastic_rounding = true;
      expected.seed = 5;
      expected.rounding_step = 6;
      cpu::all_kernels()[0]->rowwise_adagrad(expected);
      EXPECT_EQ(0, std::memcmp(table.at(), p.table.data(), p.table.size())) << core::name_of(dtype) << " " << begin;
    }
  }
}

TEST(CudaEmulation, UpdatesLikeTheCpuForEveryWidthDtypeAndRule) {
  unsigned seed = 100;
  for (const DType dtype : kDTypes) {
    for (const std::int64_t width : kWidths) {
      for (const bool lazy : {false, true}) {
        for (const bool stochastic : {false, true}) {
          Problem p = cpu::random_problem(dtype, width, ++seed);
          p.lazy = lazy;
          p.stochastic = stochastic;
          if (lazy) p.decay = p.weight_decay = 0.013f;
          expect_like_the_cpu(p);
        }
      }
    }
  }
}

TEST(CudaEmulation, UpdatesLikeTheCpuForAnyNumberOfRanksAndBlocks) {
  for (const DType dtype : kDTypes) {
    for (const std::int64_t width : {1, 5, 33, 64, 100, 256}) {
      for (const int ranks : {2, 3, 4, 7}) {
        Problem p = cpu::random_problem(dtype, width, 300);
        p.stochastic = true;
        Layout layout;
        layout.ranks = ranks;
        layout.blocks = ranks;
        expect_like_the_cpu(p, layout);
      }
    }
  }
}

TEST(CudaEmulation, UpdatesLikeTheCpuAtAnyAddress) {
  for (const DType dtype : kDTypes) {
    for (const std::int64_t width : {8, 24, 64, 130}) {
      for (const std::int64_t shift : {2, 4, 8}) {
        if (shift % core::size_of(dtype) != 0) continue;
        Problem p = cpu::random_problem(dtype, width, 301);
        p.stochastic = true;
        Layout layout;
        layout.shift = shift;
        layout.sums_shift = 4;
        expect_like_the_cpu(p, layout);
        layout.sums_shift = 0;
        expect_like_the_cpu(p, layout);
      }
    }
  }
}

TEST(CudaEmulation, UpdatesLikeTheCpuForVeryWideRows) {
  for (const DType dtype : kDTypes) {
    for (const int ranks : {1, 3}) {
      Problem p = cpu::random_problem(dtype, dtype == DType::kBFloat16 ? 40001 : 5003, 302, 7);
      p.stochastic = true;
      Layout layout;
      layout.ranks = ranks;
      expect_like_the_cpu(p, layout);
    }
  }
}

// Segments around the size of a block, next to each other and next to very long ones.
std::vector<std::int32_t> ids_of_sizes(const std::vector<int>& sizes, unsigned seed) {
  std::vector<std::int32_t> ids;
  for (std::size_t u = 0; u < sizes.size(); ++u) {
    ids.insert(ids.end(), static_cast<std::size_t>(sizes[u]), static_cast<std::int32_t>(2 * u));
  }
  std::mt19937 random(seed);
  std::shuffle(ids.begin(), ids.end(), random);
  return ids;
}

TEST(CudaEmulation, SumsLongSegmentsInTheSameOrder) {
  const std::vector<std::vector<int>> cases = {{32 * 41 + 7},
                                               {33, 33, 33, 33},
                                               {1, 32, 33, 31, 64, 65, 63, 1, 97, 5},
                                               {3, 1500, 1, 40, 32 * 40},
                                               {31, 33, 1, 34, 31, 1, 35, 96, 128, 127}};
  unsigned seed = 400;
  for (const std::vector<int>& sizes : cases) {
    for (const DType dtype : kDTypes) {
      for (const std::int64_t width : {1, 3, 33, 64, 100, 256}) {
        const std::vector<std::int32_t> ids = ids_of_sizes(sizes, ++seed);
        Problem p = cpu::random_problem(dtype, width, seed, ids.size());
        p.ids = ids;
        expect_like_the_cpu(p);
      }
    }
  }
}

TEST(CudaEmulation, KeepsTheSignOfASumOfNegativeZeros) {
  for (const int occurrences : {1, 2, 40}) {
    const auto count = static_cast<std::size_t>(occurrences);
    std::vector<float> grads(count * 5, -0.0f);
    for (std::size_t i = 4; i < grads.size(); i += 5) grads[i] = 1;  // so that the row counts
    const Problem p = cpu::zero_problem(DType::kFloat32, 1, 5, std::vector<std::int32_t>(count, 0), grads);
    const Result got = run_launches(emulated_launches(), p);
    EXPECT_EQ(core::bits_of(got.sums[0][0]), 0x80000000u) << occurrences;
    expect_same(got, cpu::run_naive(p), "negative zeros");
  }
}

TEST(CudaEmulation, SumsManyStatisticsInTheSameOrder) {
  for (const std::int64_t count : {0, 1, 1023, 1024, 1025, 5000, 1024 * 1024 + 3}) {
    std::mt19937 random(static_cast<unsigned>(count));
    std::vector<float> statistics(static_cast<std::size_t>(count));
    for (auto& each : statistics) each = static_cast<float>(random() % 100000) * 1e-3f;
    const cuda::Launches& launches = emulated_launches();
    const std::int64_t most = count + 2000;  // memory for more than there is
    statistics.resize(static_cast<std::size_t>(most), std::numeric_limits<float>::quiet_NaN());
    Buffer workspace(launches.decide_workspace(most));
    const cuda::BatchCounts counts{static_cast<std::int32_t>(count), static_cast<std::int32_t>(count), 0};
    const std::int32_t pending = 1;
    const std::int32_t skip = 0;
    cuda::Outcome outcome;
    cuda::Decide job;
    job.statistics = statistics.data();
    job.counts = &counts;
    job.max_segments = most;
    job.workspace = workspace.at();
    job.workspace_bytes = launches.decide_workspace(most);
    job.pending[0] = &pending;
    job.num_ranks = 1;
    const cuda::RuleNumbers numbers;
    job.numbers = &numbers;
    job.skip = &skip;
    job.outcome = &outcome;
    launches.decide(job, nullptr);
    EXPECT_EQ(core::bits_of(outcome.norm),
              core::bits_of(core::gradient_norm(cpu::all_kernels()[0]->dyadic_sum(statistics.data(), count))))
        << count;
    EXPECT_EQ(outcome.valid, 1);
  }
}

TEST(CudaEmulation, ClipsLikeTheCpu) {
  for (const DType dtype : kDTypes) {
    for (const float max_grad_norm : {0.5f, 0.0f, 1e30f}) {
      Problem p = cpu::random_problem(dtype, 40, 500);
      const Result got = run_launches(emulated_launches(), p, {}, &max_grad_norm);
      p.clip = core::clip_factor(max_grad_norm, got.decided.norm);
      EXPECT_EQ(got.decided.clip, p.clip);
      EXPECT_EQ(p.clip < 1, max_grad_norm < 1);
      expect_same(got, cpu::run_kernels(*cpu::all_kernels()[0], p), describe(p));
    }
  }
}

TEST(CudaEmulation, SaturatesFloat16AndCounts) {
  for (const bool stochastic : {false, true}) {
    for (const std::int64_t width : {1, 19, 64}) {
      Problem p = cpu::zero_problem(DType::kFloat16, 3, width, {1, 2},
                                    std::vector<float>(static_cast<std::size_t>(2 * width), -4.0f));
      p.learning_rate = 1e6f;
      p.stochastic = stochastic;
      const Result got = run_launches(emulated_launches(), p);
      EXPECT_EQ(got.counters.saturated, static_cast<std::uint64_t>(2 * width));
      expect_same(got, cpu::run_naive(p), describe(p));
    }
  }
}

TEST(CudaEmulation, StoresCanonicalNaNsAndLeavesUntouchedRowsAlone) {
  for (const DType dtype : kDTypes) {
    Problem p = cpu::zero_problem(dtype, 4, 2, {0, 1, 2}, {1, 1, 1, 0, 0, 0});
    for (std::size_t i = 0; i < p.table.size(); ++i) p.table[i] = i % 2 == 0 ? 0x45 : 0x7f;  // NaNs with payloads
    p.state = {std::numeric_limits<float>::quiet_NaN(), 1, core::float_of(0xffc12345u), 7};
    const Result got = run_launches(emulated_launches(), p);
    expect_same(got, cpu::run_naive(p), describe(p));
    EXPECT_EQ(core::bits_of(got.outcome.state[2]), 0xffc12345u);
  }
}

}  // namespace
}  // namespace async_emb::testing
