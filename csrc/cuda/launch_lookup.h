// How lookups are launched.
#pragma once

#include <algorithm>

#include "cuda/gather_bodies.h"
#include "cuda/launch_shape.h"
#include "cuda/launches.h"

namespace async_emb::cuda {
inline namespace ASYNC_EMB_ISA {

// Calls f with the bytes of a chunk as a constant.
template <class F>
void with_chunk(std::int64_t bytes, F f) {
  switch (bytes) {
    case 16:
      return f(Constant<16>());
    case 8:
      return f(Constant<8>());
    case 4:
      return f(Constant<4>());
    case 2:
      return f(Constant<2>());
    default:
      return f(Constant<1>());
  }
}

template <class Runner, int kBytes, bool kOneShard>
void gather_slices(const GatherRows& job, Stream stream) {
  const std::int64_t shard_chunks = job.shards[0].row_bytes / kBytes;
  const std::int64_t row_chunks = shard_chunks * job.num_shards;
  require_countable("gather_rows", "accesses to one row", row_chunks);
  const std::int64_t rows_at_once = kMostItems / row_chunks;
  for (std::int64_t begin = 0; begin < job.count; begin += rows_at_once) {
    GatherChunks<kBytes, kOneShard> body{job, fast_divide(row_chunks), fast_divide(shard_chunks)};
    body.job.ids += begin;
    body.job.count = std::min(rows_at_once, job.count - begin);
    body.job.out = static_cast<char*>(job.out) + begin * job.out_row_stride_bytes;
    Runner::run(body, ceil_divide(body.job.count * row_chunks, body.kLanes * body.kInFlight), stream);
  }
}

// All shards have rows of the same size.
template <class Runner>
void gather_equal_shards(const GatherRows& job, Stream stream) {
  if (job.count == 0 || job.num_shards == 0 || job.shards[0].row_bytes == 0) return;
  std::int64_t bits = address_of(job.out) | job.out_row_stride_bytes;
  for (int s = 0; s < job.num_shards; ++s) {
    bits |= address_of(job.shards[s].data) | job.shards[s].row_stride_bytes | job.shards[s].row_bytes;
  }
  with_chunk(common_alignment({bits}), [&](auto bytes) {
    if (job.num_shards == 1) {
      gather_slices<Runner, bytes.value, true>(job, stream);
    } else {
      gather_slices<Runner, bytes.value, false>(job, stream);
    }
  });
}

template <class Runner>
void gather_rows(const GatherRows& job, Stream stream) {
  bool equal = true;
  for (int s = 1; s < job.num_shards; ++s) equal = equal && job.shards[s].row_bytes == job.shards[0].row_bytes;
  if (equal) return gather_equal_shards<Runner>(job, stream);
  std::int64_t offset = 0;
  for (int s = 0; s < job.num_shards; ++s) {
    GatherRows one = job;
    one.shards[0] = job.shards[s];
    one.num_shards = 1;
    one.out = static_cast<char*>(job.out) + offset;
    gather_equal_shards<Runner>(one, stream);
    offset += job.shards[s].row_bytes;
  }
}

template <class Runner>
void deliver_rows(const DeliverRows& job, Stream stream) {
  const std::int64_t bytes = job.count * core::size_of(job.dtype);
  if (bytes == 0) return;
  const std::uint32_t nan = job.dtype == core::DType::kFloat32    ? core::kCanonicalNaN
                            : job.dtype == core::DType::kBFloat16 ? core::kCanonicalBFloat16NaN * 0x10001u
                                                                  : core::kCanonicalFloat16NaN * 0x10001u;
  with_chunk(common_alignment({address_of(job.rows), address_of(job.out), bytes}), [&](auto chunk) {
    const DeliverChunks<chunk.value> body{job.rows, job.out, bytes / chunk.value, nan, job.skip};
    Runner::run(body, ceil_divide(body.chunks, body.kLanes * body.kInFlight), stream);
  });
}

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::cuda
