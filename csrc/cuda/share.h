// How the items of a job are shared among groups of lanes, and the few things in which a GPU and what stands for it in
// tests differ.
//
// A body is a function object: a job together with the shape its kernel was compiled for. It is called by every lane of
// every group with the group's share, and says in constants what it needs:
//   kLanes     lanes of a group: 1, or 4 to 32
//   kMeet      whether lanes exchange values; if not, each may run to its end alone
//   kStack     floats of scratch of each lane
//   kResident  blocks of 256 lanes that a multiprocessor must have registers for
//   name()     for messages
#pragma once

#include <cstdint>

#include "core/dyadic.h"
#include "core/lanes.h"
#include "core/platform.h"

namespace async_emb::cuda {
inline namespace ASYNC_EMB_ISA {

// Items first, first + step, ... of a group. Lanes that work alone take theirs from lane_first and lane_step.
struct Share {
  std::int64_t first;  // the group
  std::int64_t step;   // groups

  template <class Lanes>
  ASYNC_EMB_INLINE std::int64_t lane_first(Lanes lanes) const {
    return first * Lanes::kCount + lanes.index();
  }
  template <class Lanes>
  ASYNC_EMB_INLINE std::int64_t lane_step(Lanes) const {
    return step * Lanes::kCount;
  }
};

// As lanes.broadcast, for integers.
template <class Lanes>
ASYNC_EMB_INLINE std::int32_t broadcast(Lanes lanes, std::int32_t value, int lane) {
  const float bits = core::float_of(static_cast<std::uint32_t>(value));
  return static_cast<std::int32_t>(core::bits_of(lanes.broadcast(bits, lane)));
}

// Integers only: their order does not matter.
ASYNC_EMB_INLINE void add_atomically(std::uint64_t* to, std::uint64_t value) {
  static_assert(sizeof(unsigned long long) == sizeof(std::uint64_t));
#if defined(__CUDA_ARCH__)
  atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(value));
#else
  __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
#endif
}

// The smallest of positions, of which -1, the largest unsigned number, stands for none.
ASYNC_EMB_INLINE void keep_first_atomically(std::int64_t* first, std::int64_t position) {
  const auto mine = static_cast<unsigned long long>(position);
#if defined(__CUDA_ARCH__)
  atomicMin(reinterpret_cast<unsigned long long*>(first), mine);
#else
  std::int64_t seen = __atomic_load_n(first, __ATOMIC_RELAXED);
  while (mine < static_cast<unsigned long long>(seen) &&
         !__atomic_compare_exchange_n(first, &seen, position, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
#endif
}

// Memory that the host or another device writes meanwhile.
template <class Value>
ASYNC_EMB_INLINE Value read_shared(const Value* from) {
#if defined(__CUDA_ARCH__)
  return *static_cast<const volatile Value*>(from);
#else
  return __atomic_load_n(from, __ATOMIC_ACQUIRE);
#endif
}

// After everything that this lane wrote before.
template <class Value>
ASYNC_EMB_INLINE void write_last(Value value, Value* to) {
#if defined(__CUDA_ARCH__)
  __threadfence_system();
  *static_cast<volatile Value*>(to) = value;
#else
  __atomic_store_n(to, value, __ATOMIC_RELEASE);
#endif
}

ASYNC_EMB_INLINE int ones_of(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __popc(bits);
#else
  return __builtin_popcount(bits);
#endif
}

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::cuda
