// Element types of tables and gradients, and the exact rules by which fp32 values become bf16 and fp16.
//
// Everything is written on packs and without branches, so that every instruction set gives the same bits. A NaN is
// always stored as the canonical one of its format.
#pragma once

#include <cstdint>

#include "core/pack.h"
#include "core/platform.h"
#if defined(ASYNC_EMB_F16C)
#include "core/f16c.h"
#endif

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

template <int N>
ASYNC_EMB_INLINE FloatPack<N> canonical(FloatPack<N> values) {
  if constexpr (kByValue<N>) {
    ASYNC_EMB_UNROLL
    for (int i = 0; i < N; ++i) values[i] = canonical<1>(values[i]);
    return values;
  } else {
    return values == values ? values : floats_of<N>(all<N>(kCanonicalNaN));
  }
}
ASYNC_EMB_INLINE float canonical(float value) { return canonical<1>(value); }

// ---- to fp32: exact. The lower 16 bits of each place hold the number.

template <int N>
ASYNC_EMB_INLINE FloatPack<N> float_of_bfloat16(BitsPack<N> bits) {
  return floats_of<N>(bits << 16);
}

template <int N>
ASYNC_EMB_INLINE FloatPack<N> float_of_float16(BitsPack<N> bits) {
  const BitsPack<N> magnitude = bits & 0x7fffu;
  const BitsPack<N> sign = (bits & 0x8000u) << 16;
  // Moving the exponent bias from 15 to 127 adds 112; all ones stay all ones, hence 224.
  const BitsPack<N> bias = magnitude >= 0x7c00u ? all<N>(224u << 23) : all<N>(112u << 23);
  const BitsPack<N> normal = (magnitude << 13) + bias;
  // Subnormal m is m * 2^-24: put m behind the leading one of 2^-14 and take that one away. Exact, and free of fp32
  // denormals.
  const FloatPack<N> one_too_many = floats_of<N>((magnitude << 13) | (113u << 23));
  const BitsPack<N> subnormal = bits_of<N>(one_too_many - floats_of<N>(all<N>(113u << 23)));
  return floats_of<N>((magnitude < 0x400u ? subnormal : normal) | sign);
}

// ---- from fp32 to nearest even

// Overflow of bf16 follows IEEE: it becomes infinite.
template <int N>
ASYNC_EMB_INLINE BitsPack<N> nearest_bfloat16(FloatPack<N> values) {
  const BitsPack<N> bits = bits_of<N>(values);
  const BitsPack<N> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return values == values ? rounded : all<N>(kCanonicalBFloat16NaN);
}

// What lies beyond the largest fp16, infinities included, becomes 65504 and adds one to `saturated`; NaN becomes
// canonical.
template <int N>
ASYNC_EMB_INLINE BitsPack<N> finish_float16(FloatPack<N> values, BitsPack<N> magnitude, BitsPack<N>& saturated) {
  const BitsPack<N> sign = (bits_of<N>(values) >> 16) & 0x8000u;
  const BitsPack<N> is_number = values == values ? all<N>(1u) : all<N>(0u);
  const BitsPack<N> too_large = magnitude >= 0x7c00u ? is_number : all<N>(0u);
  saturated += too_large;
  const BitsPack<N> finite = (magnitude >= 0x7c00u ? all<N>(kLargestFloat16) : magnitude) | sign;
  return values == values ? finite : all<N>(kCanonicalFloat16NaN);
}

template <int N>
ASYNC_EMB_INLINE BitsPack<N> nearest_float16(FloatPack<N> values, BitsPack<N>& saturated) {
  const BitsPack<N> magnitude = bits_of<N>(values) & 0x7fffffffu;
  const BitsPack<N> normal = ((magnitude + 0xfffu + ((magnitude >> 13) & 1u)) >> 13) - (112u << 10);
  // The last bit of 0.5 is worth 2^-24, one step of an fp16 subnormal: the addition rounds to it, to nearest even.
  const BitsPack<N> subnormal = bits_of<N>(floats_of<N>(magnitude) + 0.5f) - 0x3f000000u;
  return finish_float16<N>(values, magnitude < (113u << 23) ? subnormal : normal, saturated);
}

// ---- from fp32, away from zero with the probability that the dropped bits give; `random` is uniform over all 32 bits

template <int N>
ASYNC_EMB_INLINE BitsPack<N> stochastic_bfloat16(FloatPack<N> values, BitsPack<N> random) {
  const BitsPack<N> bits = bits_of<N>(values);
  const BitsPack<N> rounded = (bits + (random >> 16)) >> 16;
  return (bits & 0x7fffffffu) < 0x7f800000u ? rounded : nearest_bfloat16<N>(values);
}

template <int N>
ASYNC_EMB_INLINE BitsPack<N> stochastic_float16(FloatPack<N> values, BitsPack<N> random, BitsPack<N>& saturated) {
  const BitsPack<N> magnitude = bits_of<N>(values) & 0x7fffffffu;
  const BitsPack<N> field = magnitude >> 23;
  const BitsPack<N> exponent = field == 0u ? all<N>(1u) : field;
  const BitsPack<N> mantissa = (magnitude & 0x7fffffu) | (field == 0u ? all<N>(0u) : all<N>(0x800000u));
  // Below the smallest normal fp16 (biased exponent 113) one more bit is dropped for each power of two. At most 31 are
  // compared with random bits; those below them are cut first, which at 24 leaves nothing of the mantissa.
  const BitsPack<N> below = exponent >= 113u ? all<N>(0u) : 113u - exponent;
  const BitsPack<N> cut = below > 42u ? all<N>(24u) : below > 18u ? below - 18u : all<N>(0u);
  const BitsPack<N> dropped = 13u + (below > 18u ? all<N>(18u) : below);
  const BitsPack<N> kept = ((mantissa >> cut) + (random >> (32u - dropped))) >> dropped;
  // The leading one of a normal `kept` is bit 10, and adds the one that the exponent still lacks.
  const BitsPack<N> biased = exponent >= 113u ? (exponent - 113u) << 10 : all<N>(0u);
  return finish_float16<N>(values, kept + biased, saturated);
}

// ---- by element type

template <int N>
ASYNC_EMB_INLINE FloatPack<N> float_of(HalvesPack<N> halves, BFloat16) {
  if constexpr (kByValue<N>) {
    FloatPack<N> values;
    ASYNC_EMB_UNROLL
    for (int i = 0; i < N; ++i) values[i] = float_of_bfloat16<1>(halves[i]);
    return values;
  } else {
    return float_of_bfloat16<N>(widen<N>(halves));
  }
}
template <int N>
ASYNC_EMB_INLINE FloatPack<N> float_of(HalvesPack<N> halves, Float16) {
#if defined(ASYNC_EMB_F16C)
  if constexpr (kHasF16c<N>) return widen_float16_f16c<N>(halves);
#endif
  if constexpr (kByValue<N>) {
    FloatPack<N> values;
    ASYNC_EMB_UNROLL
    for (int i = 0; i < N; ++i) values[i] = float_of_float16<1>(halves[i]);
    return values;
  } else {
    return float_of_float16<N>(widen<N>(halves));
  }
}

template <int N>
ASYNC_EMB_INLINE FloatPack<N> load(const float* from) {
  return load_pack<FloatPack<N>>(from);
}
template <int N, class Half>
ASYNC_EMB_INLINE FloatPack<N> load(const Half* from) {
  return float_of<N>(load_pack<HalvesPack<N>>(from), Half{});
}

template <int N>
ASYNC_EMB_INLINE void store_nearest(FloatPack<N> values, float* to, BitsPack<N>&) {
  store_pack(canonical<N>(values), to);
}
template <int N>
ASYNC_EMB_INLINE void store_nearest(FloatPack<N> values, BFloat16* to, BitsPack<N>&) {
  if constexpr (kByValue<N>) {
    HalvesPack<N> halves;
    ASYNC_EMB_UNROLL
    for (int i = 0; i < N; ++i) halves[i] = narrow<1>(nearest_bfloat16<1>(values[i]));
    store_pack(halves, to);
  } else {
    store_pack(narrow<N>(nearest_bfloat16<N>(values)), to);
  }
}
template <int N>
ASYNC_EMB_INLINE void store_nearest(FloatPack<N> values, Float16* to, BitsPack<N>& saturated) {
#if defined(ASYNC_EMB_F16C)
  if constexpr (kHasF16c<N>) return store_pack(nearest_float16_f16c<N>(values, saturated), to);
#endif
  if constexpr (kByValue<N>) {
    HalvesPack<N> halves;  // one counter for all: registers are dear where packs are arrays
    ASYNC_EMB_UNROLL
    for (int i = 0; i < N; ++i) halves[i] = narrow<1>(nearest_float16<1>(values[i], saturated[0]));
    store_pack(halves, to);
  } else {
    store_pack(narrow<N>(nearest_float16<N>(values, saturated)), to);
  }
}

// fp32 keeps every bit, so it has no use for `random`.
template <int N>
ASYNC_EMB_INLINE void store_stochastic(FloatPack<N> values, BitsPack<N>, float* to, BitsPack<N>&) {
  store_pack(canonical<N>(values), to);
}
template <int N>
ASYNC_EMB_INLINE void store_stochastic(FloatPack<N> values, BitsPack<N> random, BFloat16* to, BitsPack<N>&) {
  if constexpr (kByValue<N>) {
    HalvesPack<N> halves;
    ASYNC_EMB_UNROLL
    for (int i = 0; i < N; ++i) {
      halves[i] = narrow<1>(stochastic_bfloat16<1>(values[i], random[i]));
    }
    store_pack(halves, to);
  } else {
    store_pack(narrow<N>(stochastic_bfloat16<N>(values, random)), to);
  }
}
template <int N>
ASYNC_EMB_INLINE void store_stochastic(FloatPack<N> values, BitsPack<N> random, Float16* to, BitsPack<N>& saturated) {
  if constexpr (kByValue<N>) {
    HalvesPack<N> halves;
    ASYNC_EMB_UNROLL
    for (int i = 0; i < N; ++i) {
      halves[i] = narrow<1>(stochastic_float16<1>(values[i], random[i], saturated[0]));
    }
    store_pack(halves, to);
  } else {
    store_pack(narrow<N>(stochastic_float16<N>(values, random, saturated)), to);
  }
}

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::core
