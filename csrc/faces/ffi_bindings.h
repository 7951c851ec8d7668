// What each target takes and gives, the same on every platform: a handler binds its caller (Caller or DeviceCaller) and
// the function that does the work.
#pragma once

#include <utility>

#include "faces/ffi_support.h"

namespace async_emb::faces {

using Pin = ffi::BufferR1<ffi::F32>;
using F32Scalar = ffi::BufferR0<ffi::F32>;
using S32Scalar = ffi::BufferR0<ffi::S32>;
using U32Scalar = ffi::BufferR0<ffi::U32>;

// The rule's numbers, as operands: a schedule changes them without a new program.
struct Numbers {
  F32Scalar learning_rate, eps, decay, weight_decay, max_grad_norm;
  S32Scalar step;
  U32Scalar seed, rounding_step;
};

template <class Who, typename Binding>
auto numbers_bound(Binding binding) {
  return std::move(binding)
      .template Ctx<Who>()
      .template Arg<Pin>()         // gate [1]
      .template Arg<F32Scalar>()   // learning_rate
      .template Arg<F32Scalar>()   // eps
      .template Arg<F32Scalar>()   // decay_factor; lazy: accum_decay_rate
      .template Arg<F32Scalar>()   // weight_decay_factor; lazy: weight_decay_rate
      .template Arg<F32Scalar>()   // max_grad_norm, where `clips`
      .template Arg<S32Scalar>()   // step, of the lazy form
      .template Arg<U32Scalar>()   // seed, where `stochastic_rounding`
      .template Arg<U32Scalar>();  // rounding_step, where `stochastic_rounding`
}

template <class Who, class Work>
auto* bind_lookup_now(Work work) {
  return ffi::Ffi::Bind()
      .Ctx<Who>()
      .template Arg<ffi::AnyBuffer>()  // token_ids, tokens_per_rank elements
      .template Arg<ffi::AnyBuffer>()  // table [rows, shard_width]
      .template Ret<ffi::AnyBuffer>()  // rows [tokens_per_rank, emb_width]
      .template Attr<std::int64_t>("context_id")
      .To(work)
      .release();
}

template <class Who, class Work>
auto* bind_lookup_begin(Work work) {
  return ffi::Ffi::Bind()
      .Ctx<Who>()
      .template Arg<ffi::AnyBuffer>()  // token_ids, tokens_per_rank elements
      .template Arg<ffi::AnyBuffer>()  // table [rows, shard_width]
      .template Arg<Pin>()             // gate [1]
      .template Ret<Pin>()             // pin [1]
      .template Ret<ffi::AnyBuffer>()  // the same table
      .template Attr<std::int64_t>("context_id")
      .To(work)
      .release();
}

template <class Who, class Work>
auto* bind_lookup_lease(Work work) {
  return ffi::Ffi::Bind()
      .Ctx<Who>()
      .template Arg<ffi::AnyBuffer>()  // table [rows, shard_width]
      .template Arg<Pin>()             // pin [1]
      .template Ret<ffi::AnyBuffer>()  // the same table
      .template Attr<std::int64_t>("context_id")
      .To(work)
      .release();
}

template <class Who, class Work>
auto* bind_lookup_begin_beside_update(Work work) {
  return ffi::Ffi::Bind()
      .Ctx<Who>()
      .template Arg<ffi::AnyBuffer>()  // token_ids, tokens_per_rank elements
      .template Arg<Pin>()             // gate [1]
      .template Ret<Pin>()             // pin [1] for dense compute
      .template Ret<Pin>()             // pin [1] for the lease
      .template Attr<std::int64_t>("context_id")
      .To(work)
      .release();
}

template <class Who, class Work>
auto* bind_lookup_lease_beside_update(Work work) {
  return ffi::Ffi::Bind()
      .Ctx<Who>()
      .template Arg<ffi::AnyBuffer>()  // table [rows, shard_width], when the update has ended
      .template Arg<ffi::AnyBuffer>()  // pin [1] of the begin
      .template Ret<ffi::AnyBuffer>()  // the same table
      .template Ret<ffi::AnyBuffer>()  // the same pin
      .template Attr<std::int64_t>("context_id")
      .To(work)
      .release();
}

template <class Who, class Work>
auto* bind_lookup_done(Work work) {
  return ffi::Ffi::Bind()
      .Ctx<Who>()
      .template Arg<Pin>()             // pin [1] of the lookup_start
      .template Ret<ffi::AnyBuffer>()  // rows [tokens_per_rank, emb_width]
      .template Attr<std::int64_t>("context_id")
      .To(work)
      .release();
}

template <class Who, class Work>
auto* bind_lookup_done_checked(Work work) {
  return ffi::Ffi::Bind()
      .Ctx<Who>()
      .template Arg<Pin>()             // pin [1] of the lookup_start
      .template Arg<ffi::AnyBuffer>()  // token_ids that the rows are for
      .template Ret<ffi::AnyBuffer>()  // rows [tokens_per_rank, emb_width]
      .template Attr<std::int64_t>("context_id")
      .To(work)
      .release();
}

template <class Who, class Work>
auto* bind_stage_update(Work work) {
  return ffi::Ffi::Bind()
      .Ctx<Who>()
      .template Arg<ffi::AnyBuffer>()  // grads [tokens_per_rank, emb_width]
      .template Arg<ffi::AnyBuffer>()  // pending, bool or int32
      .template Arg<Pin>()             // gate [1]
      .template Ret<Pin>()             // pin [1]
      .template Attr<std::int64_t>("context_id")
      .To(work)
      .release();
}

template <class Who, class Work>
auto* bind_stage_update_segments(Work work) {
  return ffi::Ffi::Bind()
      .Ctx<Who>()
      .template Arg<ffi::AnyBuffer>()  // grads [tokens_per_rank, emb_width]
      .template Arg<ffi::AnyBuffer>()  // segment_ids [tokens_per_rank]
      .template Arg<ffi::AnyBuffer>()  // unique_tokens [num_unique]
      .template Arg<ffi::AnyBuffer>()  // pending, bool or int32
      .template Arg<Pin>()             // gate [1]
      .template Ret<Pin>()             // pin [1]
      .template Attr<std::int64_t>("context_id")
      .To(work)
      .release();
}

template <class Who, class Work>
auto* bind_update_begin(Work work) {
  return numbers_bound<Who>(ffi::Ffi::Bind())
      .template Arg<ffi::AnyBuffer>()  // table [rows, shard_width]
      .template Arg<ffi::AnyBuffer>()  // row_state [rows]
      .template Ret<Pin>()             // pin [1]
      .template Ret<ffi::AnyBuffer>()  // the same table
      .template Ret<ffi::AnyBuffer>()  // the same row_state
      .template Attr<std::int64_t>("context_id")
      .template Attr<bool>("clips")
      .template Attr<bool>("stochastic_rounding")
      .To(work)
      .release();
}

template <class Who, class Work>
auto* bind_update_begin_lazy(Work work) {
  return numbers_bound<Who>(ffi::Ffi::Bind())
      .template Arg<ffi::AnyBuffer>()  // table [rows, shard_width]
      .template Arg<ffi::AnyBuffer>()  // row_state [rows]
      .template Arg<ffi::AnyBuffer>()  // last_step [rows]
      .template Ret<Pin>()             // pin [1]
      .template Ret<ffi::AnyBuffer>()  // the same table
      .template Ret<ffi::AnyBuffer>()  // the same row_state
      .template Ret<ffi::AnyBuffer>()  // the same last_step
      .template Attr<std::int64_t>("context_id")
      .template Attr<bool>("clips")
      .template Attr<bool>("stochastic_rounding")
      .To(work)
      .release();
}

template <class Who, class Work>
auto* bind_update_lease(Work work) {
  return ffi::Ffi::Bind()
      .Ctx<Who>()
      .template Arg<ffi::AnyBuffer>()  // table [rows, shard_width]
      .template Arg<ffi::AnyBuffer>()  // row_state [rows]
      .template Arg<Pin>()             // pin [1] of the begin
      .template Ret<ffi::AnyBuffer>()  // the same table
      .template Ret<ffi::AnyBuffer>()  // the same row_state
      .template Attr<std::int64_t>("context_id")
      .To(work)
      .release();
}

template <class Who, class Work>
auto* bind_update_lease_lazy(Work work) {
  return ffi::Ffi::Bind()
      .Ctx<Who>()
      .template Arg<ffi::AnyBuffer>()  // table [rows, shard_width]
      .template Arg<ffi::AnyBuffer>()  // row_state [rows]
      .template Arg<ffi::AnyBuffer>()  // last_step [rows]
      .template Arg<Pin>()             // pin [1] of the begin
      .template Ret<ffi::AnyBuffer>()  // the same table
      .template Ret<ffi::AnyBuffer>()  // the same row_state
      .template Ret<ffi::AnyBuffer>()  // the same last_step
      .template Attr<std::int64_t>("context_id")
      .To(work)
      .release();
}

template <class Who, class Work>
auto* bind_update_done(Work work) {
  return ffi::Ffi::Bind()
      .Ctx<Who>()
      .template Arg<Pin>()        // gate [1]
      .template Ret<F32Scalar>()  // norm
      .template Ret<S32Scalar>()  // valid: the update was applied
      .template Ret<S32Scalar>()  // pending: one was staged
      .template Ret<Pin>()        // pin [1]
      .template Attr<std::int64_t>("context_id")
      .To(work)
      .release();
}

template <class Who, class Work>
auto* bind_settle(Work work) {
  return ffi::Ffi::Bind()
      .Ctx<Who>()
      .template Arg<ffi::AnyBuffer>()  // table [rows, shard_width]
      .template Arg<ffi::AnyBuffer>()  // what comes first: the end of the step
      .template Ret<ffi::AnyBuffer>()  // the same table, at rest
      .template Attr<std::int64_t>("context_id")
      .To(work)
      .release();
}

}  // namespace async_emb::faces
