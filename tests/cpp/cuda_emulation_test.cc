// The bodies that a GPU runs, on emulated warps: they give the very bits of the CPU's kernels.
#include <gtest/gtest.h>

#include <string>

#include "cuda_problem.h"
#include "emulated_launches.h"

namespace async_emb::testing {
namespace {

using core::DType;

constexpr std::int64_t kWidths[] = {1, 2, 3, 5, 8, 17, 31, 32, 33, 64, 100, 128, 130, 256, 512, 515};
constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

std::string describe(const Problem& p) {
  return std::string(core::name_of(p.dtype)) + " width " + std::to_string(p.width) + (p.lazy ? " lazy" : "") +
         (p.stochastic ? " stochastic" : "") + " clip " + std::to_string(p.clip);
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
          for (const cpu::Kernels* kernels : cpu::all_kernels()) {
            expect_same(run_launches(emulated_launches(), p), cpu::run_kernels(*kernels, p),
                        describe(p) + " " + kernels->name);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace async_emb::testing
