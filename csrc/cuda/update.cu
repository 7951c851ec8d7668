// The optimizer's rule on NVIDIA GPUs.
#include "cuda/launch_functions.h"
#include "cuda/launch_update.h"
#include "cuda/run.cuh"

namespace async_emb::cuda::gpu {

void rowwise_adagrad(const RowwiseAdagrad& job, Stream stream) { cuda::rowwise_adagrad<GpuRunner>(job, stream); }

}  // namespace async_emb::cuda::gpu
