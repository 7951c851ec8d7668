// Philox4x32-10: a random number is a function of a counter and a key, so any thread can draw any number, in any order.
//
// J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include <cstdint>

#include "core/platform.h"

namespace async_emb::core {
inline namespace ASYNC_EMB_ISA {

struct Philox4 {
  std::uint32_t x[4];
};

ASYNC_EMB_INLINE Philox4 philox4x32(Philox4 counter, std::uint32_t key0, std::uint32_t key1) {
  std::uint32_t x0 = counter.x[0], x1 = counter.x[1], x2 = counter.x[2], x3 = counter.x[3];
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = static_cast<std::uint64_t>(0xd2511f53u) * x0;
    const std::uint64_t p1 = static_cast<std::uint64_t>(0xcd9e8d57u) * x2;
    const std::uint32_t y0 = static_cast<std::uint32_t>(p1 >> 32) ^ x1 ^ key0;
    const std::uint32_t y2 = static_cast<std::uint32_t>(p0 >> 32) ^ x3 ^ key1;
    x1 = static_cast<std::uint32_t>(p1);
    x3 = static_cast<std::uint32_t>(p0);
    x0 = y0;
    x2 = y2;
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
  return Philox4{{x0, x1, x2, x3}};
}

// The numbers that round columns 4 * group .. 4 * (group + kGroups) - 1 of a table row. Columns count over the whole
// logical row, so that the numbers do not depend on how the columns are sharded.
template <int kGroups>
ASYNC_EMB_INLINE void rounding_bits(std::uint32_t seed, std::uint32_t rounding_step, std::uint32_t row,
                                    std::uint32_t group, std::uint32_t (&random)[4 * kGroups]) {
  for (int g = 0; g < kGroups; ++g) {
    const Philox4 draw =
        philox4x32(Philox4{{row, group + static_cast<std::uint32_t>(g), rounding_step, 0u}}, seed, 0x61656d62u);
    for (int k = 0; k < 4; ++k) random[4 * g + k] = draw.x[k];
  }
}

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::core
