// The body of every kernel, compiled once for each instruction set: the launches of core's row loops on one lane.
//
// Each kernels_*.cpp includes the standard headers, sets its target, names ASYNC_EMB_ISA and then includes this file
// once. Code here uses no templates of the standard library: the linker would merge those across instruction sets.
#include "core/adagrad.h"
#include "core/copy_rows.h"
#include "core/dtype.h"
#include "core/dyadic.h"
#include "core/lanes.h"
#include "core/sums.h"
#include "core/unique.h"
#include "cpu/float_mode.h"
#include "cpu/kernels.h"

namespace async_emb::cpu {
inline namespace ASYNC_EMB_ISA {

using core::BFloat16;
using core::DType;
using core::Float16;
using core::OneLane;

// A body must not be inlined into its entry: the compiler does not know that arithmetic depends on the mode set there,
// and could move it across.
#define ASYNC_EMB_BODY __attribute__((noinline)) static

inline constexpr std::int64_t kLine = 64;

// Asks for the first lines of a row. Long rows are left to the hardware after that, which by then has seen the stream.
inline constexpr std::int64_t kPrefetchedBytes = 512;

ASYNC_EMB_INLINE void prefetch_read(const unsigned char* row, std::int64_t bytes) {
  for (std::int64_t b = 0; b < bytes && b < kPrefetchedBytes; b += kLine) ASYNC_EMB_PREFETCH_READ(row + b);
}

ASYNC_EMB_INLINE void prefetch_write(const unsigned char* row, std::int64_t bytes) {
  for (std::int64_t b = 0; b < bytes && b < kPrefetchedBytes; b += kLine) ASYNC_EMB_PREFETCH_WRITE(row + b);
}

// ---- gather_rows

inline constexpr std::int64_t kGatherAhead = 16;

// kBytes > 0: every shard has rows of that many bytes.
template <int kBytes>
ASYNC_EMB_BODY void gather(const GatherRows& args) {
  const OneLane lanes;
  for (std::int64_t i = 0; i < args.count; ++i) {
    const std::int32_t later = i + kGatherAhead < args.count ? args.ids[i + kGatherAhead] : -1;
    const std::int32_t id = args.ids[i];
    unsigned char* out = static_cast<unsigned char*>(args.out) + i * args.out_row_stride_bytes;
    for (int s = 0; s < args.num_shards; ++s) {
      const ColumnShard& shard = args.shards[s];
      const unsigned char* const data = static_cast<const unsigned char*>(shard.data);
      const std::int64_t bytes = kBytes > 0 ? kBytes : shard.row_bytes;
      if (later >= 0) prefetch_read(data + later * shard.row_stride_bytes, bytes);
      if (id >= 0) {
        core::copy_row<OneLane, kBytes>(lanes, data + id * shard.row_stride_bytes, bytes, out);
      } else {
        core::zero_row<OneLane, kBytes>(lanes, bytes, out);
      }
      out += bytes;
    }
  }
}

void gather_rows(const GatherRows& args) {
  std::int64_t bytes = args.num_shards > 0 ? args.shards[0].row_bytes : 0;
  for (int s = 1; s < args.num_shards; ++s) {
    if (args.shards[s].row_bytes != bytes) bytes = 0;
  }
  switch (bytes) {
    case 16:
      return gather<16>(args);
    case 32:
      return gather<32>(args);
    case 64:
      return gather<64>(args);
    case 128:
      return gather<128>(args);
    case 256:
      return gather<256>(args);
    case 512:
      return gather<512>(args);
    default:
      return gather<0>(args);
  }
}

// ---- unique_ids

std::int64_t unique_ids(const UniqueIds& args) {
  return core::unique_ids(args.ids, args.count, args.unique, args.offsets, args.positions, args.scratch);
}

// ---- segment_sum

// Gradient rows to ask for ahead: about as many lines as a core can await at once, since more would be dropped or
// evict.
inline constexpr std::int64_t kGradBytesAhead = 1536;

ASYNC_EMB_INLINE std::int64_t grads_ahead(std::int64_t row_bytes) {
  const std::int64_t ahead = kGradBytesAhead / (row_bytes + 1) + 1;
  return ahead > 16 ? 16 : ahead;
}

template <class Grad>
ASYNC_EMB_BODY void sum_segments(const SegmentSum& args) {
  const OneLane lanes;
  const Grad* const grads = static_cast<const Grad*>(args.grads);
  const std::int64_t row_bytes = args.width * static_cast<std::int64_t>(sizeof(Grad));
  std::int8_t levels[core::kMaxSubtrees];
  const int subtrees = core::subtree_levels(args.column_begin, args.column_begin + args.width, levels);
  const std::int64_t ahead = grads_ahead(row_bytes);
  const std::int64_t last = args.begin < args.end ? args.offsets[args.end] : 0;
  for (std::int64_t u = args.begin; u < args.end; ++u) {
    const std::int64_t first = args.offsets[u];
    const std::int64_t occurrences = args.offsets[u + 1] - first;
    for (std::int64_t i = first + ahead; i < first + ahead + occurrences && i < last; ++i) {
      prefetch_read(reinterpret_cast<const unsigned char*>(grads + args.positions[i] * args.grad_row_stride),
                    row_bytes);
    }
    float* const sums = args.sums + u * args.width;
    core::sum_segment(lanes, grads, args.grad_row_stride, args.width, args.positions + first, occurrences, sums);
    core::sum_squares(lanes, sums, levels, subtrees, args.subtree_sums + u * args.subtree_stride);
  }
}

void segment_sum(const SegmentSum& args) {
  const ScopedFloatMode mode;
  switch (args.grad_dtype) {
    case DType::kFloat32:
      return sum_segments<float>(args);
    case DType::kBFloat16:
      return sum_segments<BFloat16>(args);
    case DType::kFloat16:
      return sum_segments<Float16>(args);
  }
}

// ---- row_statistic, dyadic_sum

ASYNC_EMB_BODY void finish_rows(const RowStatistic& args) {
  for (std::int64_t u = args.begin; u < args.end; ++u) {
    args.statistics[u] = core::finish_tree(args.subtree_sums + u * args.count, args.levels, args.count);
  }
}

void row_statistic(const RowStatistic& args) {
  const ScopedFloatMode mode;
  finish_rows(args);
}

ASYNC_EMB_BODY float sum_dyadic(const float* values, std::int64_t count) {
  return core::dyadic_sum(OneLane(), values, count);
}

float dyadic_sum(const float* values, std::int64_t count) {
  const ScopedFloatMode mode;
  return sum_dyadic(values, count);
}

// ---- rowwise_adagrad

inline constexpr std::int64_t kTableAhead = 12;

template <class Weight, bool kStochastic>
ASYNC_EMB_BODY std::int64_t update_rows(const RowwiseAdagrad& args) {
  const OneLane lanes;
  const core::AdagradRule rule{args.learning_rate,
                               args.eps,
                               args.decay,
                               args.weight_decay,
                               static_cast<float>(args.logical_width),
                               args.clip,
                               args.step,
                               args.last_step != nullptr};
  Weight* const table = static_cast<Weight*>(args.table);
  const std::int64_t row_bytes = args.width * static_cast<std::int64_t>(sizeof(Weight));
  std::int64_t saturated = 0;
  for (std::int64_t u = args.begin; u < args.end; ++u) {
    if (u + kTableAhead < args.end) {
      const std::int32_t later = args.unique[u + kTableAhead];
      prefetch_write(reinterpret_cast<const unsigned char*>(table + later * args.table_row_stride), row_bytes);
      ASYNC_EMB_PREFETCH_WRITE(args.row_state + later);
      if (args.last_step != nullptr) ASYNC_EMB_PREFETCH_WRITE(args.last_step + later);
    }
    const std::int64_t row = args.unique[u];
    const std::int32_t last_step = args.last_step != nullptr ? args.last_step[row] : 0;
    const core::RowUpdate update = core::row_update(rule, args.statistics[u], args.row_state[row], last_step);
    if (!update.touched) continue;
    args.row_state[row] = update.state;
    if (args.last_step != nullptr) args.last_step[row] = args.step;
    const float* const grads = args.sums + u * args.width;
    Weight* const weights = table + row * args.table_row_stride;
    if constexpr (kStochastic) {
      saturated +=
          core::update_columns_stochastic(lanes, update, args.clip, grads, args.column_begin, args.width,
                                          static_cast<std::uint32_t>(row), args.seed, args.rounding_step, weights);
    } else {
      saturated +=
          core::update_columns_nearest<OneLane, core::kPack>(lanes, update, args.clip, grads, 0, args.width, weights);
    }
  }
  return saturated;
}

std::int64_t rowwise_adagrad(const RowwiseAdagrad& args) {
  const ScopedFloatMode mode;
  switch (args.table_dtype) {
    case DType::kFloat32:
      return update_rows<float, false>(args);
    case DType::kBFloat16:
      return args.stochastic_rounding ? update_rows<BFloat16, true>(args) : update_rows<BFloat16, false>(args);
    case DType::kFloat16:
      return args.stochastic_rounding ? update_rows<Float16, true>(args) : update_rows<Float16, false>(args);
  }
  return 0;
}

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::cpu
