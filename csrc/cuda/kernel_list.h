// What all launches share, outside of device code: errors, grids, and the list of kernels to warm up.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

#include "cuda/launches.h"

namespace async_emb::cuda {

inline constexpr int kMostDevices = 64;

// Throws std::runtime_error with the kernel's name and CUDA's message.
void require_success(cudaError_t status, const char* kernel);

// Adds a kernel to those that warm_up loads. For use before main.
bool list_kernel(const void* kernel, const char* name);

// Loads the kernels on the list, on the current device.
void load_listed_kernels();

// How many blocks of `kernel` the current device holds at once; remembered in `known`, of which 0 is not known yet.
std::int64_t resident_blocks(const void* kernel, const char* name, int threads,
                             std::atomic<std::int32_t> (&known)[kMostDevices]);

void launch(const void* kernel, const char* name, std::int64_t blocks, int threads, void** arguments, Stream stream);

}  // namespace async_emb::cuda
