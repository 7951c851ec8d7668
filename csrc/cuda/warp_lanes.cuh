// The lanes type of core/lanes.h on a GPU: a warp, or an aligned part of one, so that several narrow rows share a warp.
#pragma once

#include <cstdint>

#include "core/platform.h"

namespace async_emb::cuda {

// Functions are declared for the host too, because bodies are; there they are never called.
template <int kLanes>
struct WarpLanes {
  static constexpr int kCount = kLanes;
  static_assert(kLanes >= 2 && 32 % kLanes == 0);

  ASYNC_EMB_INLINE int index() const {
#if defined(__CUDA_ARCH__)
    return static_cast<int>(threadIdx.x % kLanes);
#else
    return 0;
#endif
  }

  ASYNC_EMB_INLINE float exchange([[maybe_unused]] float value, [[maybe_unused]] int mask) const {
#if defined(__CUDA_ARCH__)
    return __shfl_xor_sync(members(), value, mask, kLanes);
#else
    return value;
#endif
  }

  ASYNC_EMB_INLINE float broadcast([[maybe_unused]] float value, [[maybe_unused]] int lane) const {
#if defined(__CUDA_ARCH__)
    return __shfl_sync(members(), value, lane, kLanes);
#else
    return value;
#endif
  }

  ASYNC_EMB_INLINE std::uint32_t ballot([[maybe_unused]] bool value) const {
#if defined(__CUDA_ARCH__)
    return __ballot_sync(members(), value) >> first();
#else
    return 0;
#endif
  }

  ASYNC_EMB_INLINE std::uint32_t sum(std::uint32_t value) const {
#if defined(__CUDA_ARCH__)
    if constexpr (kLanes == 32) {
      value = __reduce_add_sync(members(), value);
    } else {
      ASYNC_EMB_UNROLL
      for (int mask = 1; mask < kLanes; mask *= 2) value += __shfl_xor_sync(members(), value, mask, kLanes);
    }
#endif
    return value;
  }

  ASYNC_EMB_INLINE void synchronize() const {
#if defined(__CUDA_ARCH__)
    __syncwarp(members());
#endif
  }

 private:
#if defined(__CUDA_ARCH__)
  // Of this group's lanes in the warp: the first one's index.
  __device__ __forceinline__ unsigned first() const { return threadIdx.x % 32 / kLanes * kLanes; }
  __device__ __forceinline__ unsigned members() const {
    return kLanes == 32 ? ~0u : ((1u << (kLanes % 32)) - 1) << first();
  }
#endif
};

}  // namespace async_emb::cuda
