// Updates as XLA calls them on CUDA. The same targets and operands as in ffi_update.cpp; the rule's numbers are read by
// the device.
#include "faces/ffi_device.h"
#include "faces/ffi_handlers.h"

namespace async_emb::faces::device {
namespace {

using F32Scalar = ffi::BufferR0<ffi::F32>;
using S32Scalar = ffi::BufferR0<ffi::S32>;
using U32Scalar = ffi::BufferR0<ffi::U32>;
using Pin = ffi::BufferR1<ffi::F32>;

ffi::Error stage(DeviceCaller caller, ffi::AnyBuffer grads, ffi::AnyBuffer pending, Pin /*gate*/, ffi::Result<Pin> pin,
                 std::int64_t context_id) {
  return guarded_on_device(caller, context_id, [&](context::DevicePipeline& pipeline, int rank) {
    pipeline.stage_update(rank, device_view(grads, caller), nullptr, nullptr, device_view(pending, caller),
                          pin->typed_data(), caller.stream);
  });
}

ffi::Error stage_segments(DeviceCaller caller, ffi::AnyBuffer grads, ffi::AnyBuffer segment_ids,
                          ffi::AnyBuffer unique_tokens, ffi::AnyBuffer pending, Pin /*gate*/, ffi::Result<Pin> pin,
                          std::int64_t context_id) {
  return guarded_on_device(caller, context_id, [&](context::DevicePipeline& pipeline, int rank) {
    const DLTensor segments = device_view(segment_ids, caller);
    const DLTensor unique = device_view(unique_tokens, caller);
    pipeline.stage_update(rank, device_view(grads, caller), &segments, &unique, device_view(pending, caller),
                          pin->typed_data(), caller.stream);
  });
}

template <typename Binding>
auto numbers_bound(Binding binding) {
  return std::move(binding)
      .template Ctx<DeviceCaller>()
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

ffi::Error begin(DeviceCaller caller, Pin /*gate*/, F32Scalar learning_rate, F32Scalar eps, F32Scalar decay,
                 F32Scalar weight_decay, F32Scalar max_grad_norm, S32Scalar step, U32Scalar seed,
                 U32Scalar rounding_step, ffi::AnyBuffer table, ffi::AnyBuffer row_state, ffi::Result<Pin> pin,
                 ffi::Result<ffi::AnyBuffer> table_out, ffi::Result<ffi::AnyBuffer> row_state_out,
                 std::int64_t context_id, bool clips, bool stochastic_rounding) {
  return guarded_on_device(caller, context_id, [&](context::DevicePipeline& pipeline, int rank) {
    require_alias(table, *table_out, "the table");
    require_alias(row_state, *row_state_out, "row_state");
    pipeline.update_begin(rank, {.lazy = false, .clips = clips, .stochastic_rounding = stochastic_rounding},
                          {.learning_rate = learning_rate.typed_data(),
                           .eps = eps.typed_data(),
                           .decay = decay.typed_data(),
                           .weight_decay = weight_decay.typed_data(),
                           .max_grad_norm = max_grad_norm.typed_data(),
                           .step = step.typed_data(),
                           .seed = seed.typed_data(),
                           .rounding_step = rounding_step.typed_data()},
                          device_view(table, caller), device_view(row_state, caller), nullptr, pin->typed_data(),
                          caller.stream);
  });
}

ffi::Error begin_lazy(DeviceCaller caller, Pin /*gate*/, F32Scalar learning_rate, F32Scalar eps, F32Scalar decay,
                      F32Scalar weight_decay, F32Scalar max_grad_norm, S32Scalar step, U32Scalar seed,
                      U32Scalar rounding_step, ffi::AnyBuffer table, ffi::AnyBuffer row_state, ffi::AnyBuffer last_step,
                      ffi::Result<Pin> pin, ffi::Result<ffi::AnyBuffer> table_out,
                      ffi::Result<ffi::AnyBuffer> row_state_out, ffi::Result<ffi::AnyBuffer> last_step_out,
                      std::int64_t context_id, bool clips, bool stochastic_rounding) {
  return guarded_on_device(caller, context_id, [&](context::DevicePipeline& pipeline, int rank) {
    require_alias(table, *table_out, "the table");
    require_alias(row_state, *row_state_out, "row_state");
    require_alias(last_step, *last_step_out, "last_step");
    const DLTensor last = device_view(last_step, caller);
    pipeline.update_begin(rank, {.lazy = true, .clips = clips, .stochastic_rounding = stochastic_rounding},
                          {.learning_rate = learning_rate.typed_data(),
                           .eps = eps.typed_data(),
                           .decay = decay.typed_data(),
                           .weight_decay = weight_decay.typed_data(),
                           .max_grad_norm = max_grad_norm.typed_data(),
                           .step = step.typed_data(),
                           .seed = seed.typed_data(),
                           .rounding_step = rounding_step.typed_data()},
                          device_view(table, caller), device_view(row_state, caller), &last, pin->typed_data(),
                          caller.stream);
  });
}

// The update's done waits for all of its work, so its leases have nothing to wait for.
ffi::Error lease(DeviceCaller caller, ffi::AnyBuffer table, ffi::AnyBuffer row_state, Pin /*pin*/,
                 ffi::Result<ffi::AnyBuffer> table_out, ffi::Result<ffi::AnyBuffer> row_state_out,
                 std::int64_t context_id) {
  return guarded_on_device(caller, context_id, [&](context::DevicePipeline&, int) {
    require_alias(table, *table_out, "the table");
    require_alias(row_state, *row_state_out, "row_state");
  });
}

ffi::Error lease_lazy(DeviceCaller caller, ffi::AnyBuffer table, ffi::AnyBuffer row_state, ffi::AnyBuffer last_step,
                      Pin /*pin*/, ffi::Result<ffi::AnyBuffer> table_out, ffi::Result<ffi::AnyBuffer> row_state_out,
                      ffi::Result<ffi::AnyBuffer> last_step_out, std::int64_t context_id) {
  return guarded_on_device(caller, context_id, [&](context::DevicePipeline&, int) {
    require_alias(table, *table_out, "the table");
    require_alias(row_state, *row_state_out, "row_state");
    require_alias(last_step, *last_step_out, "last_step");
  });
}

ffi::Error done(DeviceCaller caller, Pin /*gate*/, ffi::Result<F32Scalar> norm, ffi::Result<S32Scalar> valid,
                ffi::Result<S32Scalar> pending, ffi::Result<Pin> pin, std::int64_t context_id) {
  return guarded_on_device(caller, context_id, [&](context::DevicePipeline& pipeline, int rank) {
    pipeline.update_done(rank, {norm->typed_data(), valid->typed_data(), pending->typed_data()}, pin->typed_data(),
                         caller.stream);
  });
}

}  // namespace

XLA_FFI_Error* stage_update(XLA_FFI_CallFrame* call) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<DeviceCaller>()
                             .Arg<ffi::AnyBuffer>()  // grads [tokens_per_rank, emb_width]
                             .Arg<ffi::AnyBuffer>()  // pending, bool or int32
                             .Arg<Pin>()             // gate [1]
                             .Ret<Pin>()             // pin [1]
                             .Attr<std::int64_t>("context_id")
                             .To(stage)
                             .release();
  return handler->Call(call);
}

XLA_FFI_Error* stage_update_segments(XLA_FFI_CallFrame* call) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<DeviceCaller>()
                             .Arg<ffi::AnyBuffer>()  // grads [tokens_per_rank, emb_width]
                             .Arg<ffi::AnyBuffer>()  // segment_ids [tokens_per_rank]
                             .Arg<ffi::AnyBuffer>()  // unique_tokens [num_unique]
                             .Arg<ffi::AnyBuffer>()  // pending, bool or int32
                             .Arg<Pin>()             // gate [1]
                             .Ret<Pin>()             // pin [1]
                             .Attr<std::int64_t>("context_id")
                             .To(stage_segments)
                             .release();
  return handler->Call(call);
}

XLA_FFI_Error* update_begin(XLA_FFI_CallFrame* call) {
  static auto* handler = numbers_bound(ffi::Ffi::Bind())
                             .Arg<ffi::AnyBuffer>()  // table [rows, shard_width]
                             .Arg<ffi::AnyBuffer>()  // row_state [rows]
                             .Ret<Pin>()             // pin [1]
                             .Ret<ffi::AnyBuffer>()  // the same table
                             .Ret<ffi::AnyBuffer>()  // the same row_state
                             .Attr<std::int64_t>("context_id")
                             .Attr<bool>("clips")
                             .Attr<bool>("stochastic_rounding")
                             .To(begin)
                             .release();
  return handler->Call(call);
}

XLA_FFI_Error* update_begin_lazy(XLA_FFI_CallFrame* call) {
  static auto* handler = numbers_bound(ffi::Ffi::Bind())
                             .Arg<ffi::AnyBuffer>()  // table [rows, shard_width]
                             .Arg<ffi::AnyBuffer>()  // row_state [rows]
                             .Arg<ffi::AnyBuffer>()  // last_step [rows]
                             .Ret<Pin>()             // pin [1]
                             .Ret<ffi::AnyBuffer>()  // the same table
                             .Ret<ffi::AnyBuffer>()  // the same row_state
                             .Ret<ffi::AnyBuffer>()  // the same last_step
                             .Attr<std::int64_t>("context_id")
                             .Attr<bool>("clips")
                             .Attr<bool>("stochastic_rounding")
                             .To(begin_lazy)
                             .release();
  return handler->Call(call);
}

XLA_FFI_Error* update_lease(XLA_FFI_CallFrame* call) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<DeviceCaller>()
                             .Arg<ffi::AnyBuffer>()  // table [rows, shard_width]
                             .Arg<ffi::AnyBuffer>()  // row_state [rows]
                             .Arg<Pin>()             // pin [1] of the begin
                             .Ret<ffi::AnyBuffer>()  // the same table
                             .Ret<ffi::AnyBuffer>()  // the same row_state
                             .Attr<std::int64_t>("context_id")
                             .To(lease)
                             .release();
  return handler->Call(call);
}

XLA_FFI_Error* update_lease_lazy(XLA_FFI_CallFrame* call) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<DeviceCaller>()
                             .Arg<ffi::AnyBuffer>()  // table [rows, shard_width]
                             .Arg<ffi::AnyBuffer>()  // row_state [rows]
                             .Arg<ffi::AnyBuffer>()  // last_step [rows]
                             .Arg<Pin>()             // pin [1] of the begin
                             .Ret<ffi::AnyBuffer>()  // the same table
                             .Ret<ffi::AnyBuffer>()  // the same row_state
                             .Ret<ffi::AnyBuffer>()  // the same last_step
                             .Attr<std::int64_t>("context_id")
                             .To(lease_lazy)
                             .release();
  return handler->Call(call);
}

XLA_FFI_Error* update_done(XLA_FFI_CallFrame* call) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<DeviceCaller>()
                             .Arg<Pin>()        // gate [1]
                             .Ret<F32Scalar>()  // norm
                             .Ret<S32Scalar>()  // valid: the update was applied
                             .Ret<S32Scalar>()  // pending: one was staged
                             .Ret<Pin>()        // pin [1]
                             .Attr<std::int64_t>("context_id")
                             .To(done)
                             .release();
  return handler->Call(call);
}

}  // namespace async_emb::faces::device
