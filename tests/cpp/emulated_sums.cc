// Gradient sums, statistics and the decision on emulated warps; see emulated_launches.cc.
#define ASYNC_EMB_ISA isa_emulated
#define ASYNC_EMB_ARRAY_PACKS

#include "cuda/launch_sums.h"
#include "emulated_runner.h"

namespace async_emb::testing {

void segment_sum(const cuda::SegmentSum& job, cuda::Stream stream) { cuda::segment_sum<EmulatedRunner>(job, stream); }
void row_statistic(const cuda::RowStatistic& job, cuda::Stream stream) {
  cuda::row_statistic<EmulatedRunner>(job, stream);
}
void decide(const cuda::Decide& job, cuda::Stream stream) { cuda::decide<EmulatedRunner>(job, stream); }

std::int64_t segment_sum_workspace(std::int64_t max_tokens, std::int64_t width) {
  return cuda::segment_sum_workspace(max_tokens, width);
}
std::int64_t decide_workspace(std::int64_t max_segments) { return cuda::decide_workspace(max_segments); }

}  // namespace async_emb::testing
