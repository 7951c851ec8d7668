// One update run through a table of CUDA launches, as a pipeline would put the jobs on a stream.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "cpu_naive.h"
#include "cuda/launches.h"

namespace async_emb::testing {

using cpu::Outcome;
using cpu::Problem;

// Memory as a device gives it: at a multiple of 256 bytes, or `shift` bytes behind one, and filled with a pattern that
// is no number, so that what nobody wrote shows.
class Buffer {
 public:
  explicit Buffer(std::int64_t bytes, std::int64_t shift = 0)
      : memory_(static_cast<std::size_t>(bytes + shift + 512), 0xff), shift_(shift) {}
  Buffer(const void* from, std::size_t bytes, std::int64_t shift = 0)
      : Buffer(static_cast<std::int64_t>(bytes), shift) {
    if (bytes > 0) std::memcpy(at(), from, bytes);
  }

  unsigned char* at() {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    return memory_.data() + (256 - address % 256) % 256 + shift_;
  }
  template <class Value>
  Value* as() {
    return reinterpret_cast<Value*>(at());
  }

 private:
  std::vector<unsigned char> memory_;
  std::int64_t shift_;
};

template <class Value>
Buffer buffer_of(const std::vector<Value>& values, std::int64_t shift = 0) {
  return Buffer(values.data(), values.size() * sizeof(Value), shift);
}

// That a buffer's pattern is still there.
inline void expect_untouched(const float* from, std::int64_t count, const char* what) {
  const auto touched = [](float value) { return core::bits_of(value) != 0xffffffffu; };
  EXPECT_EQ(std::count_if(from, from + count, touched), 0) << what;
}

// How a problem is laid out, none of which may change a bit.
struct Layout {
  int ranks = 1;
  int blocks = 1;               // of gradient rows
  std::int64_t shift = 0;       // bytes, of tables and gradients
  std::int64_t sums_shift = 0;  // bytes
  std::int64_t limit = std::numeric_limits<std::int32_t>::max();
  std::vector<std::int32_t> pending = {1};  // of each rank; as many as are given
  std::int32_t skip = 0;
  bool leaves_singles = false;
};

struct Result {
  Outcome outcome;
  cuda::Outcome decided;
  cuda::BatchCounts counts;
  cuda::Counters counters;
  cuda::IdFinding finding;
  std::vector<std::vector<float>> sums;  // of every rank
  std::vector<float> subtree_sums;       // [distinct, subtrees], in column order
};

// The problem's `clip` becomes a limit of the norm that asks for it: pass `max_grad_norm` where it clips.
inline Result run_launches(const cuda::Launches& launches, const Problem& p, const Layout& layout = {},
                           const float* max_grad_norm = nullptr) {
  const core::ColumnLayout columns(layout.ranks, (p.width + layout.ranks - 1) / layout.ranks * layout.ranks, p.width);
  const auto tokens = static_cast<std::int64_t>(p.ids.size());
  const std::int64_t element = core::size_of(p.dtype);
  Result result{{p.table, p.state, p.last_step, {}, 0, 0}, {}, {}, {}, {}, {}, {}};

  Buffer ids = buffer_of(p.ids), unique(tokens * 4), offsets((tokens + 1) * 4), positions(tokens * 4);
  Buffer sort_workspace(launches.unique_ids_workspace(tokens));
  cuda::UniqueIds index;
  index.ids = ids.as<std::int32_t>();
  index.count = tokens;
  index.rows = p.rows;
  index.limit = layout.limit;
  index.unique = unique.as<std::int32_t>();
  index.offsets = offsets.as<std::int32_t>();
  index.positions = positions.as<std::int32_t>();
  index.counts = &result.counts;
  index.workspace = sort_workspace.at();
  index.workspace_bytes = launches.unique_ids_workspace(tokens);
  index.finding = &result.finding;
  index.step = 12;
  launches.unique_ids(index, nullptr);
  const std::int64_t kept = result.counts.kept;

  // Blocks of gradient rows lie anywhere; the rows of a block are dense.
  const std::int64_t tokens_per_block = std::max<std::int64_t>((tokens + layout.blocks - 1) / layout.blocks, 1);
  std::vector<Buffer> blocks;
  for (int b = 0; b < layout.blocks; ++b) {
    const std::int64_t begin = std::min(b * tokens_per_block, tokens);
    const std::int64_t end = std::min(begin + tokens_per_block, tokens);
    blocks.emplace_back(p.grads.data() + begin * p.width * element,
                        static_cast<std::size_t>((end - begin) * p.width * element), layout.shift);
  }

  std::vector<Buffer> sums, subtree_sums;
  std::vector<cuda::SegmentSum> sum_jobs;
  const std::vector<std::int8_t> levels = columns.levels();
  cuda::RowStatistic statistic;
  for (int rank = 0; rank < layout.ranks; ++rank) {
    const std::int64_t width = columns.width(rank);
    sums.emplace_back(tokens * width * 4, layout.sums_shift);
    subtree_sums.emplace_back(tokens * columns.subtree_count(rank) * 4);
    Buffer workspace(launches.segment_sum_workspace(tokens, width));
    cuda::SegmentSum job;
    job.grad_dtype = p.dtype;
    for (int b = 0; b < layout.blocks; ++b) job.blocks[b] = blocks[static_cast<std::size_t>(b)].at();
    job.num_blocks = layout.blocks;
    job.tokens_per_block = tokens_per_block;
    job.grad_row_stride = p.width;
    job.column_begin = columns.column_begin(rank);
    job.width = width;
    job.offsets = index.offsets;
    job.positions = index.positions;
    job.counts = &result.counts;
    job.max_segments = std::min(tokens, layout.limit);
    job.max_tokens = tokens;
    job.sums = sums.back().as<float>();
    job.subtree_sums = subtree_sums.back().as<float>();
    job.workspace = workspace.at();
    job.workspace_bytes = launches.segment_sum_workspace(tokens, width);
    job.skip = &layout.skip;
    job.leaves_singles = layout.leaves_singles;
    launches.segment_sum(job, nullptr);
    sum_jobs.push_back(job);
    expect_untouched(job.sums + kept * width, (tokens - kept) * width, "sums behind the last kept row");
    const std::int64_t subtrees = columns.subtree_count(rank);
    expect_untouched(job.subtree_sums + kept * subtrees, (tokens - kept) * subtrees, "subtree sums behind it");
    statistic.subtree_sums[rank] = job.subtree_sums;
    statistic.subtrees[rank] = static_cast<std::int32_t>(columns.subtree_count(rank));
    result.sums.emplace_back(job.sums, job.sums + kept * width);
  }
  for (std::int64_t u = 0; u < kept; ++u) {
    for (int rank = 0; rank < layout.ranks; ++rank) {
      const float* const mine = statistic.subtree_sums[rank] + u * statistic.subtrees[rank];
      result.subtree_sums.insert(result.subtree_sums.end(), mine, mine + statistic.subtrees[rank]);
    }
  }

  Buffer statistics(tokens * 4), decide_workspace(launches.decide_workspace(tokens));
  statistic.num_ranks = layout.ranks;
  statistic.levels = levels.data();
  statistic.counts = &result.counts;
  statistic.max_segments = std::min(tokens, layout.limit);
  statistic.statistics = statistics.as<float>();
  statistic.skip = &layout.skip;
  launches.row_statistic(statistic, nullptr);
  expect_untouched(statistic.statistics + kept, tokens - kept, "statistics behind the last kept row");
  result.outcome.statistics.assign(statistic.statistics, statistic.statistics + kept);

  cuda::RuleNumbers numbers;
  cuda::TakeNumbers take;
  take.learning_rate = &p.learning_rate;
  take.eps = &p.eps;
  take.decay = &p.decay;
  take.weight_decay = &p.weight_decay;
  take.max_grad_norm = max_grad_norm;
  take.step = &p.step;
  take.seed = &p.seed;
  take.rounding_step = &p.rounding_step;
  take.numbers = &numbers;
  launches.take_numbers(take, nullptr);

  cuda::Decide decide;
  decide.statistics = statistic.statistics;
  decide.counts = &result.counts;
  decide.max_segments = statistic.max_segments;
  decide.workspace = decide_workspace.at();
  decide.workspace_bytes = launches.decide_workspace(tokens);
  for (std::size_t rank = 0; rank < layout.pending.size(); ++rank) decide.pending[rank] = &layout.pending[rank];
  decide.num_ranks = static_cast<int>(layout.pending.size());
  decide.numbers = &numbers;
  decide.lazy = p.lazy;
  decide.clips = max_grad_norm != nullptr;
  decide.skip = &layout.skip;
  decide.outcome = &result.decided;
  decide.counters = &result.counters;
  launches.decide(decide, nullptr);

  // Each rank has a shard of its own, and its own copy of the optimizer's state.
  for (int rank = 0; rank < layout.ranks; ++rank) {
    const std::int64_t width = columns.width(rank);
    const std::int64_t stride = columns.shard_width();
    Buffer shard(p.rows * stride * element, layout.shift);
    const auto row_of = [&](std::int64_t row) { return shard.at() + row * stride * element; };
    const auto table_row = [&](std::int64_t row) {
      return result.outcome.table.data() + (row * p.width + columns.column_begin(rank)) * element;
    };
    for (std::int64_t row = 0; width > 0 && row < p.rows; ++row) {
      std::memcpy(row_of(row), table_row(row), static_cast<std::size_t>(width * element));
    }
    std::vector<float> state = p.state;
    std::vector<std::int32_t> last_step = p.last_step;
    cuda::RowwiseAdagrad job;
    job.table_dtype = p.dtype;
    job.table = shard.at();
    job.table_row_stride = stride;
    job.column_begin = columns.column_begin(rank);
    job.width = width;
    job.logical_width = p.width;
    job.row_state = state.data();
    job.last_step = p.lazy ? last_step.data() : nullptr;
    job.unique = index.unique;
    job.sums = sums[static_cast<std::size_t>(rank)].as<float>();
    job.sum_job = &sum_jobs[static_cast<std::size_t>(rank)];
    job.statistics = statistic.statistics;
    job.counts = &result.counts;
    job.max_segments = statistic.max_segments;
    job.numbers = &numbers;
    job.outcome = &result.decided;
    job.stochastic_rounding = p.stochastic;
    job.counters = &result.counters;
    launches.rowwise_adagrad(job, nullptr);
    for (std::int64_t row = 0; width > 0 && row < p.rows; ++row) {
      std::memcpy(table_row(row), row_of(row), static_cast<std::size_t>(width * element));
      for (std::int64_t i = width * element; i < stride * element; ++i) {
        EXPECT_EQ(row_of(row)[i], 0xff) << "padding columns of row " << row << " were written";
      }
    }
    if (rank > 0) {
      EXPECT_EQ(0, std::memcmp(state.data(), result.outcome.state.data(), state.size() * 4)) << "rank " << rank;
      EXPECT_EQ(last_step, result.outcome.last_step) << "rank " << rank;
    }
    result.outcome.state = state;
    result.outcome.last_step = last_step;
  }
  result.outcome.saturated = static_cast<std::int64_t>(result.counters.saturated);
  return result;
}

// `norm` belongs to the expected outcome.
inline void expect_same(const Result& got, const Outcome& expected, float norm, const std::string& what) {
  EXPECT_EQ(cpu::bits(got.outcome.statistics), cpu::bits(expected.statistics)) << what;
  EXPECT_EQ(core::bits_of(got.decided.norm), core::bits_of(norm)) << what;
  EXPECT_EQ(cpu::bits(got.outcome.state), cpu::bits(expected.state)) << what;
  EXPECT_EQ(got.outcome.last_step, expected.last_step) << what;
  EXPECT_TRUE(got.outcome.table == expected.table) << what << ": the tables differ";
  EXPECT_EQ(got.outcome.saturated, expected.saturated) << what;
}

// The CPU's outcome knows the sum of all statistics, not its root.
inline void expect_same(const Result& got, const Outcome& expected, const std::string& what) {
  expect_same(got, expected, core::gradient_norm(expected.total), what);
}

inline std::string describe(const Problem& p, const Layout& layout = {}) {
  return std::string(core::name_of(p.dtype)) + " width " + std::to_string(p.width) + (p.lazy ? " lazy" : "") +
         (p.stochastic ? " stochastic" : "") + " ranks " + std::to_string(layout.ranks) + " blocks " +
         std::to_string(layout.blocks) + " shift " + std::to_string(layout.shift);
}

// The sums and subtree sums of each rank as the CPU gives them.
inline void expect_same_sums(const Result& got, const Problem& p, const Layout& layout, const std::string& what) {
  const core::ColumnLayout columns(layout.ranks, (p.width + layout.ranks - 1) / layout.ranks * layout.ranks, p.width);
  const cpu::Kernels& kernels = *cpu::all_kernels().back();
  const auto tokens = static_cast<std::int64_t>(p.ids.size());
  std::vector<std::int32_t> unique(p.ids.size()), offsets(p.ids.size() + 1), positions(p.ids.size());
  std::vector<std::uint64_t> scratch(static_cast<std::size_t>(cpu::unique_ids_scratch(tokens)));
  const std::int64_t distinct =
      kernels.unique_ids({p.ids.data(), tokens, unique.data(), offsets.data(), positions.data(), scratch.data()});
  const std::int64_t subtrees = columns.total_subtrees();
  std::vector<float> subtree_sums(static_cast<std::size_t>(distinct * subtrees));
  for (int rank = 0; rank < layout.ranks; ++rank) {
    std::vector<float> sums(static_cast<std::size_t>(distinct * columns.width(rank)));
    cpu::SegmentSum job;
    job.grad_dtype = p.dtype;
    job.grad_row_stride = p.width;
    job.column_begin = columns.column_begin(rank);
    job.grads = p.grads.data() + job.column_begin * core::size_of(p.dtype);
    job.width = columns.width(rank);
    job.offsets = offsets.data();
    job.positions = positions.data();
    job.end = distinct;
    job.sums = sums.data();
    job.subtree_sums = subtree_sums.data() + columns.subtree_begin(rank);
    job.subtree_stride = subtrees;
    kernels.segment_sum(job);
    EXPECT_EQ(cpu::bits(got.sums[static_cast<std::size_t>(rank)]), cpu::bits(sums)) << what << " rank " << rank;
  }
  EXPECT_EQ(cpu::bits(got.subtree_sums), cpu::bits(subtree_sums)) << what;
}

}  // namespace async_emb::testing
