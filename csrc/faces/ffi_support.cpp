#include "faces/ffi_support.h"

namespace async_emb::faces {

DLDataType dlpack_type(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::PRED:
      return {kDLBool, 8, 1};
    case ffi::DataType::S8:
      return {kDLInt, 8, 1};
    case ffi::DataType::S16:
      return {kDLInt, 16, 1};
    case ffi::DataType::S32:
      return {kDLInt, 32, 1};
    case ffi::DataType::S64:
      return {kDLInt, 64, 1};
    case ffi::DataType::U8:
      return {kDLUInt, 8, 1};
    case ffi::DataType::U16:
      return {kDLUInt, 16, 1};
    case ffi::DataType::U32:
      return {kDLUInt, 32, 1};
    case ffi::DataType::U64:
      return {kDLUInt, 64, 1};
    case ffi::DataType::F16:
      return {kDLFloat, 16, 1};
    case ffi::DataType::F32:
      return {kDLFloat, 32, 1};
    case ffi::DataType::F64:
      return {kDLFloat, 64, 1};
    case ffi::DataType::BF16:
      return {kDLBfloat, 16, 1};
    default:
      return {kDLOpaqueHandle, 0, 1};  // describe() prints the code; no check accepts it
  }
}

DLTensor view(const ffi::AnyBuffer& buffer) {
  const auto extents = buffer.dimensions();
  DLTensor tensor{};
  tensor.data = buffer.untyped_data();
  tensor.device = {kDLCPU, 0};
  tensor.ndim = static_cast<std::int32_t>(extents.size());
  tensor.dtype = dlpack_type(buffer.element_type());
  tensor.shape = const_cast<std::int64_t*>(extents.begin());  // DLPack's field is not const; nobody writes to it
  return tensor;
}

ffi::Error error_of(const context::Failure& failure) {
  switch (failure.kind) {
    case context::FailureKind::kInvalidArgument:
      return ffi::Error(ffi::ErrorCode::kInvalidArgument, failure.message);
    case context::FailureKind::kUnmatchedBuffers:
    case context::FailureKind::kUnknownContext:
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition, failure.message);
    case context::FailureKind::kAborted:
      return ffi::Error(ffi::ErrorCode::kAborted, failure.message);
    case context::FailureKind::kTimeout:
      return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, failure.message);
    case context::FailureKind::kPeer:
      return ffi::Error(ffi::ErrorCode::kUnavailable, failure.message);
    case context::FailureKind::kInternal:
      break;
  }
  return ffi::Error(ffi::ErrorCode::kInternal, failure.message);
}

void require_alias(const ffi::AnyBuffer& operand, const ffi::AnyBuffer& result, const char* name) {
  if (operand.untyped_data() == result.untyped_data()) return;
  throw context::Error(
      context::FailureKind::kUnmatchedBuffers,
      std::string("async_emb: XLA did not keep ") + name + " in one buffer through a call that works in place");
}

}  // namespace async_emb::faces
