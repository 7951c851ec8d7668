// The distinct ids of a batch and where each occurs, by a stable radix sort (least significant digit first).
#pragma once

#include <cstdint>
#include <cstring>

#include "core/platform.h"

namespace async_emb::core {
inline namespace ASYNC_EMB_ISA {

inline constexpr int kRadixBitsLarge = 11;
inline constexpr int kRadixBitsSmall = 8;
inline constexpr int kRadixCounters = 3 * (1 << kRadixBitsLarge);  // uint32; four digits of 8 bits need fewer

// Elements of scratch for `count` ids: two arrays of keys and the counters of all digits.
ASYNC_EMB_FN constexpr std::int64_t unique_scratch(std::int64_t count) { return 2 * count + kRadixCounters / 2; }

// Sorts `keys` by the id in their upper half, using `other` as the second array. Returns the array that holds the
// result.
template <int kBits>
ASYNC_EMB_INLINE std::uint64_t* sort_by_id(std::uint64_t* keys, std::uint64_t* other, std::int64_t count,
                                           std::uint32_t* counters) {
  constexpr int kDigits = (31 + kBits - 1) / kBits;  // ids are not negative, so 31 bits
  constexpr std::uint32_t kBuckets = 1u << kBits;
  std::memset(counters, 0, kDigits * kBuckets * sizeof(std::uint32_t));
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t id = static_cast<std::uint32_t>(keys[i] >> 32);
    for (int d = 0; d < kDigits; ++d) ++counters[d * kBuckets + ((id >> (d * kBits)) & (kBuckets - 1))];
  }
  for (int d = 0; d < kDigits; ++d) {
    std::uint32_t* ASYNC_EMB_RESTRICT next = counters + d * kBuckets;
    const int shift = 32 + d * kBits;
    // A digit that all ids share orders nothing.
    if (count == 0 || next[(keys[0] >> shift) & (kBuckets - 1)] == static_cast<std::uint32_t>(count)) continue;
    std::uint32_t begin = 0;
    for (std::uint32_t b = 0; b < kBuckets; ++b) {
      const std::uint32_t size = next[b];
      next[b] = begin;
      begin += size;
    }
    for (std::int64_t i = 0; i < count; ++i) other[next[(keys[i] >> shift) & (kBuckets - 1)]++] = keys[i];
    std::uint64_t* const sorted = other;
    other = keys;
    keys = sorted;
  }
  return keys;
}

// Distinct ids ascending in unique[0 .. n - 1]; id u occurs at positions[offsets[u]] .. positions[offsets[u + 1] - 1],
// ascending. Negative ids occur nowhere. Returns n. Arrays are unique[count], offsets[count + 1], positions[count],
// scratch[unique_scratch(count)]; count is at most 2^31 - 1.
ASYNC_EMB_FN std::int64_t unique_ids(const std::int32_t* ids, std::int64_t count, std::int32_t* unique,
                                     std::int32_t* offsets, std::int32_t* positions, std::uint64_t* scratch) {
  std::uint64_t* keys = scratch;
  std::uint64_t* const other = scratch + count;
  std::uint32_t* const counters = reinterpret_cast<std::uint32_t*>(scratch + 2 * count);
  std::int64_t kept = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    keys[kept] = (static_cast<std::uint64_t>(static_cast<std::uint32_t>(ids[i])) << 32) | static_cast<std::uint64_t>(i);
    kept += ids[i] >= 0 ? 1 : 0;
  }
  // Clearing and scanning the counters of wide digits costs more than it saves where there are few ids.
  keys = kept < 4096 ? sort_by_id<kRadixBitsSmall>(keys, other, kept, counters)
                     : sort_by_id<kRadixBitsLarge>(keys, other, kept, counters);
  std::int64_t distinct = 0;
  offsets[0] = 0;
  for (std::int64_t i = 0; i < kept; ++i) {
    const std::uint32_t id = static_cast<std::uint32_t>(keys[i] >> 32);
    positions[i] = static_cast<std::int32_t>(static_cast<std::uint32_t>(keys[i]));
    // Written at every occurrence, so that the last one stands: a branch would be mispredicted at every second id.
    unique[distinct] = static_cast<std::int32_t>(id);
    offsets[distinct + 1] = static_cast<std::int32_t>(i + 1);
    const bool last = i + 1 == kept || static_cast<std::uint32_t>(keys[i + 1] >> 32) != id;
    distinct += last ? 1 : 0;
  }
  return distinct;
}

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::core
