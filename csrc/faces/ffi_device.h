// What the handlers of XLA's platform CUDA share. They put work on XLA's stream and return: buffers are in device
// memory, and no value in them is known here. XLA calls them with the device current.
#pragma once

#include "faces/ffi_support.h"

namespace async_emb::faces {

// Who calls, and the stream that the call belongs to. Handlers bind it with Ctx<DeviceCaller>().
struct DeviceCaller : Caller {
  cuda::Stream stream = nullptr;

  context::Member of(std::int64_t context_id) const {
    context::Member member = context::find_member(context_id, device, run);
    if (member.device_pipeline) return member;
    throw context::Error(context::FailureKind::kInvalidArgument,
                         "async_emb: a step runs on GPUs, but its context was opened for CPU devices");
  }
};

// A view of an XLA buffer in device memory; valid for the length of the call.
inline DLTensor device_view(const ffi::AnyBuffer& buffer, const DeviceCaller& caller) {
  DLTensor tensor = view(buffer);
  tensor.device = {kDLCUDA, caller.device};
  return tensor;
}
inline DLTensor device_view(ffi::Result<ffi::AnyBuffer>& buffer, const DeviceCaller& caller) {
  return device_view(*buffer, caller);
}

// Runs the body of a handler with its member. Where it fails, XLA ends the program and takes its buffers back: on its
// stream that comes after the work that uses them.
template <typename Body>
ffi::Error guarded_on_device(const DeviceCaller& caller, std::int64_t context_id, Body body) noexcept {
  return guarded([&] {
    const context::Member member = caller.of(context_id);
    try {
      body(*member.device_pipeline, member.rank);
    } catch (...) {
      member.device_pipeline->hold(member.rank, caller.stream);
      throw;
    }
  });
}

}  // namespace async_emb::faces

template <>
struct xla::ffi::CtxDecoding<async_emb::faces::DeviceCaller> {
  using Type = async_emb::faces::DeviceCaller;

  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context,
                                    DiagnosticEngine& diagnostic) {
    const auto caller = CtxDecoding<async_emb::faces::Caller>::Decode(api, context, diagnostic);
    const auto stream = CtxDecoding<PlatformStream<void*>>::Decode(api, context, diagnostic);
    if (!caller || !stream) return std::nullopt;
    Type result;
    result.device = caller->device;
    result.run = caller->run;
    result.stream = *stream;
    return result;
  }
};
