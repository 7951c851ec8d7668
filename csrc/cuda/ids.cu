// The jobs on ids on NVIDIA GPUs: cleaning, comparing, and the sort that finds distinct ones.
#include <thrust/iterator/counting_iterator.h>

#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_select.cuh>

#include "cuda/launch_functions.h"
#include "cuda/launch_ids.h"
#include "cuda/run.cuh"

namespace async_emb::cuda {
namespace {

// CUB asks for its scratch by being called without any.
cudaError_t sort_with(void* scratch, std::size_t& bytes, const std::uint32_t* keys, std::uint32_t* sorted,
                      const std::int32_t* values, std::int32_t* sorted_values, std::int32_t count, int bits,
                      cudaStream_t stream) {
  return cub::DeviceRadixSort::SortPairs(scratch, bytes, keys, sorted, values, sorted_values, count, 0, bits, stream);
}

cudaError_t select_with(void* scratch, std::size_t& bytes, StartsSegment wanted, std::int32_t count,
                        std::int32_t* selected, std::int32_t* number, cudaStream_t stream) {
  return cub::DeviceSelect::If(scratch, bytes, thrust::counting_iterator<std::int32_t>(0), selected, number, count,
                               wanted, stream);
}

}  // namespace

std::int64_t GpuRunner::sort_workspace(std::int64_t count) {
  std::size_t for_sort = 0;
  std::size_t for_select = 0;
  const auto tokens = static_cast<std::int32_t>(count);
  require_success(sort_with(nullptr, for_sort, nullptr, nullptr, nullptr, nullptr, tokens, 32, nullptr), "unique_ids");
  require_success(select_with(nullptr, for_select, StartsSegment{}, tokens, nullptr, nullptr, nullptr), "unique_ids");
  return static_cast<std::int64_t>(std::max(for_sort, for_select));
}

void GpuRunner::sort(const std::uint32_t* keys, std::uint32_t* sorted, const std::int32_t* values,
                     std::int32_t* sorted_values, std::int64_t count, int bits, Scratch scratch, Stream stream) {
  auto bytes = static_cast<std::size_t>(scratch.bytes);
  require_success(sort_with(scratch.memory, bytes, keys, sorted, values, sorted_values,
                            static_cast<std::int32_t>(count), bits, static_cast<cudaStream_t>(stream)),
                  "unique_ids (sort)");
}

template <>
void GpuRunner::select(StartsSegment wanted, std::int64_t count, std::int32_t* selected, std::int32_t* number,
                       Scratch scratch, Stream stream) {
  auto bytes = static_cast<std::size_t>(scratch.bytes);
  require_success(select_with(scratch.memory, bytes, wanted, static_cast<std::int32_t>(count), selected, number,
                              static_cast<cudaStream_t>(stream)),
                  "unique_ids (select)");
}

namespace gpu {

void clean_ids(const CleanIds& job, Stream stream) { cuda::clean_ids<GpuRunner>(job, stream); }
void ids_of_segments(const IdsOfSegments& job, Stream stream) { cuda::ids_of_segments<GpuRunner>(job, stream); }
void check_lookup(const CheckLookup& job, Stream stream) { cuda::check_lookup<GpuRunner>(job, stream); }
void unique_ids(const UniqueIds& job, Stream stream) { cuda::unique_ids<GpuRunner>(job, stream); }
std::int64_t unique_ids_workspace(std::int64_t count) { return cuda::unique_ids_workspace<GpuRunner>(count); }

void warm_up_sort() {
  // CUB has other kernels for small batches: one of each kind.
  for (const std::int32_t count : {256, 1 << 18}) {
    const std::int64_t workspace_bytes = unique_ids_workspace(count);
    const std::int64_t array_bytes = (count + 64) * std::int64_t{4};
    char* memory = nullptr;
    require_success(cudaMalloc(&memory, static_cast<std::size_t>(workspace_bytes + 5 * array_bytes)), "warm_up");
    const auto run = [&] {
      const auto array = [&](int i) {
        return reinterpret_cast<std::int32_t*>(memory + workspace_bytes + i * array_bytes);
      };
      write_positions(array(0), count, nullptr);
      UniqueIds job;
      job.ids = array(0);
      job.count = count;
      job.rows = count;
      job.limit = count;
      job.unique = array(1);
      job.offsets = array(2);
      job.positions = array(3);
      job.counts = reinterpret_cast<BatchCounts*>(array(4));
      job.workspace = memory;
      job.workspace_bytes = workspace_bytes;
      unique_ids(job, nullptr);
      require_success(cudaStreamSynchronize(nullptr), "warm_up");
    };
    try {
      run();
    } catch (...) {
      cudaFree(memory);
      throw;
    }
    require_success(cudaFree(memory), "warm_up");
  }
}

}  // namespace gpu
}  // namespace async_emb::cuda
