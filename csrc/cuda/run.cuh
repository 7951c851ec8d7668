// Running a body on a GPU: one kernel for all of them, and the size of its grid.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "cuda/kernel_list.h"
#include "cuda/launches.h"
#include "cuda/share.h"
#include "cuda/warp_lanes.cuh"

namespace async_emb::cuda {

inline constexpr int kThreads = 256;  // of a block

// The job lies in constant memory, so that arrays in it can be indexed at run time without a copy.
template <class Body>
__global__ void __launch_bounds__(kThreads, Body::kResident) run_body(const __grid_constant__ Body body) {
  if constexpr (Body::kLanes == 1) {
    body(core::OneLane(), Share{0, 1});
  } else {
    constexpr int kGroups = kThreads / Body::kLanes;  // of a block
    const Share share{static_cast<std::int64_t>(blockIdx.x) * kGroups + threadIdx.x / Body::kLanes,
                      static_cast<std::int64_t>(gridDim.x) * kGroups};
    const WarpLanes<Body::kLanes> lanes;
    if constexpr (Body::kStack > 0) {
      __shared__ float stacks[Body::kStack * kThreads];
      body(lanes, share, core::BorrowedStack(stacks + threadIdx.x, kThreads));
    } else {
      body(lanes, share);
    }
  }
}

// Puts run_body<Body> on the list of kernels when the program starts.
template <class Body>
struct Listed {
  static const bool done;
};
template <class Body>
const bool Listed<Body>::done = list_kernel(reinterpret_cast<const void*>(&run_body<Body>), Body::name());

struct GpuRunner {
  struct Scratch {
    void* memory;
    std::int64_t bytes;
  };

  // `items` is what there is to do for groups, or more: no group is started for less than one.
  template <class Body>
  static void run(const Body& body, std::int64_t items, Stream stream) {
    static_cast<void>(Listed<Body>::done);
    const void* const kernel = reinterpret_cast<const void*>(&run_body<Body>);
    void* arguments[] = {const_cast<Body*>(&body)};
    if constexpr (Body::kLanes == 1) {
      launch(kernel, Body::name(), 1, 1, arguments, stream);
    } else {
      static std::atomic<std::int32_t> blocks_of_device[kMostDevices];
      const std::int64_t resident = resident_blocks(kernel, Body::name(), kThreads, blocks_of_device);
      const std::int64_t wanted = (items * Body::kLanes + kThreads - 1) / kThreads;
      launch(kernel, Body::name(), std::clamp<std::int64_t>(wanted, 1, resident), kThreads, arguments, stream);
    }
  }

  static std::int64_t sort_workspace(std::int64_t count);
  static void sort(const std::uint32_t* keys, std::uint32_t* sorted, const std::int32_t* values,
                   std::int32_t* sorted_values, std::int64_t count, int bits, Scratch scratch, Stream stream);
  // The indices below `count` that `wanted` accepts, in order, and their number.
  template <class Wanted>
  static void select(Wanted wanted, std::int64_t count, std::int32_t* selected, std::int32_t* number, Scratch scratch,
                     Stream stream);
};

}  // namespace async_emb::cuda
