// Core as a GPU sees it, compiled for the CPU: in an instruction-set namespace of its own, with packs that are arrays.
#define ASYNC_EMB_ISA isa_emulated
#define ASYNC_EMB_ARRAY_PACKS

#include "emulated_launches.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "cpu/float_mode.h"
#include "cuda/launch_control.h"
#include "cuda/launch_ids.h"
#include "cuda/launch_lookup.h"
#include "cuda/launch_sums.h"
#include "cuda/launch_update.h"
#include "emulated_warp.h"

namespace async_emb::testing {
namespace {

// More than one, so that bodies that forget other groups' items or take them twice are found out.
constexpr std::int64_t kMostGroups = 3;

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

constexpr cuda::Launches kEmulated = {
    .name = "emulated",
    .clean_ids = cuda::clean_ids<EmulatedRunner>,
    .ids_of_segments = cuda::ids_of_segments<EmulatedRunner>,
    .check_lookup = cuda::check_lookup<EmulatedRunner>,
    .open_round = cuda::open_round<EmulatedRunner>,
    .gather_rows = cuda::gather_rows<EmulatedRunner>,
    .deliver_rows = cuda::deliver_rows<EmulatedRunner>,
    .unique_ids = cuda::unique_ids<EmulatedRunner>,
    .take_pending = cuda::take_pending<EmulatedRunner>,
    .take_numbers = cuda::take_numbers<EmulatedRunner>,
    .segment_sum = cuda::segment_sum<EmulatedRunner>,
    .row_statistic = cuda::row_statistic<EmulatedRunner>,
    .decide = cuda::decide<EmulatedRunner>,
    .rowwise_adagrad = cuda::rowwise_adagrad<EmulatedRunner>,
    .deliver_outcome = cuda::deliver_outcome<EmulatedRunner>,
    .write_pin = cuda::write_pin<EmulatedRunner>,
    .write_positions = cuda::write_positions<EmulatedRunner>,
    .warm_up = [] {},
    .unique_ids_workspace = cuda::unique_ids_workspace<EmulatedRunner>,
    .segment_sum_workspace = cuda::segment_sum_workspace,
    .decide_workspace = cuda::decide_workspace,
};

}  // namespace

const cuda::Launches& emulated_launches() { return kEmulated; }

}  // namespace async_emb::testing
