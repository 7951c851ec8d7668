// Packs as they lie in memory, so that halves on their way take half the registers.
#pragma once

#include "core/dtype.h"
#include "core/pack.h"
#include "core/platform.h"

namespace async_emb::cuda {
inline namespace ASYNC_EMB_ISA {

template <int N, class Element>
struct RawPackOf {
  using Type = core::HalvesPack<N>;
};
template <int N>
struct RawPackOf<N, float> {
  using Type = core::FloatPack<N>;
};
template <int N, class Element>
using RawPack = typename RawPackOf<N, Element>::Type;

template <int N>
ASYNC_EMB_INLINE core::FloatPack<N> widened(core::FloatPack<N> raw, float) {
  return raw;
}
template <int N, class Half>
ASYNC_EMB_INLINE core::FloatPack<N> widened(core::HalvesPack<N> raw, Half) {
  return core::float_of<N>(raw, Half{});
}

// Halves on their way in the registers of a float pack, so that either may be on its way; and back.
template <int N>
ASYNC_EMB_INLINE core::FloatPack<N> lodged(core::HalvesPack<N> halves) {
  if constexpr (N == 1) {
    return core::float_of(static_cast<std::uint32_t>(halves));
  } else {
    core::FloatPack<N> pack{};
    ASYNC_EMB_UNROLL
    for (int i = 0; i < N / 2; ++i) {
      pack[i] = core::float_of(halves[2 * i] | static_cast<std::uint32_t>(halves[2 * i + 1]) << 16);
    }
    return pack;
  }
}

template <int N>
ASYNC_EMB_INLINE core::HalvesPack<N> dislodged(core::FloatPack<N> pack) {
  if constexpr (N == 1) {
    return static_cast<std::uint16_t>(core::bits_of(pack));
  } else {
    core::HalvesPack<N> halves;
    ASYNC_EMB_UNROLL
    for (int i = 0; i < N / 2; ++i) {
      const std::uint32_t bits = core::bits_of(pack[i]);
      halves[2 * i] = static_cast<std::uint16_t>(bits);
      halves[2 * i + 1] = static_cast<std::uint16_t>(bits >> 16);
    }
    return halves;
  }
}

template <int N>
ASYNC_EMB_INLINE core::FloatPack<N> all_of(float value) {
  if constexpr (N == 1) {
    return value;
  } else {
    core::FloatPack<N> pack;
    ASYNC_EMB_UNROLL
    for (int i = 0; i < N; ++i) pack[i] = value;
    return pack;
  }
}

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::cuda
