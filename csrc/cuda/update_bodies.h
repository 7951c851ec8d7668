// The optimizer's rule on the kept rows of a shard: kRows rows at once for each group, one pack a lane at a time.
//
// Every lane works the rule out for its rows, which costs no more than one lane doing so; one lane stores the state,
// once all have read it.
#pragma once

#include <cstdint>

#include "core/adagrad.h"
#include "cuda/launches.h"
#include "cuda/raw_pack.h"
#include "cuda/share.h"

namespace async_emb::cuda {
inline namespace ASYNC_EMB_ISA {

// The numbers that round N columns from logical column `first` on.
template <int N>
ASYNC_EMB_INLINE core::BitsPack<N> rounding_numbers(std::uint32_t seed, std::uint32_t rounding_step, std::uint32_t row,
                                                    std::uint32_t first) {
  core::BitsPack<N> numbers{};
  if constexpr (N % 4 == 0) {
    if (first % 4 == 0) {
      std::uint32_t drawn[N];
      core::rounding_bits<N / 4>(seed, rounding_step, row, first / 4, drawn);
      ASYNC_EMB_UNROLL
      for (int k = 0; k < N; ++k) numbers[k] = drawn[k];
      return numbers;
    }
  }
  for (int k = 0; k < N; ++k) {
    const std::uint32_t column = first + static_cast<std::uint32_t>(k);
    std::uint32_t drawn[4];
    core::rounding_bits<1>(seed, rounding_step, row, column / 4, drawn);
    const std::uint32_t in_group = column % 4;
    const std::uint32_t number =
        in_group < 2 ? (in_group == 0 ? drawn[0] : drawn[1]) : (in_group == 2 ? drawn[2] : drawn[3]);
    if constexpr (N == 1) {
      numbers = number;
    } else {
      ASYNC_EMB_UNROLL
      for (int i = 0; i < N; ++i) numbers[i] = i == k ? number : numbers[i];
    }
  }
  return numbers;
}

template <class Weight, int N, int kLanesOfGroup, int kRows, bool kStochastic>
struct UpdateRows {
  static constexpr int kLanes = kLanesOfGroup;
  static constexpr bool kMeet = true;
  static constexpr int kStack = 0;
  static const char* name() { return "rowwise_adagrad"; }

  RowwiseAdagrad job;

  // One pack of each row.
  struct Packs {
    RawPack<N, Weight> weights[kRows];
    core::FloatPack<N> grads[kRows];
  };

  ASYNC_EMB_INLINE Weight* row_of(std::int32_t row) const {
    return static_cast<Weight*>(job.table) + row * job.table_row_stride;
  }

  ASYNC_EMB_INLINE void load(Packs& packs, const std::int32_t (&rows)[kRows], std::int64_t u,
                             std::int64_t column) const {
    ASYNC_EMB_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (rows[r] < 0 || column >= job.width) continue;
      packs.weights[r] = core::load_pack<RawPack<N, Weight>>(row_of(rows[r]) + column);
      packs.grads[r] = core::load_pack<core::FloatPack<N>>(job.sums + (u + r) * job.width + column);
    }
  }

  template <class Lanes>
  ASYNC_EMB_INLINE void operator()(Lanes lanes, Share share) const {
    if (job.outcome->valid == 0) return;
    const RuleNumbers& numbers = *job.numbers;
    const float clip = job.outcome->clip;
    const core::AdagradRule rule{numbers.learning_rate,
                                 numbers.eps,
                                 numbers.decay,
                                 numbers.weight_decay,
                                 static_cast<float>(job.logical_width),
                                 clip,
                                 numbers.step,
                                 job.last_step != nullptr};
    const std::uint32_t seed = numbers.seed;
    const std::uint32_t rounding_step = numbers.rounding_step;
    const std::int64_t kept = job.counts->kept;
    core::BitsPack<N> saturated{};
    for (std::int64_t u = share.first * kRows; u < kept; u += share.step * kRows) {
      std::int32_t rows[kRows];  // -1 for none
      ASYNC_EMB_UNROLL
      for (int r = 0; r < kRows; ++r) rows[r] = u + r < kept ? job.unique[u + r] : -1;
      std::int64_t column = lanes.index() * N;
      Packs packs{};
      load(packs, rows, u, column);
      core::RowUpdate updates[kRows] = {};
      ASYNC_EMB_UNROLL
      for (int r = 0; r < kRows; ++r) {
        if (rows[r] < 0) continue;
        const std::int32_t last_step = rule.lazy ? job.last_step[rows[r]] : 0;
        updates[r] = core::row_update(rule, job.statistics[u + r], job.row_state[rows[r]], last_step);
      }
      lanes.synchronize();  // all lanes have read the state
      if (lanes.index() == 0) {
        ASYNC_EMB_UNROLL
        for (int r = 0; r < kRows; ++r) {
          if (!updates[r].touched) continue;
          job.row_state[rows[r]] = updates[r].state;
          if (rule.lazy) job.last_step[rows[r]] = rule.step;
        }
      }
      for (; column < job.width;) {
        ASYNC_EMB_UNROLL
        for (int r = 0; r < kRows; ++r) {
          if (!updates[r].touched) continue;
          const core::FloatPack<N> values =
              core::new_weights<N>(updates[r], clip, widened<N>(packs.weights[r], Weight{}), packs.grads[r]);
          Weight* const to = row_of(rows[r]) + column;
          if constexpr (kStochastic) {
            const auto first = static_cast<std::uint32_t>(job.column_begin + column);
            core::store_stochastic<N>(
                values, rounding_numbers<N>(seed, rounding_step, static_cast<std::uint32_t>(rows[r]), first), to,
                saturated);
          } else {
            core::store_nearest<N>(values, to, saturated);
          }
        }
        column += N * Lanes::kCount;
        load(packs, rows, u, column);
      }
    }
    const std::uint32_t total = lanes.sum(core::total_of<N>(saturated));
    if (total > 0 && lanes.index() == 0) add_atomically(&job.counters->saturated, total);
  }
};

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::cuda
