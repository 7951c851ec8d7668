// What every XLA FFI handler needs: buffers as DLTensor views, our failures as XLA's errors, and a guard that lets no
// exception out. XLA itself maps only std::exception, and to a code that says nothing.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "context/failure.h"
#include "context/registry.h"
#include "context/tensor_view.h"
#include "cpu/float_mode.h"
#include "xla/ffi/api/ffi.h"

namespace async_emb::faces {

namespace ffi = xla::ffi;

// Who calls: a device, in one run of a program. Handlers bind it with Ctx<Caller>().
struct Caller {
  std::int32_t device = 0;
  std::int64_t run = 0;

  context::Member of(std::int64_t context_id) const {
    context::Member member = context::find_member(context_id, device, run);
    if (member.pipeline) return member;
    throw context::Error(context::FailureKind::kInvalidArgument,
                         "async_emb: a step runs on CPU devices, but its context was opened for GPUs");
  }
};

DLDataType dlpack_type(ffi::DataType type);

// A view of an XLA buffer; valid for the length of the call, because the extents are XLA's.
DLTensor view(const ffi::AnyBuffer& buffer);
inline DLTensor view(ffi::Result<ffi::AnyBuffer>& buffer) { return view(*buffer); }

ffi::Error error_of(const context::Failure& failure);

// Throws where XLA has not put an aliased operand and result into one buffer.
void require_alias(const ffi::AnyBuffer& operand, const ffi::AnyBuffer& result, const char* name);

// Runs the body of a handler that is finished when it returns.
template <typename Body>
ffi::Error guarded(Body body) noexcept {
  try {
    body();
    return ffi::Error::Success();
  } catch (const context::Error& error) {
    return error_of({error.kind(), error.what()});
  } catch (const std::exception& error) {
    return error_of({context::FailureKind::kInternal, error.what()});
  } catch (...) {
    return error_of({context::FailureKind::kInternal, "async_emb: unknown exception in a native call"});
  }
}

// A completion that answers `promise`. The program goes on with the floating-point mode that XLA's own thread had:
// dense compute must not depend on whose thread it continues on.
inline context::Completion answer(ffi::Promise promise) {
  return [promise = std::move(promise), mode = cpu::float_mode()](const context::Failure* failure) mutable {
    const cpu::ScopedFloatMode as_the_caller(mode);
    if (failure == nullptr) {
      promise.SetAvailable();
    } else {
      promise.SetError(error_of(*failure));
    }
  };
}

// Runs the body of a handler that may finish later. The body hands the completion on exactly when it does not throw.
template <typename Body>
ffi::Future guarded_future(Body body) noexcept {
  ffi::Promise promise;
  ffi::Future future(promise);
  ffi::Promise own = promise;
  const ffi::Error error = guarded([&] { body(answer(std::move(promise))); });
  if (error.failure()) own.SetError(error);
  return future;
}

}  // namespace async_emb::faces

template <>
struct xla::ffi::CtxDecoding<async_emb::faces::Caller> {
  using Type = async_emb::faces::Caller;

  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context,
                                    DiagnosticEngine& diagnostic) {
    const auto device = CtxDecoding<DeviceOrdinal>::Decode(api, context, diagnostic);
    const auto run = CtxDecoding<RunId>::Decode(api, context, diagnostic);
    if (!device || !run) return std::nullopt;
    return Type{*device, run->run_id};
  }
};
