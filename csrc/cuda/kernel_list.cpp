#include "cuda/kernel_list.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

namespace async_emb::cuda {
namespace {

struct Listed {
  const void* kernel;
  const char* name;
};

std::vector<Listed>& listed() {
  static std::vector<Listed> all;
  return all;
}

}  // namespace

void require_success(cudaError_t status, const char* kernel) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // or a later call would report this failure as its own
  throw std::runtime_error(std::string("async_emb: the CUDA kernel ") + kernel + " could not be launched: " +
                           cudaGetErrorString(status) + " (" + cudaGetErrorName(status) + ")");
}

bool list_kernel(const void* kernel, const char* name) {
  listed().push_back({kernel, name});
  return true;
}

void load_listed_kernels() {
  for (const Listed& each : listed()) {
    cudaFuncAttributes attributes;
    require_success(cudaFuncGetAttributes(&attributes, each.kernel), each.name);
  }
}

std::int64_t resident_blocks(const void* kernel, const char* name, int threads,
                             std::atomic<std::int32_t> (&known)[kMostDevices]) {
  int device = 0;
  require_success(cudaGetDevice(&device), name);
  const bool remembers = device < kMostDevices;
  if (remembers) {
    if (const std::int32_t blocks = known[device].load(std::memory_order_relaxed); blocks > 0) return blocks;
  }
  int multiprocessors = 0;
  int blocks_each = 0;
  require_success(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), name);
  require_success(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_each, kernel, threads, 0), name);
  const int blocks = std::max(multiprocessors * blocks_each, 1);
  if (remembers) known[device].store(blocks, std::memory_order_relaxed);
  return blocks;
}

void launch(const void* kernel, const char* name, std::int64_t blocks, int threads, void** arguments, Stream stream) {
  require_success(cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)),
                                   arguments, 0, static_cast<cudaStream_t>(stream)),
                  name);
}

}  // namespace async_emb::cuda
