// How the optimizer's rule is launched.
#pragma once

#include <algorithm>

#include "cuda/launch_shape.h"
#include "cuda/launches.h"
#include "cuda/update_bodies.h"

namespace async_emb::cuda {
inline namespace ASYNC_EMB_ISA {

template <class Runner, class Weight, int N, bool kStochastic>
void update_rows(const RowwiseAdagrad& job, Stream stream) {
  constexpr int kRows = sizeof(Weight) == 4 ? 4 : 2;
  with_group<Weight, N>(job.width / N, [&](auto lanes) {
    Runner::run(UpdateRows<Weight, N, lanes.value, kRows, kStochastic>{job}, ceil_divide(job.max_segments, kRows),
                stream);
  });
}

template <class Runner>
void rowwise_adagrad(const RowwiseAdagrad& job, Stream stream) {
  if (job.max_segments == 0) return;
  const std::int64_t element = core::size_of(job.table_dtype);
  std::int64_t most = common_alignment({address_of(job.table), job.table_row_stride * element}) / element;
  if (address_of(job.sums) % 16 != 0) most = 1;
  if (job.width % 16 != 0) most = std::min(most, job.width & -job.width);
  if (job.stochastic_rounding && job.column_begin % 4 != 0) most = 1;  // one draw rounds four columns
  with_element(job.table_dtype, [&](auto weight) {
    using Weight = decltype(weight);
    with_pack<Weight>(most, [&](auto n) {
      if constexpr (sizeof(Weight) == 2) {
        if (job.stochastic_rounding) return update_rows<Runner, Weight, n.value, true>(job, stream);
      }
      update_rows<Runner, Weight, n.value, false>(job, stream);
    });
  });
}

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::cuda
