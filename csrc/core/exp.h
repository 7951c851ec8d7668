// exp in fp32 from multiplies and adds only, so that every device and NumPy repeat it bit for bit.
//
// The reduction and the polynomial are those of expf in S. Moshier's Cephes library (netlib.org/cephes). Error below 1
// ulp.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/platform.h"

namespace async_emb::core {
inline namespace ASYNC_EMB_ISA {

// 2^n for -126 <= n <= 127.
ASYNC_EMB_INLINE float exact_power_of_two(std::int32_t n) {
  return float_of(static_cast<std::uint32_t>(n + 127) << 23);
}

ASYNC_EMB_FN float exp32(float x) {
  if (x != x) return float_of(kCanonicalNaN);
  if (x > 88.72283f) return float_of(0x7f800000u);
  if (x < -103.97208f) return 0.0f;
  const float scaled = x * 1.44269504f + 0.5f;
  std::int32_t n = static_cast<std::int32_t>(scaled);
  if (static_cast<float>(n) > scaled) --n;  // the cast truncates; this makes it a floor
  const float whole = static_cast<float>(n);
  const float r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  float y = p * (r * r) + r;
  y = y + 1.0f;
  // Two factors, because 2^128 and 2^-150 are no normal fp32 numbers. Only the second can round, into the denormals.
  const std::int32_t half = n >> 1;
  return (y * exact_power_of_two(half)) * exact_power_of_two(n - half);
}

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::core
