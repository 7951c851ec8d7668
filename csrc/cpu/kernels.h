// The CPU launches of core's row loops, behind one table of function pointers per instruction set.
//
// Every function works on a range, so that a caller can split one job over threads without changing a bit of the
// result. All pointers are borrowed for the length of the call. Nothing here allocates, locks or throws.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace async_emb::cpu {

// One column shard of a table as a gather reads it: row i starts at data + i * row_stride_bytes.
struct ColumnShard {
  const void* data = nullptr;
  std::int64_t row_stride_bytes = 0;
  std::int64_t row_bytes = 0;  // bytes to copy from each row
};

// out[i] = the rows of every shard at ids[i], side by side in shard order; zeros where ids[i] < 0.
struct GatherRows {
  const std::int32_t* ids = nullptr;
  std::int64_t count = 0;
  const ColumnShard* shards = nullptr;
  int num_shards = 0;
  void* out = nullptr;
  std::int64_t out_row_stride_bytes = 0;
};

// Occurrences of each distinct id of a batch: ids `unique[u]`, ascending, occur at token positions
// positions[offsets[u]] .. positions[offsets[u + 1] - 1], ascending. Negative ids occur nowhere.
struct UniqueIds {
  const std::int32_t* ids = nullptr;  // [count]
  std::int64_t count = 0;
  std::int32_t* unique = nullptr;     // [count]
  std::int32_t* offsets = nullptr;    // [count + 1]
  std::int32_t* positions = nullptr;  // [count]
  std::uint64_t* scratch = nullptr;   // [unique_ids_scratch(count)]
};
// Elements of scratch that UniqueIds needs for `count` ids.
std::int64_t unique_ids_scratch(std::int64_t count);

// sums[u] = canonical fp32 sum of gradient rows over the occurrences of u, for u in [begin, end), and the sums of
// squares of each whole dyadic subtree of columns that this shard covers.
struct SegmentSum {
  core::DType grad_dtype = core::DType::kFloat32;
  const void* grads = nullptr;       // this shard's columns of row p start at element p * grad_row_stride
  std::int64_t grad_row_stride = 0;  // elements
  std::int64_t column_begin = 0;     // first logical column of this shard in the whole row: its place in the tree
  std::int64_t width = 0;            // logical columns of this shard (0 is legal)
  const std::int32_t* offsets = nullptr;
  const std::int32_t* positions = nullptr;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  float* sums = nullptr;  // row u starts at u * width
  // Subtree k of row u goes to subtree_sums[u * subtree_stride + k], k in column order; count as core::count_subtrees
  // gives.
  float* subtree_sums = nullptr;
  std::int64_t subtree_stride = 0;
};

// statistics[u] = root of the dyadic tree whose subtrees are subtree_sums[u * count .. (u + 1) * count - 1], in column
// order; levels[k] is the log2 of the columns that subtree k covers.
struct RowStatistic {
  const float* subtree_sums = nullptr;
  std::int64_t count = 0;
  const std::int8_t* levels = nullptr;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  float* statistics = nullptr;
};

// The row-wise Adagrad rule on rows unique[u], u in [begin, end), columns of one shard. A row whose (clipped) statistic
// is 0 is not touched. Plain form when last_step is null, lazy form otherwise.
struct RowwiseAdagrad {
  core::DType table_dtype = core::DType::kFloat32;
  void* table = nullptr;  // row i starts at element i * table_row_stride
  std::int64_t table_row_stride = 0;
  std::int64_t column_begin = 0;      // first logical column of this shard: the stochastic generator's column counter
  std::int64_t width = 0;             // logical columns of this shard
  std::int64_t logical_width = 0;     // D of the rule: logical columns of the whole row
  float* row_state = nullptr;         // [rows]
  std::int32_t* last_step = nullptr;  // [rows], or null
  const std::int32_t* unique = nullptr;
  const float* sums = nullptr;  // as SegmentSum writes them
  const float* statistics = nullptr;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  float learning_rate = 0;
  float eps = 0;
  float decay = 1;         // plain: factor of the state; lazy: accum_decay_rate
  float weight_decay = 1;  // plain: factor of the weights; lazy: weight_decay_rate
  std::int32_t step = 0;   // lazy form only
  float clip = 1;          // min(1, max_grad_norm / norm)
  bool stochastic_rounding = false;
  std::uint32_t seed = 0;
  std::uint32_t rounding_step = 0;
};

struct Kernels {
  const char* name;  // "baseline", "avx2", "avx512"
  void (*gather_rows)(const GatherRows&);
  std::int64_t (*unique_ids)(const UniqueIds&);  // number of distinct ids
  void (*segment_sum)(const SegmentSum&);
  void (*row_statistic)(const RowStatistic&);
  float (*dyadic_sum)(const float* values, std::int64_t count);
  std::int64_t (*rowwise_adagrad)(const RowwiseAdagrad&);  // number of fp16 stores that saturated
};

// The table for this machine, chosen once: the best instruction set it has, or the one that ASYNC_EMB_CPU names
// (baseline, avx2, avx512). A name that is unknown or that this machine lacks throws std::runtime_error.
const Kernels& kernels();

// Tables that this machine can run, baseline first. For tests.
int available_kernels(const Kernels* const** tables);

}  // namespace async_emb::cpu
