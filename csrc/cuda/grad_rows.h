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
