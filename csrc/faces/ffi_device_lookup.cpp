// Lookups as XLA calls them on CUDA. The same targets and operands as in ffi_lookup.cpp.
#include "faces/ffi_bindings.h"
#include "faces/ffi_device.h"
#include "faces/ffi_handlers.h"

namespace async_emb::faces::device {
namespace {

ffi::Error begin(DeviceCaller caller, ffi::AnyBuffer token_ids, ffi::AnyBuffer table, Pin /*gate*/,
                 ffi::Result<Pin> pin, ffi::Result<ffi::AnyBuffer> table_out, std::int64_t context_id) {
  return guarded_on_device(caller, context_id, [&](context::DevicePipeline& pipeline, int rank) {
    require_alias(table, *table_out, "the table");
    pipeline.lookup_begin(rank, device_view(token_ids, caller), device_view(table, caller), pin->typed_data(),
                          caller.stream);
  });
}

// A lease waits at the end of the step (settle), so that it does not stand between a start and the dense compute.
ffi::Error lease(DeviceCaller caller, ffi::AnyBuffer table, Pin /*pin*/, ffi::Result<ffi::AnyBuffer> table_out,
                 std::int64_t context_id) {
  return guarded_on_device(caller, context_id,
                           [&](context::DevicePipeline&, int) { require_alias(table, *table_out, "the table"); });
}

ffi::Error begin_beside_update(DeviceCaller caller, ffi::AnyBuffer token_ids, Pin /*gate*/, ffi::Result<Pin> issued,
                               ffi::Result<Pin> pin, std::int64_t context_id) {
  return guarded_on_device(caller, context_id, [&](context::DevicePipeline& pipeline, int rank) {
    pipeline.lookup_begin_beside_update(rank, device_view(token_ids, caller), issued->typed_data(), pin->typed_data(),
                                        caller.stream);
  });
}

ffi::Error lease_beside_update(DeviceCaller caller, ffi::AnyBuffer table, ffi::AnyBuffer pin,
                               ffi::Result<ffi::AnyBuffer> table_out, ffi::Result<ffi::AnyBuffer> pin_out,
                               std::int64_t context_id) {
  return guarded_on_device(caller, context_id, [&](context::DevicePipeline& pipeline, int rank) {
    require_alias(table, *table_out, "the table");
    require_alias(pin, *pin_out, "the pin");
    pipeline.lookup_show(rank, device_view(table, caller));
  });
}

ffi::Error done(DeviceCaller caller, Pin pin, ffi::Result<ffi::AnyBuffer> rows, std::int64_t context_id) {
  return guarded_on_device(caller, context_id, [&](context::DevicePipeline& pipeline, int rank) {
    pipeline.lookup_done(rank, pin.typed_data(), nullptr, device_view(rows, caller), caller.stream);
  });
}

ffi::Error done_checked(DeviceCaller caller, Pin pin, ffi::AnyBuffer token_ids, ffi::Result<ffi::AnyBuffer> rows,
                        std::int64_t context_id) {
  return guarded_on_device(caller, context_id, [&](context::DevicePipeline& pipeline, int rank) {
    const DLTensor ids = device_view(token_ids, caller);
    pipeline.lookup_done(rank, pin.typed_data(), &ids, device_view(rows, caller), caller.stream);
  });
}

ffi::Error now(DeviceCaller caller, ffi::AnyBuffer token_ids, ffi::AnyBuffer table, ffi::Result<ffi::AnyBuffer> rows,
               std::int64_t context_id) {
  return guarded_on_device(caller, context_id, [&](context::DevicePipeline& pipeline, int rank) {
    pipeline.lookup_begin(rank, device_view(token_ids, caller), device_view(table, caller), nullptr, caller.stream);
    pipeline.lookup_done(rank, nullptr, nullptr, device_view(rows, caller), caller.stream);
  });
}

ffi::Error rest(DeviceCaller caller, ffi::AnyBuffer table, ffi::AnyBuffer /*after*/,
                ffi::Result<ffi::AnyBuffer> table_out, std::int64_t context_id) {
  return guarded_on_device(caller, context_id, [&](context::DevicePipeline& pipeline, int rank) {
    require_alias(table, *table_out, "the table");
    pipeline.settle(rank, caller.stream);
  });
}

}  // namespace

XLA_FFI_Error* lookup_now(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_lookup_now<DeviceCaller>(now);
  return handler->Call(call);
}

XLA_FFI_Error* lookup_begin(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_lookup_begin<DeviceCaller>(begin);
  return handler->Call(call);
}

XLA_FFI_Error* lookup_lease(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_lookup_lease<DeviceCaller>(lease);
  return handler->Call(call);
}

XLA_FFI_Error* lookup_begin_beside_update(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_lookup_begin_beside_update<DeviceCaller>(begin_beside_update);
  return handler->Call(call);
}

XLA_FFI_Error* lookup_lease_beside_update(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_lookup_lease_beside_update<DeviceCaller>(lease_beside_update);
  return handler->Call(call);
}

XLA_FFI_Error* lookup_done(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_lookup_done<DeviceCaller>(done);
  return handler->Call(call);
}

XLA_FFI_Error* lookup_done_checked(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_lookup_done_checked<DeviceCaller>(done_checked);
  return handler->Call(call);
}

XLA_FFI_Error* settle(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_settle<DeviceCaller>(rest);
  return handler->Call(call);
}

}  // namespace async_emb::faces::device
