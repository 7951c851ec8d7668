#include "context/column_sharded.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "core/adagrad.h"

namespace async_emb::context {
namespace {

// Below this a second thread costs more than it saves.
constexpr std::int64_t kBytesWorthAPart = 256 * 1024;
constexpr int kMostShardsOnStack = 64;

struct Range {
  std::int64_t begin;
  std::int64_t end;
};

Range cut(std::int64_t count, int part, int parts) { return {count * part / parts, count * (part + 1) / parts}; }

// Cuts the segments so that every part has about the same number of occurrences.
Range cut_segments(const BatchIds& batch, int part, int parts) {
  const auto* offsets = batch.offsets.as<std::int32_t>();
  const std::int64_t count = batch.unique_count;
  const std::int64_t occurrences = offsets[count];
  const auto edge = [&](int p) -> std::int64_t {
    if (p == parts) return count;
    return std::lower_bound(offsets, offsets + count, static_cast<std::int32_t>(occurrences * p / parts)) - offsets;
  };
  return {edge(part), edge(part + 1)};
}

}  // namespace

ColumnSharded::ColumnSharded(const ContextSpec& spec, std::vector<int> local_ranks)
    : spec_(spec),
      kernels_(cpu::kernels()),
      element_(core::size_of(spec.dtype)),
      layout_(spec.group_size, spec.emb_width, spec.logical_width),
      local_(std::move(local_ranks)),
      held_(PackedColumns::of_ranks(local_, spec.shard_width() * element_, spec.emb_width * element_)),
      levels_(layout_.levels()),
      arena_(spec, layout_, local_) {}

std::int64_t ColumnSharded::held_begin(int rank) const {
  return (std::find(local_.begin(), local_.end(), rank) - local_.begin()) * spec_.shard_width();
}

void ColumnSharded::gather_block(const std::int32_t* ids, std::int64_t count, std::span<const void* const> tables,
                                 char* out, bool side_by_side) const {
  std::array<cpu::ColumnShard, kMostShardsOnStack> on_stack;
  std::vector<cpu::ColumnShard> on_heap;
  if (local_.size() > on_stack.size()) on_heap.resize(local_.size());
  cpu::ColumnShard* shards = on_heap.empty() ? on_stack.data() : on_heap.data();
  const std::int64_t shard_bytes = spec_.shard_width() * element_;
  for (std::size_t i = 0; i < local_.size(); ++i) shards[i] = {tables[local_[i]], shard_bytes, shard_bytes};

  // One gather for each run of neighbours: all of them, but where a mesh mixes the devices of several processes.
  for (std::size_t begin = 0; begin < local_.size();) {
    std::size_t end = begin + 1;
    while (end < local_.size() && (side_by_side || local_[end] == local_[end - 1] + 1)) ++end;
    cpu::GatherRows job;
    job.ids = ids;
    job.count = count;
    job.shards = shards + begin;
    job.num_shards = static_cast<int>(end - begin);
    job.out_row_stride_bytes = side_by_side ? held_width() * element_ : spec_.emb_width * element_;
    job.out = out + (side_by_side ? 0 : local_[begin] * shard_bytes);
    kernels_.gather_rows(job);
    begin = end;
  }
}

void ColumnSharded::gather(const BatchIds& batch, std::span<const void* const> tables, int rank, int part, int parts,
                           void* destination) const {
  const auto [begin, end] = cut(spec_.tokens_per_rank, part, parts);
  const std::int32_t* ids = batch.ids.as<std::int32_t>() + spec_.token_blocks[rank] * spec_.tokens_per_rank + begin;
  gather_block(ids, end - begin, tables, static_cast<char*>(destination) + begin * spec_.emb_width * element_, false);
}

void ColumnSharded::gather_for_peer(const BatchIds& batch, std::span<const void* const> tables, int rank,
                                    void* destination) const {
  gather_block(batch.ids.as<std::int32_t>() + spec_.token_blocks[rank] * spec_.tokens_per_rank, spec_.tokens_per_rank,
               tables, static_cast<char*>(destination), true);
}

void ColumnSharded::stage(int rank, const void* grads, int part, int parts) {
  const auto [begin, end] = cut(spec_.tokens_per_rank, part, parts);
  const char* from = static_cast<const char*>(grads) + begin * spec_.emb_width * element_;
  char* own = arena_.grads.as<char>() + (spec_.token_blocks[rank] * spec_.tokens_per_rank + begin) * held_.bytes();
  if (held_width() == spec_.emb_width) {
    std::memcpy(own, from, static_cast<std::size_t>((end - begin) * held_.bytes()));
  } else {
    held_.pack(from, end - begin, own);
  }
}

void ColumnSharded::unstage(int rank, void* grads) const {
  held_.unpack(arena_.grads.as<char>() + spec_.token_blocks[rank] * spec_.tokens_per_rank * held_.bytes(),
               spec_.tokens_per_rank, grads);
}

void ColumnSharded::fill_refused(void* destination) const {
  const std::int64_t count = spec_.tokens_per_rank * spec_.emb_width;
  switch (spec_.dtype) {
    case core::DType::kFloat32:
      std::fill_n(static_cast<std::uint32_t*>(destination), count, core::kCanonicalNaN);
      break;
    case core::DType::kBFloat16:
      std::fill_n(static_cast<std::uint16_t*>(destination), count, core::kCanonicalBFloat16NaN);
      break;
    case core::DType::kFloat16:
      std::fill_n(static_cast<std::uint16_t*>(destination), count, core::kCanonicalFloat16NaN);
      break;
  }
}

void ColumnSharded::index(BatchIds& batch) {
  std::lock_guard lock(sorting_);
  cpu::UniqueIds job;
  job.ids = batch.ids.as<std::int32_t>();
  job.count = spec_.tokens();
  job.unique = batch.unique.as<std::int32_t>();
  job.offsets = batch.offsets.as<std::int32_t>();
  job.positions = batch.positions.as<std::int32_t>();
  job.scratch = arena_.sort_scratch.as<std::uint64_t>();
  batch.unique_count = kernels_.unique_ids(job);
}

void ColumnSharded::sum(const BatchIds& batch, int rank, int part, int parts) const {
  const auto [begin, end] = cut_segments(batch, part, parts);
  cpu::SegmentSum job;
  job.grad_dtype = spec_.dtype;
  job.grads = arena_.grads.as<char>() + held_begin(rank) * element_;
  job.grad_row_stride = held_width();
  job.column_begin = layout_.column_begin(rank);
  job.width = layout_.width(rank);
  job.offsets = batch.offsets.as<std::int32_t>();
  job.positions = batch.positions.as<std::int32_t>();
  job.begin = begin;
  job.end = end;
  job.sums = arena_.sums[rank].as<float>();
  job.subtree_sums = arena_.subtree_sums.as<float>() + layout_.subtree_begin(rank);
  job.subtree_stride = static_cast<std::int64_t>(levels_.size());
  kernels_.segment_sum(job);
}

void ColumnSharded::statistics(std::int64_t begin, std::int64_t end) const {
  cpu::RowStatistic job;
  job.subtree_sums = arena_.subtree_sums.as<float>();
  job.count = static_cast<std::int64_t>(levels_.size());
  job.levels = levels_.data();
  job.begin = begin;
  job.end = end;
  job.statistics = arena_.statistics.as<float>();
  kernels_.row_statistic(job);
}

float ColumnSharded::norm(const BatchIds& batch) const {
  return core::gradient_norm(kernels_.dyadic_sum(arena_.statistics.as<float>(), batch.unique_count));
}

std::int64_t ColumnSharded::apply(const BatchIds& batch, const UpdateRule& rule, float norm,
                                  const UpdateRound::Rank& buffers, int rank, int part, int parts) const {
  const auto [begin, end] = cut(batch.unique_count, part, parts);
  cpu::RowwiseAdagrad job;
  job.table_dtype = spec_.dtype;
  job.table = buffers.table;
  job.table_row_stride = spec_.shard_width();
  job.column_begin = layout_.column_begin(rank);
  job.width = layout_.width(rank);
  job.logical_width = spec_.logical_width;
  job.row_state = buffers.row_state;
  job.last_step = rule.lazy ? buffers.last_step : nullptr;
  job.unique = batch.unique.as<std::int32_t>();
  job.sums = arena_.sums[rank].as<float>();
  job.statistics = arena_.statistics.as<float>();
  job.begin = begin;
  job.end = end;
  job.learning_rate = rule.learning_rate;
  job.eps = rule.eps;
  job.decay = rule.decay;
  job.weight_decay = rule.weight_decay;
  job.step = rule.step;
  job.clip = rule.clips ? core::clip_factor(rule.max_grad_norm, norm) : 1.0f;
  job.stochastic_rounding = rule.stochastic_rounding;
  job.seed = rule.seed;
  job.rounding_step = rule.rounding_step;
  return kernels_.rowwise_adagrad(job);
}

int ColumnSharded::parts_for(std::int64_t bytes, int threads) const {
  const int ranks = static_cast<int>(local_.size());
  const int share = (threads + ranks - 1) / ranks;
  return static_cast<int>(std::clamp<std::int64_t>(bytes / kBytesWorthAPart, 1, share));
}

std::int64_t ColumnSharded::sum_bytes(int rank) const { return spec_.tokens() * layout_.width(rank) * element_; }

}  // namespace async_emb::context
