// How the optimizer's rule is launched.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/launch_shape.h"
#include "cuda/launches.h"
#include "cuda/update_bodies.h"

namespace async_emb::cuda {
inline namespace ASYNC_EMB_ISA {

template <class Runner, class Weight, int N, bool kStochastic>
void update_rows(const RowwiseAdagrad& job, Stream stream) {
  constexpr int kRows = sizeof(Weight) == 4 ? 4 : 2;
  with_group<Weight, N>(job.width / N, [&](auto lanes) {
    UpdateRows<Weight, N, lanes.value, kRows, kStochastic> body;
    body.job = job;
    if (job.sum_job != nullptr && job.sum_job->leaves_singles) {
      body.grads = grad_rows_of(*job.sum_job);
      body.offsets = job.sum_job->offsets;
      body.positions = job.sum_job->positions;
    }
    Runner::run(body, ceil_divide(job.max_segments, kRows), stream);
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
  if (job.sum_job != nullptr && job.sum_job->leaves_singles) {
    if (job.sum_job->grad_dtype != job.table_dtype) {
      throw std::runtime_error(std::string("async_emb: rowwise_adagrad: single gradients of dtype ") +
                               core::name_of(job.sum_job->grad_dtype) + " are left for a table of dtype " +
                               core::name_of(job.table_dtype));
    }
    most = std::min(most, aligned_elements(*job.sum_job));
  }
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
