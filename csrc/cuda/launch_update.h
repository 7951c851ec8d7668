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
  const std::int64_t most =
      std::min({common_alignment({address_of(job.table), job.table_row_stride * element}) / element,
                address_of(job.sums) % 16 == 0 ? std::int64_t{16} : std::int64_t{1},
                job.width == 0 ? std::int64_t{16} : job.width & -job.width});
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
