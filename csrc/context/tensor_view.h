// Tensors as the context sees them: borrowed DLTensor views. A face fills one from its own framework's tensor; nobody
// copies.
#pragma once

#if __has_include(<dlpack/dlpack.h>)
#include <dlpack/dlpack.h>
#else
#include <ATen/dlpack.h>  // the same standalone C header, as torch ships it
#endif

#include <cstdint>
#include <span>
#include <string>

#include "core/dtype.h"

namespace async_emb::context {

// First byte of a view.
inline void* data_of(const DLTensor& view) { return static_cast<char*>(view.data) + view.byte_offset; }

std::int64_t element_count(const DLTensor& view);

// "bfloat16[16, 8]": for messages.
std::string describe(const DLTensor& view);

DLDataType dlpack_type(core::DType dtype);

// Throws Error(kInvalidArgument) unless `view` has this dtype and shape (an extent of -1 matches anything).
void require(const DLTensor& view, const char* name, DLDataType dtype, std::span<const std::int64_t> shape);

inline constexpr DLDataType kInt32{kDLInt, 32, 1};
inline constexpr DLDataType kInt64{kDLInt, 64, 1};
inline constexpr DLDataType kFloat32{kDLFloat, 32, 1};

inline bool same_type(DLDataType a, DLDataType b) { return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes; }

}  // namespace async_emb::context
