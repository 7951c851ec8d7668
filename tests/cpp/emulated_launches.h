// The CUDA launches without a GPU: every job runs at once, on the calling thread, through the very bodies that a GPU
// runs, on emulated warps. Streams are ignored; memory is the host's.
#pragma once

#include "cuda/launches.h"

namespace async_emb::testing {

const cuda::Launches& emulated_launches();

}  // namespace async_emb::testing
