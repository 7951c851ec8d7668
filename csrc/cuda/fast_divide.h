// Division by a number that a launch knows, without a division: a high product and a shift.
//
// T. Granlund, P. Montgomery, "Division by invariant integers using multiplication", PLDI 1994.
#pragma once

#include <cstdint>

#include "core/platform.h"

namespace async_emb::cuda {
inline namespace ASYNC_EMB_ISA {

struct FastDivide {
  std::uint32_t divisor = 1;
  std::uint32_t factor = 0;
  std::uint32_t shift = 0;
};

// For divisors in [1, 2^31).
inline FastDivide fast_divide(std::int64_t divisor) {
  FastDivide divide;
  divide.divisor = static_cast<std::uint32_t>(divisor);
  if (divisor == 1) return divide;
  int bits = 1;
  while ((std::int64_t{1} << bits) < divisor) ++bits;
  const auto wide = static_cast<std::uint64_t>(divisor);
  divide.factor = static_cast<std::uint32_t>(((std::uint64_t{1} << (31 + bits)) + wide - 1) / wide);
  divide.shift = static_cast<std::uint32_t>(bits - 1);
  return divide;
}

// number / divisor, for numbers below 2^31.
ASYNC_EMB_INLINE std::uint32_t quotient(const FastDivide& divide, std::uint32_t number) {
  if (divide.divisor == 1) return number;
#if defined(__CUDA_ARCH__)
  return __umulhi(number, divide.factor) >> divide.shift;
#else
  return static_cast<std::uint32_t>((static_cast<std::uint64_t>(number) * divide.factor) >> 32) >> divide.shift;
#endif
}

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::cuda
