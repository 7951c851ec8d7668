// Copying table rows, bit for bit: NaN payloads and dtypes that core knows nothing about survive.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/platform.h"

namespace async_emb::core {
inline namespace ASYNC_EMB_ISA {

// One row of kBytes bytes, where kBytes > 0, or of `bytes` bytes.
template <class Lanes, int kBytes>
ASYNC_EMB_INLINE void copy_row(Lanes lanes, const unsigned char* from, std::int64_t bytes, unsigned char* to) {
  if constexpr (Lanes::kCount == 1) {
    static_cast<void>(lanes);
    if (kBytes > 0) {
      std::memcpy(to, from, kBytes);
    } else if (bytes > 0) {  // a rank without columns may have no memory to point at
      std::memcpy(to, from, static_cast<std::size_t>(bytes));
    }
  } else {
    const std::int64_t size = kBytes > 0 ? kBytes : bytes;
    const auto alignment = (reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to) |
                            static_cast<std::uintptr_t>(size));
    if (alignment % 16 == 0) {
      struct alignas(16) Chunk {
        std::uint64_t half[2];
      };
      for (std::int64_t i = lanes.index(); i < size / 16; i += Lanes::kCount) {
        reinterpret_cast<Chunk*>(to)[i] = reinterpret_cast<const Chunk*>(from)[i];
      }
    } else if (alignment % 2 == 0) {
      for (std::int64_t i = lanes.index(); i < size / 2; i += Lanes::kCount) {
        reinterpret_cast<std::uint16_t*>(to)[i] = reinterpret_cast<const std::uint16_t*>(from)[i];
      }
    } else {
      for (std::int64_t i = lanes.index(); i < size; i += Lanes::kCount) to[i] = from[i];
    }
  }
}

template <class Lanes, int kBytes>
ASYNC_EMB_INLINE void zero_row(Lanes lanes, std::int64_t bytes, unsigned char* to) {
  if constexpr (Lanes::kCount == 1) {
    static_cast<void>(lanes);
    if (kBytes > 0) {
      std::memset(to, 0, kBytes);
    } else if (bytes > 0) {
      std::memset(to, 0, static_cast<std::size_t>(bytes));
    }
  } else {
    for (std::int64_t i = lanes.index(); i < (kBytes > 0 ? kBytes : bytes); i += Lanes::kCount) to[i] = 0;
  }
}

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::core
