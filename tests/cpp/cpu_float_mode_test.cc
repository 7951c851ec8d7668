// Kernels do not depend on the floating-point mode of the thread that calls them, and give it back as they found it.
#include "cpu/float_mode.h"

#include <gtest/gtest.h>

#include "cpu_naive.h"

namespace async_emb::cpu {
namespace {

#if defined(__x86_64__)

constexpr unsigned int kFlushAndZero = 0x8040u;  // FTZ and DAZ, as XLA sets them
constexpr unsigned int kRoundUp = 0x4000u;
constexpr unsigned int kDefault = 0x1f80u;

class CallersMode {
 public:
  explicit CallersMode(unsigned int mode) { _mm_setcsr(mode); }
  ~CallersMode() { _mm_setcsr(kDefault); }
};

TEST(ScopedFloatMode, KeepsDenormalsInsideAndRestoresOutside) {
  const CallersMode caller(kDefault | kFlushAndZero);
  volatile float small = 1e-38f;
  EXPECT_EQ(small * 0.5f, 0.0f);
  {
    const ScopedFloatMode mode;
    EXPECT_GT(small * 0.5f, 0.0f);
  }
  EXPECT_EQ(small * 0.5f, 0.0f);
  EXPECT_EQ(_mm_getcsr() & 0xffc0u, kDefault | kFlushAndZero);
}

Outcome run_in_mode(const Kernels& kernels, const Problem& p, unsigned int mode) {
  const CallersMode caller(mode);
  return run_kernels(kernels, p);
}

TEST(Kernels, GiveTheSameBitsInAnyMode) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    Problem p = random_problem(dtype, 13, 4);
    for (std::int64_t i = 0; i < 13 * 20; ++i) write(dtype, p.table, i, 1e-39f * static_cast<float>(i));
    for (std::size_t i = 0; i < p.state.size(); i += 3) p.state[i] = 3e-40f;
    for (const Kernels* kernels : all_kernels()) {
      const Outcome expected = run_naive(p);
      for (const unsigned int mode : {kDefault | kFlushAndZero, kDefault | kRoundUp}) {
        expect_same_bits(run_in_mode(*kernels, p, mode), expected, kernels->name);
      }
    }
  }
}

TEST(Kernels, TrainOnDenormals) {
  Problem p = zero_problem(DType::kFloat32, 1, 1, {0}, {1e-20f});
  p.learning_rate = 1e-39f;
  for (const Kernels* kernels : all_kernels()) {
    const Outcome out = run_in_mode(*kernels, p, kDefault | kFlushAndZero);
    EXPECT_EQ(out.statistics[0], 1e-20f * 1e-20f) << "a denormal";
    EXPECT_LT(read(p.dtype, out.table, 0), 0.0f);
  }
}

#endif

}  // namespace
}  // namespace async_emb::cpu
