// fp16 packs by the F16C instructions of x86, with the rules of dtype.h for what the instructions do otherwise: they
// make infinities of what is too large, and keep the payloads of NaNs.
//
// Widening keeps the bits of every number. A NaN may come out quiet where dtype.h would leave it signalling; no such
// NaN is ever stored, because arithmetic comes in between and what it makes is stored as the canonical one.
//
// The file that asks for it (ASYNC_EMB_F16C) has included the compiler's intrinsics: core itself includes no device's.
#pragma once

#include "core/pack.h"
#include "core/platform.h"

namespace async_emb::core {
inline namespace ASYNC_EMB_ISA {

// The masked forms below spare GCC a false warning about the values that the others leave undefined.
template <int N>
inline constexpr bool kHasF16c = N == 4 || N == 8 || (N == 16 && kPack == 16);

template <int N>
ASYNC_EMB_INLINE FloatPack<N> widen_float16_f16c(HalvesPack<N> halves) {
  if constexpr (N == 4) {
    const __m128i low = _mm_cvtsi64_si128(__builtin_bit_cast(long long, halves));
    return __builtin_bit_cast(FloatPack<N>, _mm_cvtph_ps(low));
  } else if constexpr (N == 8) {
    return __builtin_bit_cast(FloatPack<N>, _mm256_cvtph_ps(__builtin_bit_cast(__m128i, halves)));
  } else {
#if ASYNC_EMB_PACK == 16
    return __builtin_bit_cast(FloatPack<N>, _mm512_maskz_cvtph_ps(0xffff, __builtin_bit_cast(__m256i, halves)));
#endif
  }
}

template <int N>
ASYNC_EMB_INLINE HalvesPack<N> nearest_float16_f16c(FloatPack<N> values, BitsPack<N>& saturated) {
  HalvesPack<N> halves;
  if constexpr (N == 4) {
    const __m128i low = _mm_cvtps_ph(__builtin_bit_cast(__m128, values), _MM_FROUND_TO_NEAREST_INT);
    halves = __builtin_bit_cast(HalvesPack<N>, static_cast<long long>(_mm_cvtsi128_si64(low)));
  } else if constexpr (N == 8) {
    const __m128i all = _mm256_cvtps_ph(__builtin_bit_cast(__m256, values), _MM_FROUND_TO_NEAREST_INT);
    halves = __builtin_bit_cast(HalvesPack<N>, all);
  } else {
#if ASYNC_EMB_PACK == 16
    const __m256i all = _mm512_maskz_cvtps_ph(0xffff, __builtin_bit_cast(__m512, values),
                                              _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    halves = __builtin_bit_cast(HalvesPack<N>, all);
#endif
  }
  const HalvesPack<N> magnitude = halves & static_cast<std::uint16_t>(0x7fff);
  const HalvesPack<N> none{};
  const HalvesPack<N> infinity = none + static_cast<std::uint16_t>(0x7c00);
  const HalvesPack<N> too_large = magnitude == infinity ? none + static_cast<std::uint16_t>(1) : none;
  saturated += widen<N>(too_large);
  // One below infinity is the largest number, with the same sign.
  return magnitude > infinity ? none + static_cast<std::uint16_t>(0x7e00) : halves - too_large;
}

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::core
