// One update of a table, run through a kernel table and, separately, written down as the documentation words it.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "core/adagrad.h"
#include "core/dtype.h"
#include "core/layout.h"
#include "cpu/kernels.h"

namespace async_emb::cpu {

using core::DType;

// A table with its optimizer state, one batch and the numbers of one step. Tables and gradients are dense rows of
// `dtype`.
struct Problem {
  DType dtype = DType::kFloat32;
  std::int64_t rows = 0;
  std::int64_t width = 0;
  std::vector<unsigned char> table;
  std::vector<float> state;
  std::vector<std::int32_t> last_step;
  std::vector<std::int32_t> ids;
  std::vector<unsigned char> grads;
  float learning_rate = 0.05f;
  float eps = 1e-8f;
  float decay = 0.9f;
  float weight_decay = 0.99f;
  bool lazy = false;
  std::int32_t step = 0;
  float clip = 1;
  bool stochastic = false;
  std::uint32_t seed = 0x12345678u;
  std::uint32_t rounding_step = 42;
};

// What an update leaves.
struct Outcome {
  std::vector<unsigned char> table;
  std::vector<float> state;
  std::vector<std::int32_t> last_step;
  std::vector<float> statistics;
  float total = 0;
  std::int64_t saturated = 0;
};

inline float read(DType dtype, const std::vector<unsigned char>& data, std::int64_t element) {
  const unsigned char* at = data.data() + element * core::size_of(dtype);
  if (dtype == DType::kFloat32) return core::load_pack<float>(at);
  const std::uint32_t half = core::load_pack<std::uint16_t>(at);
  return dtype == DType::kBFloat16 ? core::float_of_bfloat16<1>(half) : core::float_of_float16<1>(half);
}

inline void write(DType dtype, std::vector<unsigned char>& data, std::int64_t element, float value) {
  unsigned char* at = data.data() + element * core::size_of(dtype);
  std::uint32_t saturated = 0;
  if (dtype == DType::kFloat32) return core::store_pack(value, at);
  const std::uint32_t half =
      dtype == DType::kBFloat16 ? core::nearest_bfloat16<1>(value) : core::nearest_float16<1>(value, saturated);
  core::store_pack(static_cast<std::uint16_t>(half), at);
}

inline std::vector<unsigned char> encode(DType dtype, const std::vector<float>& values) {
  std::vector<unsigned char> data(values.size() * static_cast<std::size_t>(core::size_of(dtype)));
  for (std::size_t i = 0; i < values.size(); ++i) write(dtype, data, static_cast<std::int64_t>(i), values[i]);
  return data;
}

inline Problem zero_problem(DType dtype, std::int64_t rows, std::int64_t width, std::vector<std::int32_t> ids,
                            const std::vector<float>& grads) {
  Problem p;
  p.dtype = dtype;
  p.rows = rows;
  p.width = width;
  p.table.assign(static_cast<std::size_t>(rows * width * core::size_of(dtype)), 0);
  p.state.assign(static_cast<std::size_t>(rows), 0.0f);
  p.last_step.assign(static_cast<std::size_t>(rows), 0);
  p.ids = std::move(ids);
  p.grads = encode(dtype, grads);
  p.eps = 0;
  p.learning_rate = 1;
  p.decay = 1;
  p.weight_decay = 1;
  return p;
}

// Ids with many repeats, dropped ids, zero rows, negative zeros, denormals and values of very different size.
inline Problem random_problem(DType dtype, std::int64_t width, unsigned seed, std::size_t tokens = 300) {
  std::mt19937 random(seed);
  Problem p = zero_problem(dtype, 50, width, {}, {});
  std::uniform_real_distribution<float> unit(-1.0f, 1.0f);
  for (std::int64_t i = 0; i < p.rows * width; ++i) write(dtype, p.table, i, unit(random));
  for (auto& state : p.state) state = std::fabs(unit(random));
  for (auto& last_step : p.last_step) last_step = static_cast<std::int32_t>(random() % 120);
  for (std::size_t i = 0; i < tokens; ++i) {
    const std::uint32_t draw = random();
    p.ids.push_back(draw % 11 == 0 ? -1 : draw % 3 == 0 ? 17 : static_cast<std::int32_t>(draw % 50));
  }
  std::vector<float> grads(tokens * static_cast<std::size_t>(width));
  for (auto& grad : grads) {
    const std::uint32_t draw = random() % 16;
    grad = draw == 0   ? 0.0f
           : draw == 1 ? -0.0f
           : draw == 2 ? unit(random) * 1e-40f
           : draw == 3 ? unit(random) * 1e4f
                       : unit(random);
  }
  p.grads = encode(dtype, grads);
  p.learning_rate = 0.05f;
  p.eps = 1e-8f;
  p.decay = 0.9f;
  p.weight_decay = 0.99f;
  p.step = 100;
  return p;
}

inline float padded_root(std::vector<float> values) {
  std::size_t size = 1;
  while (size < values.size()) size *= 2;
  values.resize(size, 0.0f);
  for (; size > 1; size /= 2) {
    for (std::size_t i = 0; i < size / 2; ++i) values[i] = values[2 * i] + values[2 * i + 1];
  }
  return core::canonical(values[0]);
}

inline Outcome run_naive(const Problem& p) {
  Outcome out{p.table, p.state, p.last_step, {}, 0, 0};
  std::map<std::int32_t, std::vector<std::int64_t>> occurrences;
  for (std::size_t i = 0; i < p.ids.size(); ++i) {
    if (p.ids[i] >= 0) occurrences[p.ids[i]].push_back(static_cast<std::int64_t>(i));
  }
  for (const auto& [id, tokens] : occurrences) {
    std::vector<float> sums, squares;
    for (std::int64_t column = 0; column < p.width; ++column) {
      float total = 0;
      for (std::size_t begin = 0; begin < tokens.size(); begin += 32) {
        float block = read(p.dtype, p.grads, tokens[begin] * p.width + column);
        for (std::size_t i = begin + 1; i < tokens.size() && i < begin + 32; ++i) {
          block = block + read(p.dtype, p.grads, tokens[i] * p.width + column);
        }
        total = begin == 0 ? block : total + block;
      }
      sums.push_back(total);
      squares.push_back(total * total);
    }
    const float statistic = padded_root(squares);
    out.statistics.push_back(statistic);
    const float clipped = (statistic * p.clip) * p.clip;
    if (clipped == 0.0f) continue;
    float decay = p.decay, weight_decay = p.weight_decay;
    if (p.lazy) {
      const float elapsed = static_cast<float>(std::max(0, p.step - p.last_step[id]));
      decay = core::exp32(-(p.decay * elapsed));
      weight_decay = core::exp32(-(p.weight_decay * elapsed));
      out.last_step[id] = p.step;
    }
    const float decayed = p.state[id] * decay;
    const float mean = clipped / static_cast<float>(p.width);
    out.state[id] = core::canonical(decayed + mean);
    const float denominator = std::sqrt(out.state[id]) + p.eps;
    const float step_size = denominator == 0.0f ? 0.0f : p.learning_rate / denominator;
    for (std::int64_t column = 0; column < p.width; ++column) {
      const std::int64_t element = id * p.width + column;
      const float kept = read(p.dtype, p.table, element) * weight_decay;
      const float moved = step_size * (sums[static_cast<std::size_t>(column)] * p.clip);
      const float value = kept - moved;
      const core::Philox4 draw = core::philox4x32(
          {{static_cast<std::uint32_t>(id), static_cast<std::uint32_t>(column / 4), p.rounding_step, 0}}, p.seed,
          0x61656d62u);
      const std::uint32_t r = draw.x[column % 4];
      unsigned char* const at = out.table.data() + element * core::size_of(p.dtype);
      std::uint32_t saturated = 0;
      if (p.dtype == DType::kFloat32) {
        core::store_pack(core::canonical(value), at);
      } else if (p.dtype == DType::kBFloat16) {
        const std::uint32_t half =
            p.stochastic ? core::stochastic_bfloat16<1>(value, r) : core::nearest_bfloat16<1>(value);
        core::store_pack(static_cast<std::uint16_t>(half), at);
      } else {
        const std::uint32_t half = p.stochastic ? core::stochastic_float16<1>(value, r, saturated)
                                                : core::nearest_float16<1>(value, saturated);
        core::store_pack(static_cast<std::uint16_t>(half), at);
      }
      out.saturated += saturated;
    }
  }
  out.total = padded_root(out.statistics);
  return out;
}

// Runs the problem with its columns over `ranks` ranks (emb_width is the width rounded up), every range cut into pieces
// of `piece` unique ids. Every rank keeps its own optimizer state, and all must end alike.
inline Outcome run_kernels(const Kernels& kernels, const Problem& p, int ranks = 1, std::int64_t piece = 1 << 30) {
  const core::ColumnLayout layout(ranks, (std::max<std::int64_t>(p.width, 1) + ranks - 1) / ranks * ranks,
                                  std::max<std::int64_t>(p.width, 1));
  const std::int64_t tokens = static_cast<std::int64_t>(p.ids.size());
  std::vector<std::int32_t> unique(p.ids.size()), offsets(p.ids.size() + 1), positions(p.ids.size());
  std::vector<std::uint64_t> scratch(static_cast<std::size_t>(unique_ids_scratch(tokens)));
  const std::int64_t distinct =
      kernels.unique_ids({p.ids.data(), tokens, unique.data(), offsets.data(), positions.data(), scratch.data()});

  const auto in_pieces = [&](auto args, const auto& kernel) {
    std::int64_t saturated = 0;
    for (args.begin = 0; args.begin < distinct; args.begin = args.end) {
      args.end = std::min(distinct, args.begin + piece);
      saturated += kernel(args);
    }
    return saturated;
  };

  const std::vector<std::int8_t> levels = p.width == 0 ? std::vector<std::int8_t>{} : layout.levels();
  const std::int64_t stride = static_cast<std::int64_t>(levels.size());
  std::vector<float> subtree_sums(static_cast<std::size_t>(distinct * stride));
  std::vector<std::vector<float>> sums;
  for (int rank = 0; rank < ranks; ++rank) {
    SegmentSum args;
    args.grad_dtype = p.dtype;
    args.grad_row_stride = p.width;
    args.column_begin = p.width == 0 ? 0 : layout.column_begin(rank);
    args.grads = p.grads.data() + args.column_begin * core::size_of(p.dtype);
    args.width = p.width == 0 ? 0 : layout.width(rank);
    args.offsets = offsets.data();
    args.positions = positions.data();
    sums.emplace_back(static_cast<std::size_t>(distinct * args.width));
    args.sums = sums.back().data();
    args.subtree_sums = subtree_sums.data() + (p.width == 0 ? 0 : layout.subtree_begin(rank));
    args.subtree_stride = stride;
    in_pieces(args, [&](const SegmentSum& a) { return kernels.segment_sum(a), 0; });
  }

  Outcome out{p.table, p.state, p.last_step, std::vector<float>(static_cast<std::size_t>(distinct)), 0, 0};
  RowStatistic statistic;
  statistic.subtree_sums = subtree_sums.data();
  statistic.count = stride;
  statistic.levels = levels.data();
  statistic.statistics = out.statistics.data();
  in_pieces(statistic, [&](const RowStatistic& a) { return kernels.row_statistic(a), 0; });
  out.total = kernels.dyadic_sum(out.statistics.data(), distinct);

  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<float> state = p.state;
    std::vector<std::int32_t> last_step = p.last_step;
    RowwiseAdagrad args;
    args.table_dtype = p.dtype;
    args.column_begin = p.width == 0 ? 0 : layout.column_begin(rank);
    args.width = p.width == 0 ? 0 : layout.width(rank);
    args.table = out.table.data() + args.column_begin * core::size_of(p.dtype);
    args.table_row_stride = p.width;
    args.logical_width = p.width;
    args.row_state = state.data();
    args.last_step = p.lazy ? last_step.data() : nullptr;
    args.unique = unique.data();
    args.sums = sums[static_cast<std::size_t>(rank)].data();
    args.statistics = out.statistics.data();
    args.learning_rate = p.learning_rate;
    args.eps = p.eps;
    args.decay = p.decay;
    args.weight_decay = p.weight_decay;
    args.step = p.step;
    args.clip = p.clip;
    args.stochastic_rounding = p.stochastic;
    args.seed = p.seed;
    args.rounding_step = p.rounding_step;
    out.saturated += in_pieces(args, kernels.rowwise_adagrad);
    if (rank > 0) {
      EXPECT_EQ(0, std::memcmp(state.data(), out.state.data(), state.size() * 4)) << "rank " << rank;
    }
    out.state = state;
    out.last_step = last_step;
  }
  return out;
}

inline std::vector<std::uint32_t> bits(const std::vector<float>& values) {
  std::vector<std::uint32_t> all;
  for (const float value : values) all.push_back(core::bits_of(value));
  return all;
}

inline void expect_same_bits(const Outcome& got, const Outcome& expected, const std::string& what) {
  EXPECT_EQ(bits(got.statistics), bits(expected.statistics)) << what;
  EXPECT_EQ(core::bits_of(got.total), core::bits_of(expected.total)) << what;
  EXPECT_EQ(bits(got.state), bits(expected.state)) << what;
  EXPECT_EQ(got.last_step, expected.last_step) << what;
  EXPECT_TRUE(got.table == expected.table) << what << ": the tables differ";
  EXPECT_EQ(got.saturated, expected.saturated) << what;
}

// Every kernel table that this machine can run.
inline std::vector<const Kernels*> all_kernels() {
  const Kernels* const* tables = nullptr;
  const int count = available_kernels(&tables);
  return std::vector<const Kernels*>(tables, tables + count);
}

}  // namespace async_emb::cpu
