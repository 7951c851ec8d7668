// Updates as XLA calls them. Translation and checks of form only; the pipeline decides everything else.
#include "faces/ffi_bindings.h"
#include "faces/ffi_handlers.h"

namespace async_emb::faces {
namespace {

bool truth_of(const ffi::AnyBuffer& buffer) {
  const DLTensor tensor = view(buffer);
  context::CallChecks::pending(tensor);
  if (tensor.dtype.code == kDLBool) return *static_cast<const bool*>(tensor.data);
  return *static_cast<const std::int32_t*>(tensor.data) != 0;
}

ffi::Error stage(Caller caller, ffi::AnyBuffer grads, ffi::AnyBuffer pending, Pin /*gate*/, ffi::Result<Pin> pin,
                 std::int64_t context_id) {
  return guarded([&] {
    const context::Member member = caller.of(context_id);
    *pin->typed_data() = member.pipeline->stage_update(member.rank, view(grads), nullptr, nullptr, truth_of(pending));
  });
}

ffi::Error stage_segments(Caller caller, ffi::AnyBuffer grads, ffi::AnyBuffer segment_ids, ffi::AnyBuffer unique_tokens,
                          ffi::AnyBuffer pending, Pin /*gate*/, ffi::Result<Pin> pin, std::int64_t context_id) {
  return guarded([&] {
    const context::Member member = caller.of(context_id);
    const DLTensor segments = view(segment_ids);
    const DLTensor unique = view(unique_tokens);
    *pin->typed_data() = member.pipeline->stage_update(member.rank, view(grads), &segments, &unique, truth_of(pending));
  });
}

context::UpdateRule rule_of(const Numbers& numbers, bool lazy, bool clips, bool stochastic_rounding) {
  return {.lazy = lazy,
          .learning_rate = *numbers.learning_rate.typed_data(),
          .eps = *numbers.eps.typed_data(),
          .decay = *numbers.decay.typed_data(),
          .weight_decay = *numbers.weight_decay.typed_data(),
          .step = *numbers.step.typed_data(),
          .clips = clips,
          .max_grad_norm = *numbers.max_grad_norm.typed_data(),
          .stochastic_rounding = stochastic_rounding,
          .seed = *numbers.seed.typed_data(),
          .rounding_step = *numbers.rounding_step.typed_data()};
}

ffi::Error begin(Caller caller, Pin /*gate*/, F32Scalar learning_rate, F32Scalar eps, F32Scalar decay,
                 F32Scalar weight_decay, F32Scalar max_grad_norm, S32Scalar step, U32Scalar seed,
                 U32Scalar rounding_step, ffi::AnyBuffer table, ffi::AnyBuffer row_state, ffi::Result<Pin> pin,
                 ffi::Result<ffi::AnyBuffer> table_out, ffi::Result<ffi::AnyBuffer> row_state_out,
                 std::int64_t context_id, bool clips, bool stochastic_rounding) {
  return guarded([&] {
    require_alias(table, *table_out, "the table");
    require_alias(row_state, *row_state_out, "row_state");
    const context::Member member = caller.of(context_id);
    const Numbers numbers{learning_rate, eps, decay, weight_decay, max_grad_norm, step, seed, rounding_step};
    *pin->typed_data() =
        member.pipeline->update_begin(member.rank, rule_of(numbers, false, clips, stochastic_rounding));
    member.pipeline->update_offer(member.rank, view(table), view(row_state), nullptr);
  });
}

ffi::Error begin_lazy(Caller caller, Pin /*gate*/, F32Scalar learning_rate, F32Scalar eps, F32Scalar decay,
                      F32Scalar weight_decay, F32Scalar max_grad_norm, S32Scalar step, U32Scalar seed,
                      U32Scalar rounding_step, ffi::AnyBuffer table, ffi::AnyBuffer row_state, ffi::AnyBuffer last_step,
                      ffi::Result<Pin> pin, ffi::Result<ffi::AnyBuffer> table_out,
                      ffi::Result<ffi::AnyBuffer> row_state_out, ffi::Result<ffi::AnyBuffer> last_step_out,
                      std::int64_t context_id, bool clips, bool stochastic_rounding) {
  return guarded([&] {
    require_alias(table, *table_out, "the table");
    require_alias(row_state, *row_state_out, "row_state");
    require_alias(last_step, *last_step_out, "last_step");
    const context::Member member = caller.of(context_id);
    const Numbers numbers{learning_rate, eps, decay, weight_decay, max_grad_norm, step, seed, rounding_step};
    *pin->typed_data() = member.pipeline->update_begin(member.rank, rule_of(numbers, true, clips, stochastic_rounding));
    const DLTensor last = view(last_step);
    member.pipeline->update_offer(member.rank, view(table), view(row_state), &last);
  });
}

ffi::Future lease(Caller caller, ffi::AnyBuffer table, ffi::AnyBuffer row_state, Pin /*pin*/,
                  ffi::Result<ffi::AnyBuffer> table_out, ffi::Result<ffi::AnyBuffer> row_state_out,
                  std::int64_t context_id) {
  return guarded_future([&](context::Completion completion) {
    require_alias(table, *table_out, "the table");
    require_alias(row_state, *row_state_out, "row_state");
    const context::Member member = caller.of(context_id);
    member.pipeline->update_lease(member.rank, view(table), view(row_state), nullptr, std::move(completion));
  });
}

ffi::Future lease_lazy(Caller caller, ffi::AnyBuffer table, ffi::AnyBuffer row_state, ffi::AnyBuffer last_step,
                       Pin /*pin*/, ffi::Result<ffi::AnyBuffer> table_out, ffi::Result<ffi::AnyBuffer> row_state_out,
                       ffi::Result<ffi::AnyBuffer> last_step_out, std::int64_t context_id) {
  return guarded_future([&](context::Completion completion) {
    require_alias(table, *table_out, "the table");
    require_alias(row_state, *row_state_out, "row_state");
    require_alias(last_step, *last_step_out, "last_step");
    const context::Member member = caller.of(context_id);
    const DLTensor last = view(last_step);
    member.pipeline->update_lease(member.rank, view(table), view(row_state), &last, std::move(completion));
  });
}

ffi::Future done(Caller caller, Pin /*gate*/, ffi::Result<F32Scalar> norm, ffi::Result<S32Scalar> valid,
                 ffi::Result<S32Scalar> pending, ffi::Result<Pin> pin, std::int64_t context_id) {
  return guarded_future([&](context::Completion completion) {
    const context::Member member = caller.of(context_id);
    *pin->typed_data() = member.pipeline->update_done(
        member.rank, {norm->typed_data(), valid->typed_data(), pending->typed_data()}, std::move(completion));
  });
}

}  // namespace

XLA_FFI_Error* stage_update(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_stage_update<Caller>(stage);
  return handler->Call(call);
}

XLA_FFI_Error* stage_update_segments(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_stage_update_segments<Caller>(stage_segments);
  return handler->Call(call);
}

XLA_FFI_Error* update_begin(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_update_begin<Caller>(begin);
  return handler->Call(call);
}

XLA_FFI_Error* update_begin_lazy(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_update_begin_lazy<Caller>(begin_lazy);
  return handler->Call(call);
}

XLA_FFI_Error* update_lease(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_update_lease<Caller>(lease);
  return handler->Call(call);
}

XLA_FFI_Error* update_lease_lazy(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_update_lease_lazy<Caller>(lease_lazy);
  return handler->Call(call);
}

XLA_FFI_Error* update_done(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_update_done<Caller>(done);
  return handler->Call(call);
}

}  // namespace async_emb::faces
