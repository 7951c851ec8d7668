// The optimizer's rule on emulated warps; see emulated_launches.cc.
#define ASYNC_EMB_ISA isa_emulated
#define ASYNC_EMB_ARRAY_PACKS

#include "cuda/launch_update.h"
#include "emulated_runner.h"

namespace async_emb::testing {

void rowwise_adagrad(const cuda::RowwiseAdagrad& job, cuda::Stream stream) {
  cuda::rowwise_adagrad<EmulatedRunner>(job, stream);
}

}  // namespace async_emb::testing
