// Lookups as XLA calls them. Translation and checks of form only; the pipeline decides everything else.
#include "faces/ffi_bindings.h"
#include "faces/ffi_handlers.h"

namespace async_emb::faces {
namespace {

std::int64_t rows_of(const DLTensor& table) { return table.ndim == 2 ? table.shape[0] : 0; }

ffi::Error begin(Caller caller, ffi::AnyBuffer token_ids, ffi::AnyBuffer table, ffi::BufferR1<ffi::F32> /*gate*/,
                 ffi::ResultBufferR1<ffi::F32> pin, ffi::Result<ffi::AnyBuffer> table_out, std::int64_t context_id) {
  return guarded([&] {
    require_alias(table, *table_out, "the table");
    const context::Member member = caller.of(context_id);
    const DLTensor shard = view(table);
    *pin->typed_data() = member.pipeline->lookup_begin(member.rank, view(token_ids), rows_of(shard));
    member.pipeline->lookup_offer(member.rank, shard);
  });
}

ffi::Future lease(Caller caller, ffi::AnyBuffer table, ffi::BufferR1<ffi::F32> /*pin*/,
                  ffi::Result<ffi::AnyBuffer> table_out, std::int64_t context_id) {
  return guarded_future([&](context::Completion completion) {
    require_alias(table, *table_out, "the table");
    const context::Member member = caller.of(context_id);
    member.pipeline->lookup_lease(member.rank, view(table), std::move(completion));
  });
}

ffi::Error begin_beside_update(Caller caller, ffi::AnyBuffer token_ids, Pin /*gate*/, ffi::Result<Pin> issued,
                               ffi::Result<Pin> pin, std::int64_t context_id) {
  return guarded([&] {
    const context::Member member = caller.of(context_id);
    const float step = member.pipeline->lookup_begin_beside_update(member.rank, view(token_ids));
    *issued->typed_data() = *pin->typed_data() = step;
  });
}

// The pin comes back with the table, so no done runs before this.
ffi::Future lease_beside_update(Caller caller, ffi::AnyBuffer table, ffi::AnyBuffer pin,
                                ffi::Result<ffi::AnyBuffer> table_out, ffi::Result<ffi::AnyBuffer> pin_out,
                                std::int64_t context_id) {
  return guarded_future([&](context::Completion completion) {
    require_alias(table, *table_out, "the table");
    require_alias(pin, *pin_out, "the pin");
    const context::Member member = caller.of(context_id);
    member.pipeline->lookup_lease(member.rank, view(table), std::move(completion));
  });
}

ffi::Future done(Caller caller, ffi::BufferR1<ffi::F32> pin, ffi::Result<ffi::AnyBuffer> rows,
                 std::int64_t context_id) {
  return guarded_future([&](context::Completion completion) {
    const context::Member member = caller.of(context_id);
    member.pipeline->lookup_done(member.rank, *pin.typed_data(), nullptr, view(*rows), std::move(completion));
  });
}

ffi::Future done_checked(Caller caller, ffi::BufferR1<ffi::F32> pin, ffi::AnyBuffer token_ids,
                         ffi::Result<ffi::AnyBuffer> rows, std::int64_t context_id) {
  return guarded_future([&](context::Completion completion) {
    const context::Member member = caller.of(context_id);
    const DLTensor ids = view(token_ids);
    member.pipeline->lookup_done(member.rank, *pin.typed_data(), &ids, view(*rows), std::move(completion));
  });
}

// A whole lookup in one call that only reads the table: nothing is aliased, so XLA neither donates nor copies it. The
// done lends the table that was offered, so it completes when the rows are there and no peer reads this shard any more.
ffi::Future now(Caller caller, ffi::AnyBuffer token_ids, ffi::AnyBuffer table, ffi::Result<ffi::AnyBuffer> rows,
                std::int64_t context_id) {
  return guarded_future([&](context::Completion completion) {
    const context::Member member = caller.of(context_id);
    const DLTensor shard = view(table);
    const float pin = member.pipeline->lookup_begin(member.rank, view(token_ids), rows_of(shard));
    member.pipeline->lookup_offer(member.rank, shard);
    member.pipeline->lookup_done(member.rank, pin, nullptr, view(*rows), std::move(completion));
  });
}

}  // namespace

XLA_FFI_Error* lookup_now(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_lookup_now<Caller>(now);
  return handler->Call(call);
}

XLA_FFI_Error* lookup_begin(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_lookup_begin<Caller>(begin);
  return handler->Call(call);
}

XLA_FFI_Error* lookup_lease(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_lookup_lease<Caller>(lease);
  return handler->Call(call);
}

XLA_FFI_Error* lookup_begin_beside_update(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_lookup_begin_beside_update<Caller>(begin_beside_update);
  return handler->Call(call);
}

XLA_FFI_Error* lookup_lease_beside_update(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_lookup_lease_beside_update<Caller>(lease_beside_update);
  return handler->Call(call);
}

XLA_FFI_Error* lookup_done(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_lookup_done<Caller>(done);
  return handler->Call(call);
}

XLA_FFI_Error* lookup_done_checked(XLA_FFI_CallFrame* call) {
  static auto* handler = bind_lookup_done_checked<Caller>(done_checked);
  return handler->Call(call);
}

}  // namespace async_emb::faces
