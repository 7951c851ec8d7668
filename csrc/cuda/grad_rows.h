// Where the gradient row of a token lies: in the blocks that a SegmentSum names.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/fast_divide.h"
#include "cuda/launch_shape.h"
#include "cuda/launches.h"

namespace async_emb::cuda {
inline namespace ASYNC_EMB_ISA {

struct GradRows {
  const void* blocks[kMaxRanks] = {};
  int num_blocks = 0;
  FastDivide tokens_per_block;
  std::int64_t row_stride = 0;    // elements
  std::int64_t column_begin = 0;  // of the shard

  // The shard's first column of a token's row.
  template <class Grad>
  ASYNC_EMB_INLINE const Grad* at(std::int32_t position) const {
    const void* block = blocks[0];
    std::int64_t row = position;
    if (num_blocks > 1) {
      const std::uint32_t b = quotient(tokens_per_block, static_cast<std::uint32_t>(position));
      block = blocks[b];
      row -= static_cast<std::int64_t>(b) * tokens_per_block.divisor;
    }
    return static_cast<const Grad*>(block) + row * row_stride + column_begin;
  }
};

// Rows are counted without a sign, in 32 bits: registers are dear, and a turn may lie a few strides behind 2^31 - 1.
ASYNC_EMB_INLINE std::uint32_t place_of(std::uint32_t u, std::uint32_t kept) { return u < kept ? u : kept - 1; }

// Edges of the segment of one kept row.
struct Edges {
  std::int32_t first;
  std::int32_t end;
};

// The edges of the kRows segments from u on, one in each of the first lanes; behind the last kept one it is read again.
// Nothing is worked out from what is read, so that it can be asked for long before it is needed.
template <int kRows, class Lanes>
ASYNC_EMB_INLINE Edges edges_at(Lanes lanes, const std::int32_t* offsets, std::uint32_t u, std::uint32_t kept) {
  const std::uint32_t at = place_of(u + (lanes.index() < kRows ? lanes.index() : kRows - 1), kept);
  return Edges{offsets[at], offsets[at + 1]};
}

inline GradRows grad_rows_of(const SegmentSum& job) {
  GradRows rows;
  std::copy_n(job.blocks, job.num_blocks, rows.blocks);
  rows.num_blocks = job.num_blocks;
  rows.tokens_per_block = fast_divide(std::max<std::int64_t>(job.tokens_per_block, 1));
  rows.row_stride = job.grad_row_stride;
  rows.column_begin = job.column_begin;
  return rows;
}

// What all their addresses are multiples of, in elements; at most 16 bytes.
inline std::int64_t aligned_elements(const SegmentSum& job) {
  const std::int64_t element = core::size_of(job.grad_dtype);
  std::int64_t bits = (job.grad_row_stride | job.column_begin) * element;
  for (int b = 0; b < job.num_blocks; ++b) bits |= address_of(job.blocks[b]);
  return common_alignment({bits}) / element;
}

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::cuda
