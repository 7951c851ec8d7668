// The kernels for processors with AVX-512 (F, BW, DQ, VL). Without fused multiply-add: it would change bits.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

// Standard headers come before the target: their inline functions may be merged with those of other files.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")
#endif

#define ASYNC_EMB_ISA isa_avx512
#define ASYNC_EMB_PACK 16
#define ASYNC_EMB_F16C
#include "cpu/kernels.inc.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#include "cpu/kernel_tables.h"

namespace async_emb::cpu {

const Kernels kAvx512Kernels = {"avx512",      gather_rows, unique_ids,     segment_sum,
                                row_statistic, dyadic_sum,  rowwise_adagrad};

}  // namespace async_emb::cpu

#endif  // defined(__x86_64__)
