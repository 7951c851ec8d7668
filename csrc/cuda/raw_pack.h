// Packs as they lie in memory, for values on their way: halves take half the registers, two to each.
//
// Words, not halves, because a compiler that sees halves takes a pack apart as soon as it is asked for, and so waits
// for it before it asks for the next.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/dtype.h"
#include "core/pack.h"
#include "core/platform.h"

namespace async_emb::cuda {
inline namespace ASYNC_EMB_ISA {

template <int N, class Element>
struct RawPackOf {
  using Type = core::BitsPack<N / 2>;
};
template <class Half>
struct RawPackOf<1, Half> {
  using Type = std::uint16_t;
};
template <int N>
struct RawPackOf<N, float> {
  using Type = core::FloatPack<N>;
};
template <>
struct RawPackOf<1, float> {
  using Type = float;
};
template <int N, class Element>
using RawPack = typename RawPackOf<N, Element>::Type;

template <int N, class Element>
ASYNC_EMB_INLINE core::FloatPack<N> widened(RawPack<N, Element> raw) {
  if constexpr (std::is_same_v<Element, float>) {
    return raw;
  } else if constexpr (N == 1) {
    return core::float_of<1>(raw, Element{});
  } else {
    core::FloatPack<N> values;
    ASYNC_EMB_UNROLL
    for (int i = 0; i < N; ++i) {
      const std::uint32_t word = raw[i / 2];
      values[i] = core::float_of<1>(static_cast<std::uint16_t>(i % 2 == 0 ? word : word >> 16), Element{});
    }
    return values;
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
