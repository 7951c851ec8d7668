// Updates as XLA calls them on CUDA. The same targets and operands as in ffi_update.cpp; the rule's numbers are read by
// the device.
#include "faces/ffi_bindings.h"
#include "faces/ffi_device.h"
#include "faces/ffi_handlers.h"

namespace async_emb::faces::device {
namespace {

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

cuda::TakeNumbers operands_of(const Numbers& numbers) {
  return {.learning_rate = numbers.learning_rate.typed_data(),
          .eps = numbers.eps.typed_data(),
          .decay = numbers.decay.typed_data(),
          .weight_decay = numbers.weight_decay.typed_data(),
          .max_grad_norm = numbers.max_grad_norm.typed_data(),
          .step = numbers.step.typed_data(),
          .seed = numbers.seed.typed_data(),
          .rounding_step = numbers.rounding_step.typed_data()};
}

ffi::Error begin(DeviceCaller caller, Pin /*gate*/, F32Scalar learning_rate, F32Scalar eps, F32Scalar decay,
                 F32Scalar weight_decay, F32Scalar max_grad_norm, S32Scalar step, U32Scalar seed,
                 U32Scalar rounding_step, ffi::AnyBuffer table, ffi::AnyBuffer row_state, ffi::Result<Pin> pin,
                 ffi::Result<ffi::AnyBuffer> table_out, ffi::Result<ffi::AnyBuffer> row_state_out,
                 std::int64_t context_id, bool clips, bool stochastic_rounding) {
  return guarded_on_device(caller, context_id, [&](context::DevicePipeline& pipeline, int rank) {
    require_alias(table, *table_out, "the table");
    require_alias(row_state, *row_state_out, "row_state");
    pipeline.update_begin(
        rank, {.lazy = false, .clips = clips, .stochastic_rounding = stochastic_rounding},
        operands_of({learning_rate, eps, decay, weight_decay, max_grad_norm, step, seed, rounding_step}),
        device_view(table, caller), device_view(row_state, caller), nullptr, pin->typed_data(), caller.stream);
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
    pipeline.update_begin(
        rank, {.lazy = true, .clips = clips, .stochastic_rounding = stochastic_rounding},
        operands_of({learning_rate, eps, decay, weight_decay, max_grad_norm, step, seed, rounding_step}),
        device_view(table, caller), device_view(row_state, caller), &last, pin->typed_data(), caller.stream);
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
  static auto* handler = bind_stage_update<DeviceCaller>(stage);
  return handler->Call(call);
}

XLA_FFI_Error* stage_update_segments(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_stage_update_segments<DeviceCaller>(stage_segments);
  return handler->Call(call);
}

XLA_FFI_Error* update_begin(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_update_begin<DeviceCaller>(begin);
  return handler->Call(call);
}

XLA_FFI_Error* update_begin_lazy(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_update_begin_lazy<DeviceCaller>(begin_lazy);
  return handler->Call(call);
}

XLA_FFI_Error* update_lease(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_update_lease<DeviceCaller>(lease);
  return handler->Call(call);
}

XLA_FFI_Error* update_lease_lazy(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_update_lease_lazy<DeviceCaller>(lease_lazy);
  return handler->Call(call);
}

XLA_FFI_Error* update_done(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_update_done<DeviceCaller>(done);
  return handler->Call(call);
}

}  // namespace async_emb::faces::device
