// The kernel tables of this build, one for each instruction set. Only the choice among them reads this.
#pragma once

#include "cpu/kernels.h"

namespace async_emb::cpu {

extern const Kernels kBaselineKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace async_emb::cpu
