// Moving rows, bit for bit: lookups, and what a done hands over.
//
// Lanes share the chunks of all rows, not rows: whatever the width, no lane is idle, and neighbours write neighbouring
// chunks. Each lane has several loads in flight.
#pragma once

#include <cstdint>

#include "core/pack.h"
#include "cuda/fast_divide.h"
#include "cuda/launches.h"
#include "cuda/share.h"

namespace async_emb::cuda {
inline namespace ASYNC_EMB_ISA {

// What one access moves.
template <int kBytes>
struct ChunkOf {
  using Type = core::ArrayPack<std::uint32_t, kBytes / 4>;
};
template <>
struct ChunkOf<4> {
  using Type = std::uint32_t;
};
template <>
struct ChunkOf<2> {
  using Type = std::uint16_t;
};
template <>
struct ChunkOf<1> {
  using Type = unsigned char;
};
template <int kBytes>
using Chunk = typename ChunkOf<kBytes>::Type;

// `pattern` in every 32 bits, or as much of it as fits.
template <int kBytes>
ASYNC_EMB_INLINE Chunk<kBytes> filled(std::uint32_t pattern) {
  if constexpr (kBytes <= 4) {
    return static_cast<Chunk<kBytes>>(pattern);
  } else {
    Chunk<kBytes> chunk;
    ASYNC_EMB_UNROLL
    for (int i = 0; i < kBytes / 4; ++i) chunk[i] = pattern;
    return chunk;
  }
}

// Rows of which every shard has the same number of chunks; together fewer than 2^31 - 2^24 chunks.
template <int kBytes, bool kOneShard>
struct GatherChunks {
  static constexpr int kLanes = 32;
  static constexpr bool kMeet = false;
  static constexpr int kStack = 0;
  static constexpr int kInFlight = 4;
  static const char* name() { return "gather_rows"; }

  GatherRows job;
  FastDivide row_chunks;    // of a whole row of the output
  FastDivide shard_chunks;  // of a shard's part of it

  template <class Lanes>
  ASYNC_EMB_INLINE void operator()(Lanes lanes, Share share) const {
    const auto total = static_cast<std::uint32_t>(job.count) * row_chunks.divisor;
    const auto step = static_cast<std::uint32_t>(share.lane_step(lanes));
    for (auto base = static_cast<std::uint32_t>(share.lane_first(lanes)); base < total; base += kInFlight * step) {
      Chunk<kBytes> chunks[kInFlight];
      unsigned char* to[kInFlight];
      ASYNC_EMB_UNROLL
      for (int k = 0; k < kInFlight; ++k) {
        const std::uint32_t n = base + static_cast<std::uint32_t>(k) * step;
        to[k] = nullptr;
        if (n >= total) continue;
        const std::uint32_t row = quotient(row_chunks, n);
        const std::uint32_t column = n - row * row_chunks.divisor;
        const std::uint32_t s = kOneShard ? 0 : quotient(shard_chunks, column);
        const ColumnShard& shard = job.shards[s];
        const std::int32_t id = job.ids[row];
        to[k] = static_cast<unsigned char*>(job.out) + row * job.out_row_stride_bytes +
                static_cast<std::int64_t>(column) * kBytes;
        chunks[k] = filled<kBytes>(0);
        if (id >= 0) {
          chunks[k] = core::load_pack<Chunk<kBytes>>(
              static_cast<const unsigned char*>(shard.data) + id * shard.row_stride_bytes +
              static_cast<std::int64_t>(column - s * shard_chunks.divisor) * kBytes);
        }
      }
      ASYNC_EMB_UNROLL
      for (int k = 0; k < kInFlight; ++k) {
        if (to[k] != nullptr) core::store_pack(chunks[k], to[k]);
      }
    }
  }
};

template <int kBytes>
struct DeliverChunks {
  static constexpr int kLanes = 32;
  static constexpr bool kMeet = false;
  static constexpr int kStack = 0;
  static constexpr int kInFlight = 4;
  static const char* name() { return "deliver_rows"; }

  const void* from;
  void* to;
  std::int64_t chunks;
  std::uint32_t nan;  // of the dtype, as often as it fits
  const std::int32_t* skip;

  template <class Lanes>
  ASYNC_EMB_INLINE void operator()(Lanes lanes, Share share) const {
    const bool refused = *skip != 0;
    const std::int64_t step = share.lane_step(lanes);
    for (std::int64_t base = share.lane_first(lanes); base < chunks; base += kInFlight * step) {
      Chunk<kBytes> moved[kInFlight];
      ASYNC_EMB_UNROLL
      for (int k = 0; k < kInFlight; ++k) {
        const std::int64_t i = base + k * step;
        moved[k] = filled<kBytes>(nan);
        if (!refused && i < chunks) {
          moved[k] = core::load_pack<Chunk<kBytes>>(static_cast<const unsigned char*>(from) + i * kBytes);
        }
      }
      ASYNC_EMB_UNROLL
      for (int k = 0; k < kInFlight; ++k) {
        const std::int64_t i = base + k * step;
        if (i < chunks) core::store_pack(moved[k], static_cast<unsigned char*>(to) + i * kBytes);
      }
    }
  }
};

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::cuda
