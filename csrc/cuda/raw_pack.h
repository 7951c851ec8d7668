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
