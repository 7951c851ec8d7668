// Packs: a few neighbouring values that one lane handles at once, in a vector register on a CPU.
//
// Code that is written for packs takes 1, 2, 4, ... values alike: with one value a pack is a plain float or uint32_t,
// which is what the last columns of a row use. Arithmetic on a pack is the arithmetic on each value, so the size of a
// pack never changes a bit.
//
// A GPU has no vector registers, but moves 16 bytes at once: there, and in what stands for a GPU in tests, a larger
// pack is an array (ASYNC_EMB_ARRAY_PACKS), loaded and stored as a whole and otherwise handled value by value.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/platform.h"

#if defined(__CUDACC__) && !defined(ASYNC_EMB_ARRAY_PACKS)
#define ASYNC_EMB_ARRAY_PACKS
#endif

namespace async_emb::core {
inline namespace ASYNC_EMB_ISA {

// Values in the largest pack of bodies that choose one themselves; a file for another instruction set defines it
// together with ASYNC_EMB_ISA. With array packs the launch chooses, by width and alignment.
#if defined(ASYNC_EMB_ARRAY_PACKS)
#define ASYNC_EMB_PACK 1
#elif !defined(ASYNC_EMB_PACK)
#define ASYNC_EMB_PACK 4
#endif
inline constexpr int kPack = ASYNC_EMB_PACK;

#if defined(ASYNC_EMB_ARRAY_PACKS)
// Aligned as the accesses that move it: 16 bytes at a time, or all of a smaller pack.
template <class Value, int N>
struct alignas(N * sizeof(Value) < 16 ? N * sizeof(Value) : 16) ArrayPack {
  Value at[N];

  ASYNC_EMB_INLINE Value& operator[](int i) { return at[i]; }
  ASYNC_EMB_INLINE Value operator[](int i) const { return at[i]; }

  ASYNC_EMB_INLINE ArrayPack& operator+=(const ArrayPack& other) {
    ASYNC_EMB_UNROLL
    for (int i = 0; i < N; ++i) at[i] += other.at[i];
    return *this;
  }
  friend ASYNC_EMB_INLINE ArrayPack operator-(ArrayPack left, const ArrayPack& right) {
    ASYNC_EMB_UNROLL
    for (int i = 0; i < N; ++i) left.at[i] -= right.at[i];
    return left;
  }
  friend ASYNC_EMB_INLINE ArrayPack operator*(ArrayPack left, Value right) {
    ASYNC_EMB_UNROLL
    for (int i = 0; i < N; ++i) left.at[i] *= right;
    return left;
  }
};
#endif

template <int N>
struct PackOf {
#if defined(ASYNC_EMB_ARRAY_PACKS)
  using Float = ArrayPack<float, N>;
  using Bits = ArrayPack<std::uint32_t, N>;
  using Halves = ArrayPack<std::uint16_t, N>;
#else
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

// Whether a pack is handled value by value.
template <int N>
#if defined(ASYNC_EMB_ARRAY_PACKS)
inline constexpr bool kByValue = N > 1;
#else
inline constexpr bool kByValue = false;
#endif

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
#if !defined(ASYNC_EMB_ARRAY_PACKS)
    return __builtin_convertvector(halves, BitsPack<N>);
#endif
  }
}

template <int N>
ASYNC_EMB_INLINE HalvesPack<N> narrow(BitsPack<N> bits) {
  if constexpr (N == 1) {
    return static_cast<std::uint16_t>(bits);
  } else {
#if !defined(ASYNC_EMB_ARRAY_PACKS)
    return __builtin_convertvector(bits, HalvesPack<N>);
#endif
  }
}

// Loads and stores at any address on a CPU, and at a multiple of the pack's alignment where packs are arrays. A GPU
// moves 16 bytes at a time; memcpy would move them one by one there. What stands for a GPU stops at an address that a
// GPU would refuse.
template <class Pack>
ASYNC_EMB_INLINE Pack load_pack(const void* from) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Pack) > 16) {
    union {
      uint4 words[sizeof(Pack) / 16];
      Pack pack;
    } moved;
    ASYNC_EMB_UNROLL
    for (int i = 0; i < static_cast<int>(sizeof(Pack) / 16); ++i) {
      moved.words[i] = static_cast<const uint4*>(from)[i];
    }
    return moved.pack;
  } else if constexpr (sizeof(Pack) == 16) {
    return __builtin_bit_cast(Pack, *static_cast<const uint4*>(from));
  } else if constexpr (sizeof(Pack) == 8) {
    return __builtin_bit_cast(Pack, *static_cast<const uint2*>(from));
  } else {
    return *static_cast<const Pack*>(from);
  }
#else
#if defined(ASYNC_EMB_ARRAY_PACKS)
  if (reinterpret_cast<std::uintptr_t>(from) % alignof(Pack) != 0) __builtin_trap();
#endif
  Pack pack;
  std::memcpy(&pack, from, sizeof(Pack));
  return pack;
#endif
}

template <class Pack>
ASYNC_EMB_INLINE void store_pack(Pack pack, void* to) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Pack) % 16 == 0) {
    // Written out, because the compiler takes some of these apart into four stores. Only global memory is stored to.
    union {
      Pack pack;
      uint4 words[sizeof(Pack) / 16];
    } moved;
    moved.pack = pack;
    ASYNC_EMB_UNROLL
    for (int i = 0; i < static_cast<int>(sizeof(Pack) / 16); ++i) {
      const uint4 word = moved.words[i];
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                   :
                   : "l"(__cvta_generic_to_global(static_cast<uint4*>(to) + i)), "r"(word.x), "r"(word.y), "r"(word.z),
                     "r"(word.w)
                   : "memory");
    }
  } else if constexpr (sizeof(Pack) == 8) {
    *static_cast<uint2*>(to) = __builtin_bit_cast(uint2, pack);
  } else {
    *static_cast<Pack*>(to) = pack;
  }
#else
#if defined(ASYNC_EMB_ARRAY_PACKS)
  if (reinterpret_cast<std::uintptr_t>(to) % alignof(Pack) != 0) __builtin_trap();
#endif
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
