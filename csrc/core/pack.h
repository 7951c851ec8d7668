// Packs: a few neighbouring values that one lane handles at once, in a vector register on a CPU.
//
// Code that is written for packs takes 1, 2, 4, ... values alike: with one value a pack is a plain float or uint32_t,
// which is what a GPU lane and the last columns of a row use. Arithmetic on a pack is the arithmetic on each value, so
// the size of a pack never changes a bit.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/platform.h"

namespace async_emb::core {
inline namespace ASYNC_EMB_ISA {

// Values in the largest pack; a file for another instruction set defines it together with ASYNC_EMB_ISA.
#if defined(__CUDACC__)
#define ASYNC_EMB_PACK 1
#elif !defined(ASYNC_EMB_PACK)
#define ASYNC_EMB_PACK 4
#endif
inline constexpr int kPack = ASYNC_EMB_PACK;

template <int N>
struct PackOf {
#if !defined(__CUDACC__)
  typedef float Float __attribute__((vector_size(4 * N)));
  typedef std::uint32_t Bits __attribute__((vector_size(4 * N)));
  typedef std::uint16_t Halves __attribute__((vector_size(2 * N)));
#endif
};

template <>
struct PackOf<1> {
  using Float = float;
  using Bits = std::uint32_t;
  using Halves = std::uint16_t;
};

template <int N>
using FloatPack = typename PackOf<N>::Float;
template <int N>
using BitsPack = typename PackOf<N>::Bits;
template <int N>
using HalvesPack = typename PackOf<N>::Halves;

// The same bits as the other type.
template <int N>
ASYNC_EMB_INLINE BitsPack<N> bits_of(FloatPack<N> values) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(values);
#else
  return __builtin_bit_cast(BitsPack<N>, values);
#endif
}

template <int N>
ASYNC_EMB_INLINE FloatPack<N> floats_of(BitsPack<N> bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(FloatPack<N>, bits);
#endif
}

ASYNC_EMB_INLINE std::uint32_t bits_of(float value) { return bits_of<1>(value); }
ASYNC_EMB_INLINE float float_of(std::uint32_t bits) { return floats_of<1>(bits); }

// One value in every place of a pack.
template <int N>
ASYNC_EMB_INLINE BitsPack<N> all(std::uint32_t bits) {
  return BitsPack<N>{} + bits;
}

template <int N>
ASYNC_EMB_INLINE BitsPack<N> widen(HalvesPack<N> halves) {
  if constexpr (N == 1) {
    return halves;
#if defined(__x86_64__) && ASYNC_EMB_PACK >= 8  // one instruction, where GCC takes four
  } else if constexpr (N == 8) {
    return __builtin_bit_cast(BitsPack<N>, _mm256_cvtepu16_epi32(__builtin_bit_cast(__m128i, halves)));
#endif
#if defined(__x86_64__) && ASYNC_EMB_PACK >= 16
  } else if constexpr (N == 16) {
    return __builtin_bit_cast(BitsPack<N>, _mm512_maskz_cvtepu16_epi32(0xffff, __builtin_bit_cast(__m256i, halves)));
#endif
  } else {
#if !defined(__CUDACC__)
    return __builtin_convertvector(halves, BitsPack<N>);
#endif
  }
}

template <int N>
ASYNC_EMB_INLINE HalvesPack<N> narrow(BitsPack<N> bits) {
  if constexpr (N == 1) {
    return static_cast<std::uint16_t>(bits);
  } else {
#if !defined(__CUDACC__)
    return __builtin_convertvector(bits, HalvesPack<N>);
#endif
  }
}

// Loads and stores at any address on a CPU. On a GPU a pack is one element, at an address that is a multiple of its
// size; there memcpy would move it byte by byte.
template <class Pack>
ASYNC_EMB_INLINE Pack load_pack(const void* from) {
#if defined(__CUDA_ARCH__)
  return *static_cast<const Pack*>(from);
#else
  Pack pack;
  std::memcpy(&pack, from, sizeof(Pack));
  return pack;
#endif
}

template <class Pack>
ASYNC_EMB_INLINE void store_pack(Pack pack, void* to) {
#if defined(__CUDA_ARCH__)
  *static_cast<Pack*>(to) = pack;
#else
  std::memcpy(to, &pack, sizeof(Pack));
#endif
}

// Sum of the values of a pack of counters.
template <int N>
ASYNC_EMB_INLINE std::uint32_t total_of(BitsPack<N> counters) {
  if constexpr (N == 1) {
    return counters;
  } else {
    std::uint32_t total = 0;
    for (int i = 0; i < N; ++i) total += counters[i];
    return total;
  }
}

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::core
