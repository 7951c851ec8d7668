// Runs bodies on emulated warps, as GpuRunner runs them on a GPU.
//
// For the emulated_*.cc files alone, which compile core as a GPU sees it: they define ASYNC_EMB_ISA and
// ASYNC_EMB_ARRAY_PACKS before they include anything.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/lanes.h"
#include "cpu/float_mode.h"
#include "cuda/launches.h"
#include "cuda/share.h"
#include "emulated_warp.h"

#if !defined(ASYNC_EMB_ARRAY_PACKS)
#error "define ASYNC_EMB_ISA as isa_emulated, and ASYNC_EMB_ARRAY_PACKS, before including anything"
#endif

namespace async_emb::testing {

// More than one, so that bodies that forget other groups' items or take them twice are found out.
inline constexpr std::int64_t kMostGroups = 3;

// Not inlined, or the compiler could move arithmetic to where another floating-point mode is set.
template <class Body>
__attribute__((noinline)) void run_groups(const Body& body, std::int64_t groups) {
  for (std::int64_t group = 0; group < groups; ++group) {
    const cuda::Share share{group, groups};
    if constexpr (Body::kLanes == 1) {
      body(core::OneLane(), share);
    } else if constexpr (Body::kMeet) {
      Team& team = Team::of_this_thread();
      team.run(Body::kLanes, [&](int lane) { body(EmulatedLanes<Body::kLanes>{&team, lane}, share); });
    } else {
      for (int lane = 0; lane < Body::kLanes; ++lane) {
        const LonelyLanes<Body::kLanes> lanes{lane};
        if constexpr (Body::kStack > 0) {
          float stack[Body::kStack * 3];
          body(lanes, share, core::BorrowedStack(stack, 3));
        } else {
          body(lanes, share);
        }
      }
    }
  }
}

struct EmulatedRunner {
  struct Scratch {
    void* memory;
    std::int64_t bytes;
  };

  template <class Body>
  static void run(const Body& body, std::int64_t items, cuda::Stream) {
    const cpu::ScopedFloatMode mode;
    run_groups(body, Body::kLanes == 1 ? 1 : std::min(std::max<std::int64_t>(items, 1), kMostGroups));
  }

  static std::int64_t sort_workspace(std::int64_t count) { return count * 4; }

  // By the lower `bits` bits of the keys, as a radix sort does.
  static void sort(const std::uint32_t* keys, std::uint32_t* sorted, const std::int32_t* values,
                   std::int32_t* sorted_values, std::int64_t count, int bits, Scratch scratch, cuda::Stream) {
    auto* const order = static_cast<std::int32_t*>(scratch.memory);
    for (std::int64_t i = 0; i < count; ++i) order[i] = static_cast<std::int32_t>(i);
    const std::uint32_t digits = bits == 32 ? ~0u : (1u << bits) - 1;
    std::stable_sort(order, order + count,
                     [&](std::int32_t a, std::int32_t b) { return (keys[a] & digits) < (keys[b] & digits); });
    for (std::int64_t i = 0; i < count; ++i) {
      sorted[i] = keys[order[i]];
      sorted_values[i] = values[order[i]];
    }
  }

  // The indices below `count` that `wanted` accepts, in order, and their number.
  template <class Wanted>
  static void select(Wanted wanted, std::int64_t count, std::int32_t* selected, std::int32_t* number, Scratch,
                     cuda::Stream) {
    *number = 0;
    for (std::int32_t i = 0; i < count; ++i) {
      if (wanted(i)) selected[(*number)++] = i;
    }
  }
};

}  // namespace async_emb::testing
