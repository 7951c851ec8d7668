// Lookups on NVIDIA GPUs.
#include "cuda/launch_functions.h"
#include "cuda/launch_lookup.h"
#include "cuda/run.cuh"

namespace async_emb::cuda::gpu {

void gather_rows(const GatherRows& job, Stream stream) { cuda::gather_rows<GpuRunner>(job, stream); }
void deliver_rows(const DeliverRows& job, Stream stream) { cuda::deliver_rows<GpuRunner>(job, stream); }

}  // namespace async_emb::cuda::gpu
