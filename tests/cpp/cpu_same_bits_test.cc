// Every kernel table gives the bits of the rules as they are worded, however the work is cut.
#include <gtest/gtest.h>

#include <string>

#include "cpu_naive.h"

namespace async_emb::cpu {
namespace {

constexpr std::int64_t kWidths[] = {1, 2, 3, 5, 7, 16, 33, 64, 100, 129};
constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

std::string describe(const Kernels& kernels, const Problem& p) {
  return std::string(kernels.name) + " " + core::name_of(p.dtype) + " width " + std::to_string(p.width) +
         (p.lazy ? " lazy" : "") + (p.stochastic ? " stochastic" : "") + " clip " + std::to_string(p.clip);
}

TEST(SameBits, ForEveryShapeDtypeRuleAndInstructionSet) {
  unsigned seed = 0;
  for (const DType dtype : kDTypes) {
    for (const std::int64_t width : kWidths) {
      for (const bool lazy : {false, true}) {
        for (const bool stochastic : {false, true}) {
          for (const float clip : {1.0f, 0.37f}) {
            Problem p = random_problem(dtype, width, ++seed);
            p.lazy = lazy;
            p.stochastic = stochastic;
            p.clip = clip;
            if (lazy) p.decay = p.weight_decay = 0.013f;
            const Outcome expected = run_naive(p);
            for (const Kernels* kernels : all_kernels()) {
              expect_same_bits(run_kernels(*kernels, p), expected, describe(*kernels, p));
            }
          }
        }
      }
    }
  }
}

TEST(SameBits, ForAnyNumberOfRanks) {
  for (const DType dtype : kDTypes) {
    for (const std::int64_t width : {1, 5, 33, 64, 100}) {
      for (const bool stochastic : {false, true}) {
        Problem p = random_problem(dtype, width, 77);
        p.stochastic = stochastic;
        const Outcome expected = run_naive(p);
        for (const Kernels* kernels : all_kernels()) {
          for (const int ranks : {2, 3, 4, 7, 16}) {
            expect_same_bits(run_kernels(*kernels, p, ranks), expected,
                             describe(*kernels, p) + " ranks " + std::to_string(ranks));
          }
        }
      }
    }
  }
}

TEST(SameBits, ForAnyCutOfTheRange) {
  for (const DType dtype : kDTypes) {
    Problem p = random_problem(dtype, 37, 78);
    p.stochastic = true;
    p.lazy = true;
    for (const Kernels* kernels : all_kernels()) {
      const Outcome expected = run_kernels(*kernels, p);
      for (const std::int64_t piece : {1, 3, 20}) {
        expect_same_bits(run_kernels(*kernels, p, 1, piece), expected, describe(*kernels, p));
      }
    }
  }
}

TEST(SameBits, ForManyOccurrencesOfOneId) {
  for (const std::size_t tokens : {31, 32, 33, 63, 64, 65, 1000}) {
    Problem p = random_problem(DType::kFloat32, 21, 79, tokens);
    for (auto& id : p.ids) id = 3;
    const Outcome expected = run_naive(p);
    for (const Kernels* kernels : all_kernels()) expect_same_bits(run_kernels(*kernels, p), expected, kernels->name);
  }
}

TEST(SameBits, ForAVeryWideRow) {
  Problem p = random_problem(DType::kBFloat16, 70001, 80, 9);
  p.stochastic = true;
  const Outcome expected = run_naive(p);
  for (const Kernels* kernels : all_kernels()) {
    expect_same_bits(run_kernels(*kernels, p), expected, kernels->name);
    expect_same_bits(run_kernels(*kernels, p, 6), expected, kernels->name);
  }
}

TEST(SameBits, ForDyadicSumsOfAnyLength) {
  for (const Kernels* kernels : all_kernels()) {
    EXPECT_EQ(core::bits_of(kernels->dyadic_sum(nullptr, 0)), 0u);
    for (const std::size_t count : {1, 2, 3, 7, 64, 127, 128, 129, 5000}) {
      std::mt19937 random(static_cast<unsigned>(count));
      std::vector<float> values(count);
      for (auto& value : values) value = static_cast<float>(random() % 100000) * 1e-3f;
      EXPECT_EQ(core::bits_of(kernels->dyadic_sum(values.data(), static_cast<std::int64_t>(count))),
                core::bits_of(padded_root(values)))
          << kernels->name << " " << count;
    }
  }
}

}  // namespace
}  // namespace async_emb::cpu
