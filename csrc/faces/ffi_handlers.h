// The XLA FFI handlers, by the names under which they are registered: the same for each platform.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace async_emb::faces {

XLA_FFI_Error* lookup_begin(XLA_FFI_CallFrame* call);
XLA_FFI_Error* lookup_lease(XLA_FFI_CallFrame* call);
XLA_FFI_Error* lookup_begin_beside_update(XLA_FFI_CallFrame* call);
XLA_FFI_Error* lookup_lease_beside_update(XLA_FFI_CallFrame* call);
XLA_FFI_Error* lookup_done(XLA_FFI_CallFrame* call);
XLA_FFI_Error* lookup_done_checked(XLA_FFI_CallFrame* call);
XLA_FFI_Error* lookup_now(XLA_FFI_CallFrame* call);
XLA_FFI_Error* stage_update(XLA_FFI_CallFrame* call);
XLA_FFI_Error* stage_update_segments(XLA_FFI_CallFrame* call);
XLA_FFI_Error* update_begin(XLA_FFI_CallFrame* call);
XLA_FFI_Error* update_begin_lazy(XLA_FFI_CallFrame* call);
XLA_FFI_Error* update_lease(XLA_FFI_CallFrame* call);
XLA_FFI_Error* update_lease_lazy(XLA_FFI_CallFrame* call);
XLA_FFI_Error* update_done(XLA_FFI_CallFrame* call);
XLA_FFI_Error* settle(XLA_FFI_CallFrame* call);
XLA_FFI_Error* depend(XLA_FFI_CallFrame* call);
XLA_FFI_Error* mark(XLA_FFI_CallFrame* call);

// On XLA's platform CUDA.
namespace device {

XLA_FFI_Error* lookup_begin(XLA_FFI_CallFrame* call);
XLA_FFI_Error* lookup_lease(XLA_FFI_CallFrame* call);
XLA_FFI_Error* lookup_begin_beside_update(XLA_FFI_CallFrame* call);
XLA_FFI_Error* lookup_lease_beside_update(XLA_FFI_CallFrame* call);
XLA_FFI_Error* lookup_done(XLA_FFI_CallFrame* call);
XLA_FFI_Error* lookup_done_checked(XLA_FFI_CallFrame* call);
XLA_FFI_Error* lookup_now(XLA_FFI_CallFrame* call);
XLA_FFI_Error* stage_update(XLA_FFI_CallFrame* call);
XLA_FFI_Error* stage_update_segments(XLA_FFI_CallFrame* call);
XLA_FFI_Error* update_begin(XLA_FFI_CallFrame* call);
XLA_FFI_Error* update_begin_lazy(XLA_FFI_CallFrame* call);
XLA_FFI_Error* update_lease(XLA_FFI_CallFrame* call);
XLA_FFI_Error* update_lease_lazy(XLA_FFI_CallFrame* call);
XLA_FFI_Error* update_done(XLA_FFI_CallFrame* call);
XLA_FFI_Error* settle(XLA_FFI_CallFrame* call);
XLA_FFI_Error* depend(XLA_FFI_CallFrame* call);
XLA_FFI_Error* mark(XLA_FFI_CallFrame* call);

}  // namespace device

struct Target {
  const char* name;
  XLA_FFI_Handler* cpu;
  XLA_FFI_Handler* cuda;
};

inline constexpr Target kTargets[] = {
    {"async_emb_lookup_begin", lookup_begin, device::lookup_begin},
    {"async_emb_lookup_lease", lookup_lease, device::lookup_lease},
    {"async_emb_lookup_begin_beside_update", lookup_begin_beside_update, device::lookup_begin_beside_update},
    {"async_emb_lookup_lease_beside_update", lookup_lease_beside_update, device::lookup_lease_beside_update},
    {"async_emb_lookup_done", lookup_done, device::lookup_done},
    {"async_emb_lookup_done_checked", lookup_done_checked, device::lookup_done_checked},
    {"async_emb_lookup_now", lookup_now, device::lookup_now},
    {"async_emb_stage_update", stage_update, device::stage_update},
    {"async_emb_stage_update_segments", stage_update_segments, device::stage_update_segments},
    {"async_emb_update_begin", update_begin, device::update_begin},
    {"async_emb_update_begin_lazy", update_begin_lazy, device::update_begin_lazy},
    {"async_emb_update_lease", update_lease, device::update_lease},
    {"async_emb_update_lease_lazy", update_lease_lazy, device::update_lease_lazy},
    {"async_emb_update_done", update_done, device::update_done},
    {"async_emb_settle", settle, device::settle},
    {"async_emb_depend", depend, device::depend},
    {"async_emb_mark", mark, device::mark},
};

}  // namespace async_emb::faces
