// A kernel's body handles one row with a group of lanes that work in step: one lane on a CPU, a warp on a GPU.
//
// Bodies are templates over a type with the members of OneLane. Lane k of n takes elements k, k + n, k + 2n, ...; with
// one lane that is a plain loop, which the compiler vectorises. So what is tested on a CPU is the indexing and
// arithmetic of the GPU too.
#pragma once

#include <cstdint>

#include "core/platform.h"

namespace async_emb::core {
inline namespace ASYNC_EMB_ISA {

struct OneLane {
  static constexpr int kCount = 1;

  ASYNC_EMB_INLINE int index() const { return 0; }

  // The value that lane `index() ^ mask` passes to this same call.
  ASYNC_EMB_INLINE float exchange(float value, int) const { return value; }

  // The value that lane `lane` passes to this same call.
  ASYNC_EMB_INLINE float broadcast(float value, int) const { return value; }

  // Bit k: what lane k passes to this same call. For 32 lanes or fewer.
  ASYNC_EMB_INLINE std::uint32_t ballot(bool value) const { return value ? 1u : 0u; }

  // Sum over lanes, in every lane.
  ASYNC_EMB_INLINE std::uint32_t sum(std::uint32_t value) const { return value; }

  // What any lane wrote before is visible to every lane after.
  ASYNC_EMB_INLINE void synchronize() const {}
};

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::core
