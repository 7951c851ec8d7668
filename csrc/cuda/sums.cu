// Gradient sums, row statistics and the decision on NVIDIA GPUs.
#include "cuda/launch_functions.h"
#include "cuda/launch_sums.h"
#include "cuda/run.cuh"

namespace async_emb::cuda::gpu {

void segment_sum(const SegmentSum& job, Stream stream) { cuda::segment_sum<GpuRunner>(job, stream); }
void row_statistic(const RowStatistic& job, Stream stream) { cuda::row_statistic<GpuRunner>(job, stream); }
void decide(const Decide& job, Stream stream) { cuda::decide<GpuRunner>(job, stream); }

std::int64_t segment_sum_workspace(std::int64_t max_tokens, std::int64_t width) {
  return cuda::segment_sum_workspace(max_tokens, width);
}
std::int64_t decide_workspace(std::int64_t max_segments) { return cuda::decide_workspace(max_segments); }

}  // namespace async_emb::cuda::gpu
