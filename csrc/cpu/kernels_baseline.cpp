// The kernels for any processor of the architecture that the compiler is set to.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/kernel_tables.h"
#include "cpu/kernels.inc.h"

namespace async_emb::cpu {

const Kernels kBaselineKernels = {"baseline",    gather_rows, unique_ids,     segment_sum,
                                  row_statistic, dyadic_sum,  rowwise_adagrad};

}  // namespace async_emb::cpu
