// Lookups as XLA calls them on CUDA. The same targets and operands as in ffi_lookup.cpp.
#include "faces/ffi_device.h"
#include "faces/ffi_handlers.h"

namespace async_emb::faces::device {
namespace {

using Pin = ffi::BufferR1<ffi::F32>;

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
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<DeviceCaller>()
                             .Arg<ffi::AnyBuffer>()  // token_ids, tokens_per_rank elements
                             .Arg<ffi::AnyBuffer>()  // table [rows, shard_width]
                             .Ret<ffi::AnyBuffer>()  // rows [tokens_per_rank, emb_width]
                             .Attr<std::int64_t>("context_id")
                             .To(now)
                             .release();
  return handler->Call(call);
}

XLA_FFI_Error* lookup_begin(XLA_FFI_CallFrame* call) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<DeviceCaller>()
                             .Arg<ffi::AnyBuffer>()  // token_ids, tokens_per_rank elements
                             .Arg<ffi::AnyBuffer>()  // table [rows, shard_width]
                             .Arg<Pin>()             // gate [1]
                             .Ret<Pin>()             // pin [1]
                             .Ret<ffi::AnyBuffer>()  // the same table
                             .Attr<std::int64_t>("context_id")
                             .To(begin)
                             .release();
  return handler->Call(call);
}

XLA_FFI_Error* lookup_lease(XLA_FFI_CallFrame* call) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<DeviceCaller>()
                             .Arg<ffi::AnyBuffer>()  // table [rows, shard_width]
                             .Arg<Pin>()             // pin [1]
                             .Ret<ffi::AnyBuffer>()  // the same table
                             .Attr<std::int64_t>("context_id")
                             .To(lease)
                             .release();
  return handler->Call(call);
}

XLA_FFI_Error* lookup_done(XLA_FFI_CallFrame* call) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<DeviceCaller>()
                             .Arg<Pin>()             // pin [1] of the lookup_start
                             .Ret<ffi::AnyBuffer>()  // rows [tokens_per_rank, emb_width]
                             .Attr<std::int64_t>("context_id")
                             .To(done)
                             .release();
  return handler->Call(call);
}

XLA_FFI_Error* lookup_done_checked(XLA_FFI_CallFrame* call) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<DeviceCaller>()
                             .Arg<Pin>()             // pin [1] of the lookup_start
                             .Arg<ffi::AnyBuffer>()  // token_ids that the rows are for
                             .Ret<ffi::AnyBuffer>()  // rows [tokens_per_rank, emb_width]
                             .Attr<std::int64_t>("context_id")
                             .To(done_checked)
                             .release();
  return handler->Call(call);
}

XLA_FFI_Error* settle(XLA_FFI_CallFrame* call) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<DeviceCaller>()
                             .Arg<ffi::AnyBuffer>()  // table [rows, shard_width]
                             .Arg<ffi::AnyBuffer>()  // what comes first: the end of the step
                             .Ret<ffi::AnyBuffer>()  // the same table, at rest
                             .Attr<std::int64_t>("context_id")
                             .To(rest)
                             .release();
  return handler->Call(call);
}

}  // namespace async_emb::faces::device
