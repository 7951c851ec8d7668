// What the torch face asks of its arguments. Every message names the operator, the argument and the values, and says
// what to do.
//
// Wrong dtypes raise TypeError in Python, wrong shapes and numbers ValueError, wrong ids IndexError.
#pragma once

#include <ATen/ATen.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>

#include "core/dtype.h"
#include "core/ids.h"

namespace async_emb::faces {

// The name that Python uses.
inline std::string name_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kBFloat16:
      return "bfloat16";
    case at::kHalf:
      return "float16";
    case at::kInt:
      return "int32";
    case at::kLong:
      return "int64";
    case at::kShort:
      return "int16";
    case at::kChar:
      return "int8";
    case at::kByte:
      return "uint8";
    case at::kBool:
      return "bool";
    default:
      return c10::toString(type);
  }
}

// An argument with its name, for messages.
struct Argument {
  const char* op;
  const char* name;
  const at::Tensor& tensor;
};

inline void check_dtype(const Argument& argument, std::initializer_list<at::ScalarType> supported) {
  std::string names;
  for (const at::ScalarType type : supported) {
    if (argument.tensor.scalar_type() == type) return;
    names += (names.empty() ? "" : ", ") + name_of(type);
  }
  TORCH_CHECK_TYPE(false, argument.op, ": ", argument.name, " has dtype ", name_of(argument.tensor.scalar_type()),
                   ", supported are ", names, "; convert it with ", argument.name, ".to(torch.",
                   name_of(*supported.begin()), ")");
}

inline void check_dimensions(const Argument& argument, std::int64_t dimensions, const char* shape) {
  TORCH_CHECK_VALUE(argument.tensor.dim() == dimensions, argument.op, ": ", argument.name, " must have the shape ",
                    shape, ", got ", argument.tensor.sizes());
}

inline void check_size(const Argument& argument, std::int64_t dimension, std::int64_t expected, const char* meaning) {
  TORCH_CHECK_VALUE(argument.tensor.size(dimension) == expected, argument.op, ": ", argument.name, " has shape ",
                    argument.tensor.sizes(), ", its dimension ", dimension, " must be ", expected, ", ", meaning);
}

inline void check_contiguous(const Argument& argument) {
  TORCH_CHECK_VALUE(argument.tensor.is_contiguous(), argument.op, ": ", argument.name, " with shape ",
                    argument.tensor.sizes(), " has strides ", argument.tensor.strides(), "; make it contiguous with ",
                    argument.name, ".contiguous(), in place of the original where it is updated");
}

inline void check_cpu(const Argument& argument) {
  TORCH_CHECK_VALUE(argument.tensor.device().is_cpu() && argument.tensor.layout() == at::kStrided, argument.op, ": ",
                    argument.name, " is a ", argument.tensor.layout(), " tensor on ", argument.tensor.device(),
                    "; the other arguments ask for a dense one on the CPU, which ", argument.name, ".cpu() gives");
}

inline void check(const Argument& argument, std::initializer_list<at::ScalarType> dtypes, std::int64_t dimensions,
                  const char* shape) {
  check_cpu(argument);
  check_dtype(argument, dtypes);
  check_dimensions(argument, dimensions, shape);
  check_contiguous(argument);
}

// Positions and rows are int32 in every kernel.
inline void check_int32_range(const char* op, const char* quantity, std::int64_t value) {
  TORCH_CHECK_VALUE(value <= std::numeric_limits<std::int32_t>::max(), op, ": ", quantity, " is ", value,
                    ", at most 2147483647 fit in the kernels' 32-bit ids and positions; split the table or the batch");
}

// `value` as the kernels take it; refuses what is not a finite fp32 number.
inline float checked_float(const char* op, const char* name, double value) {
  const float narrow = static_cast<float>(value);
  TORCH_CHECK_VALUE(std::isfinite(narrow), op, ": ", name, " = ", value, " is not a finite float32 number");
  return narrow;
}

inline float checked_not_negative(const char* op, const char* name, double value) {
  const float narrow = checked_float(op, name, value);
  TORCH_CHECK_VALUE(narrow >= 0, op, ": ", name, " = ", value, " must not be negative");
  return narrow;
}

inline std::uint32_t checked_uint32(const char* op, const char* name, std::int64_t value) {
  TORCH_CHECK_VALUE(value >= 0 && value <= std::numeric_limits<std::uint32_t>::max(), op, ": ", name, " = ", value,
                    " must lie in [0, 4294967295]");
  return static_cast<std::uint32_t>(value);
}

inline core::DType kernel_dtype(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBFloat16 ? core::DType::kBFloat16
         : tensor.scalar_type() == at::kHalf   ? core::DType::kFloat16
                                               : core::DType::kFloat32;
}

// Ids as int32 rows of a table with `rows` rows, flattened. -1 stands for no row; anything else outside of [0, rows) is
// refused.
inline at::Tensor checked_ids(const Argument& argument, std::int64_t rows) {
  check_cpu(argument);
  check_dtype(argument, {at::kInt, at::kLong});
  check_contiguous(argument);
  const at::Tensor& ids = argument.tensor;
  check_int32_range(argument.op, "the number of ids", ids.numel());
  at::Tensor cleaned = at::empty({ids.numel()}, ids.options().dtype(at::kInt));
  std::int32_t* const out = cleaned.mutable_data_ptr<std::int32_t>();
  constexpr auto kPolicy = core::IdPolicy::kError;
  const core::IdReport report =
      ids.scalar_type() == at::kInt
          ? core::clean_ids(ids.const_data_ptr<std::int32_t>(), ids.numel(), rows, kPolicy, true, -1, out)
          : core::clean_ids(ids.const_data_ptr<std::int64_t>(), ids.numel(), rows, kPolicy, true, -1, out);
  TORCH_CHECK_INDEX(report.bad == 0, argument.op, ": ", argument.name, "[", report.first_bad_position,
                    "] of the flattened ids is ", report.first_bad_id, ", outside of [0, ", rows, ") (", report.bad,
                    " of ", ids.numel(), " ids are); use -1 for an entry that has no row");
  return cleaned;
}

}  // namespace async_emb::faces
