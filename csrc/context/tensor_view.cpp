#include "context/tensor_view.h"

#include "context/failure.h"

namespace async_emb::context {
namespace {

std::string type_name(DLDataType type) {
  const std::string bits = std::to_string(type.bits);
  switch (type.code) {
    case kDLInt:
      return "int" + bits;
    case kDLUInt:
      return "uint" + bits;
    case kDLFloat:
      return "float" + bits;
    case kDLBfloat:
      return "bfloat" + bits;
    case kDLBool:
      return "bool";
    default:
      return "dtype(code " + std::to_string(type.code) + ", " + bits + " bits)";
  }
}

std::string shape_name(std::span<const std::int64_t> shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += shape[i] < 0 ? std::string("?") : std::to_string(shape[i]);
  }
  return text + "]";
}

}  // namespace

std::int64_t element_count(const DLTensor& view) {
  std::int64_t count = 1;
  for (int i = 0; i < view.ndim; ++i) count *= view.shape[i];
  return count;
}

std::string describe(const DLTensor& view) {
  return type_name(view.dtype) + shape_name({view.shape, static_cast<std::size_t>(view.ndim)});
}

DLDataType dlpack_type(core::DType dtype) {
  switch (dtype) {
    case core::DType::kFloat32:
      return {kDLFloat, 32, 1};
    case core::DType::kBFloat16:
      return {kDLBfloat, 16, 1};
    case core::DType::kFloat16:
      return {kDLFloat, 16, 1};
  }
  return {kDLFloat, 32, 1};
}

void require(const DLTensor& view, const char* name, DLDataType dtype, std::span<const std::int64_t> shape) {
  bool fits = same_type(view.dtype, dtype) && view.ndim == static_cast<int>(shape.size());
  for (int i = 0; fits && i < view.ndim; ++i) fits = shape[i] < 0 || view.shape[i] == shape[i];
  if (fits) return;
  throw Error(FailureKind::kInvalidArgument,
              std::string(name) + " is " + describe(view) + ", but the context needs " + type_name(dtype) +
                  shape_name(shape) +
                  " on each device: call the operation inside jax.shard_map (a plain jit "
                  "hands over the whole array) and make the context handle for these sizes");
}

}  // namespace async_emb::context
