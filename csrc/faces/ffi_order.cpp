// Handlers that only order or record: identities on an aliased operand, no copy, no context. None looks into a buffer,
// so they are the same on every platform.
#include "context/timeline.h"
#include "faces/ffi_bindings.h"
#include "faces/ffi_handlers.h"

namespace async_emb::faces {
namespace {

ffi::Error keep(ffi::AnyBuffer x, ffi::AnyBuffer /*pin*/, ffi::Result<ffi::AnyBuffer> out) {
  return guarded([&] { require_alias(x, *out, "the operand of depend"); });
}

// On CPU a table that leaves a step is at rest, because its leases have ended: there is nothing to wait for.
ffi::Error rest(Caller, ffi::AnyBuffer table, ffi::AnyBuffer /*after*/, ffi::Result<ffi::AnyBuffer> table_out,
                std::int64_t /*context_id*/) {
  return guarded([&] { require_alias(table, *table_out, "the table"); });
}

ffi::Error note(std::int32_t device, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out, std::string_view label) {
  return guarded([&] {
    require_alias(x, *out, "the operand of mark");
    context::Timeline::shared().record(std::string(label).c_str(), "", device, 0);
  });
}

}  // namespace

XLA_FFI_Error* depend(XLA_FFI_CallFrame* call) {
  static auto* handler = ffi::Ffi::Bind()
                             .Arg<ffi::AnyBuffer>()  // x
                             .Arg<ffi::AnyBuffer>()  // pin: what x shall wait for
                             .Ret<ffi::AnyBuffer>()  // the same x
                             .To(keep)
                             .release();
  return handler->Call(call);
}

XLA_FFI_Error* mark(XLA_FFI_CallFrame* call) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::DeviceOrdinal>()
                             .Arg<ffi::AnyBuffer>()  // x
                             .Ret<ffi::AnyBuffer>()  // the same x
                             .Attr<std::string_view>("label")
                             .To(note)
                             .release();
  return handler->Call(call);
}

XLA_FFI_Error* settle(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_settle<Caller>(rest);
  return handler->Call(call);
}

namespace device {

XLA_FFI_Error* depend(XLA_FFI_CallFrame* call) { return faces::depend(call); }
XLA_FFI_Error* mark(XLA_FFI_CallFrame* call) { return faces::mark(call); }

}  // namespace device

}  // namespace async_emb::faces
