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
  using Type = core::BitsPack<kBytes / 4>;
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
  static constexpr int kResident = 6;
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
      // All ids first, then all chunks: past the end the last chunk is read again, so that no load waits for a branch.
      std::uint32_t rows[kInFlight];
      std::uint32_t columns[kInFlight];
      std::int32_t ids[kInFlight];
      ASYNC_EMB_UNROLL
      for (int k = 0; k < kInFlight; ++k) {
        const std::uint32_t n = base + static_cast<std::uint32_t>(k) * step;
        const std::uint32_t chunk = n < total ? n : total - 1;
        rows[k] = quotient(row_chunks, chunk);
        columns[k] = chunk - rows[k] * row_chunks.divisor;
        ids[k] = job.ids[rows[k]];
      }
      Chunk<kBytes> chunks[kInFlight];
      ASYNC_EMB_UNROLL
      for (int k = 0; k < kInFlight; ++k) {
        const std::uint32_t s = kOneShard ? 0 : quotient(shard_chunks, columns[k]);
        const std::uint32_t column = columns[k] - s * shard_chunks.divisor;
        const ColumnShard& shard = job.shards[s];
        chunks[k] = filled<kBytes>(0);
        if (ids[k] >= 0) {
          chunks[k] = core::load_pack<Chunk<kBytes>>(static_cast<const unsigned char*>(shard.data) +
                                                     ids[k] * shard.row_stride_bytes +
                                                     static_cast<std::int64_t>(column) * kBytes);
        }
      }
      ASYNC_EMB_UNROLL
      for (int k = 0; k < kInFlight; ++k) {
        if (base + static_cast<std::uint32_t>(k) * step >= total) continue;
        core::store_pack(chunks[k], static_cast<unsigned char*>(job.out) + rows[k] * job.out_row_stride_bytes +
                                        static_cast<std::int64_t>(columns[k]) * kBytes);
      }
    }
  }
};

template <int kBytes>
struct DeliverChunks {
  static constexpr int kLanes = 32;
  static constexpr bool kMeet = false;
  static constexpr int kStack = 0;
  static constexpr int kResident = 6;
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
