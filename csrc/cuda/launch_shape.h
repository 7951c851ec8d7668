// Which shape of a body a job gets: elements moved by one access, lanes of a group, rows at once.
//
// Chosen from the job alone, by the same code for a GPU and for what stands for one in tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "core/dtype.h"

namespace async_emb::cuda {
inline namespace ASYNC_EMB_ISA {

inline std::int64_t address_of(const void* pointer) {
  return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(pointer));
}

// The largest power of two, up to 16, that divides all of these addresses and sizes.
inline std::int64_t common_alignment(std::initializer_list<std::int64_t> bytes) {
  std::int64_t bits = 16;
  for (const std::int64_t each : bytes) bits |= each;
  return bits & -bits;
}

inline std::int64_t ceil_divide(std::int64_t value, std::int64_t by) { return (value + by - 1) / by; }

inline std::int64_t next_power_of_two(std::int64_t value) {
  std::int64_t power = 1;
  while (power < value) power *= 2;
  return power;
}

// Items are counted in 31 bits where they are divided fast, with room for a grid's last stride.
inline constexpr std::int64_t kMostItems = (std::int64_t{1} << 31) - (std::int64_t{1} << 25);

inline void require_countable(const char* launch, const char* what, std::int64_t items) {
  if (items <= kMostItems) return;
  throw std::runtime_error(std::string("async_emb: ") + launch + ": " + std::to_string(items) + " " + what +
                           " are more than a launch counts (" + std::to_string(kMostItems) +
                           "); make the batch or the rows smaller");
}

template <int k>
using Constant = std::integral_constant<int, k>;

// Calls f with N as a constant: the elements of one access to rows of Element, at most `most` and at most 16 bytes.
// Sizes between 8 bytes and one element have no kernels of their own.
template <class Element, class F>
void with_pack(std::int64_t most, F f) {
  if constexpr (sizeof(Element) == 2) {
    if (most >= 8) return f(Constant<8>());
  }
  if (most >= 4) return f(Constant<4>());
  f(Constant<1>());
}

// Calls f with the lanes of a group for rows of that many packs. Packs below 16 bytes are the exception, and get fewer
// kernels.
template <class Element, int N, class F>
void with_group(std::int64_t packs, F f) {
  if constexpr (N * sizeof(Element) == 16) {
    if (packs <= 4) return f(Constant<4>());
    if (packs <= 8) return f(Constant<8>());
    if (packs <= 16) return f(Constant<16>());
  } else {
    if (packs <= 8) return f(Constant<8>());
  }
  f(Constant<32>());
}

// Calls f with a value of the element type.
template <class F>
void with_element(core::DType dtype, F f) {
  switch (dtype) {
    case core::DType::kFloat32:
      return f(float{});
    case core::DType::kBFloat16:
      return f(core::BFloat16{});
    case core::DType::kFloat16:
      return f(core::Float16{});
  }
}

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::cuda
