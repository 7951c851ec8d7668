// Element types of tables and gradients, and the exact rules by which fp32 values become bf16 and fp16.
//
// Everything is written with integer operations and without branches, so that compilers vectorise it and every
// instruction set gives the same bits. A NaN is always stored as the canonical one of its format.
#pragma once

#include <cstdint>

#include "core/platform.h"

namespace async_emb::core {

// Outside of the instruction-set namespace: it is part of interfaces between files of different instruction sets.
enum class DType : std::int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

inline namespace ASYNC_EMB_ISA {

// Bytes of one element.
ASYNC_EMB_FN constexpr std::int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

ASYNC_EMB_FN constexpr const char* name_of(DType dtype) {
  return dtype == DType::kFloat32 ? "float32" : dtype == DType::kBFloat16 ? "bfloat16" : "float16";
}

struct BFloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

inline constexpr std::uint32_t kCanonicalNaN = 0x7fc00000u;
inline constexpr std::uint16_t kCanonicalBFloat16NaN = 0x7fc0u;
inline constexpr std::uint16_t kCanonicalFloat16NaN = 0x7e00u;
inline constexpr std::uint16_t kLargestFloat16 = 0x7bffu;  // 65504

ASYNC_EMB_INLINE std::uint32_t bits_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  return __builtin_bit_cast(std::uint32_t, value);
#endif
}

ASYNC_EMB_INLINE float float_of(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

ASYNC_EMB_INLINE float canonical(float value) { return value != value ? float_of(kCanonicalNaN) : value; }

ASYNC_EMB_INLINE float to_float(float value) { return value; }

ASYNC_EMB_INLINE float to_float(BFloat16 value) { return float_of(static_cast<std::uint32_t>(value.bits) << 16); }

ASYNC_EMB_INLINE float to_float(Float16 value) {
  const std::uint32_t magnitude = value.bits & 0x7fffu;
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  // Moving the exponent bias from 15 to 127 adds 112; all ones stay all ones, hence 224.
  const std::uint32_t bias = magnitude >= 0x7c00u ? 224u << 23 : 112u << 23;
  const std::uint32_t normal = (magnitude << 13) + bias;
  // Subnormal m is m * 2^-24: put m behind the leading one of 2^-14 and take that one away. Exact, and free of fp32
  // denormals.
  const std::uint32_t subnormal = bits_of(float_of((magnitude << 13) | (113u << 23)) - float_of(113u << 23));
  return float_of((magnitude < 0x400u ? subnormal : normal) | sign);
}

// Nearest even. Overflow of bf16 follows IEEE: it becomes infinite.
ASYNC_EMB_INLINE BFloat16 nearest_bfloat16(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return BFloat16{static_cast<std::uint16_t>(is_nan ? kCanonicalBFloat16NaN : rounded)};
}

// Nearest even. What rounds beyond 65504, infinities included, becomes 65504 and adds one to `saturated`.
ASYNC_EMB_INLINE Float16 nearest_float16(float value, std::uint32_t& saturated) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t normal = ((magnitude + 0xfffu + ((magnitude >> 13) & 1u)) >> 13) - (112u << 10);
  // The last bit of 0.5 is worth 2^-24, one step of an fp16 subnormal: the addition rounds to it, to nearest even.
  const std::uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  const std::uint32_t rounded = magnitude < (113u << 23) ? subnormal : normal;
  const bool is_nan = magnitude > 0x7f800000u;
  const bool too_large = !is_nan & (magnitude >= (113u << 23)) & (normal >= 0x7c00u);
  saturated += too_large ? 1u : 0u;
  const std::uint32_t finite = (too_large ? static_cast<std::uint32_t>(kLargestFloat16) : rounded) | sign;
  return Float16{static_cast<std::uint16_t>(is_nan ? kCanonicalFloat16NaN : finite)};
}

// Rounds away from zero with the probability that the dropped bits give; `random` is uniform over all 32 bits.
ASYNC_EMB_INLINE BFloat16 stochastic_bfloat16(float value, std::uint32_t random) {
  const std::uint32_t bits = bits_of(value);
  const bool is_finite = (bits & 0x7fffffffu) < 0x7f800000u;
  const std::uint32_t rounded = (bits + (random >> 16)) >> 16;
  return BFloat16{is_finite ? static_cast<std::uint16_t>(rounded) : nearest_bfloat16(value).bits};
}

ASYNC_EMB_INLINE Float16 stochastic_float16(float value, std::uint32_t random, std::uint32_t& saturated) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t field = magnitude >> 23;
  const std::uint32_t exponent = field == 0u ? 1u : field;
  const std::uint32_t mantissa = (magnitude & 0x7fffffu) | (field == 0u ? 0u : 0x800000u);
  // Below the smallest normal fp16 (biased exponent 113) more bits are dropped, one for each power of two. Beyond 31
  // dropped bits the probability of rounding up is that of 31: less than 2^-7 of the smallest step either way.
  const std::uint32_t below = exponent >= 113u ? 0u : 113u - exponent;
  const std::uint32_t dropped = 13u + (below > 18u ? 18u : below);
  const std::uint32_t kept = (mantissa + (random >> (32u - dropped))) >> dropped;
  // The leading one of a normal `kept` is bit 10, and adds the one that the exponent still lacks.
  const std::uint32_t rounded = kept + (exponent >= 113u ? (exponent - 113u) << 10 : 0u);
  const bool is_nan = magnitude > 0x7f800000u;
  const bool too_large = !is_nan & (rounded >= 0x7c00u);
  saturated += too_large ? 1u : 0u;
  const std::uint32_t finite = (too_large ? static_cast<std::uint32_t>(kLargestFloat16) : rounded) | sign;
  return Float16{static_cast<std::uint16_t>(is_nan ? kCanonicalFloat16NaN : finite)};
}

// The two rounding rules by element type. fp32 keeps every bit, so it has no use for `random`.
ASYNC_EMB_INLINE void store_nearest(float value, float* out, std::uint32_t&) { *out = canonical(value); }
ASYNC_EMB_INLINE void store_nearest(float value, BFloat16* out, std::uint32_t&) { *out = nearest_bfloat16(value); }
ASYNC_EMB_INLINE void store_nearest(float value, Float16* out, std::uint32_t& saturated) {
  *out = nearest_float16(value, saturated);
}
ASYNC_EMB_INLINE void store_stochastic(float value, std::uint32_t, float* out, std::uint32_t&) {
  *out = canonical(value);
}
ASYNC_EMB_INLINE void store_stochastic(float value, std::uint32_t random, BFloat16* out, std::uint32_t&) {
  *out = stochastic_bfloat16(value, random);
}
ASYNC_EMB_INLINE void store_stochastic(float value, std::uint32_t random, Float16* out, std::uint32_t& saturated) {
  *out = stochastic_float16(value, random, saturated);
}

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::core
