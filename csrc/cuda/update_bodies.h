// The optimizer's rule on the kept rows of a shard: kRows rows at once for each group, one pack a lane at a time.
//
// Every lane works the rule out for its rows, which costs no more than one lane doing so; one lane stores the state,
// once all have read it.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/adagrad.h"
#include "cuda/grad_rows.h"
#include "cuda/launches.h"
#include "cuda/raw_pack.h"
#include "cuda/share.h"

namespace async_emb::cuda {
inline namespace ASYNC_EMB_ISA {

// The numbers that round N columns from logical column `first` on, which is a multiple of four unless N is 1.
template <int N>
ASYNC_EMB_INLINE core::BitsPack<N> rounding_numbers(std::uint32_t seed, std::uint32_t rounding_step, std::uint32_t row,
                                                    std::uint32_t first) {
  static_assert(N == 1 || N % 4 == 0);
  constexpr int kGroups = N == 1 ? 1 : N / 4;
  std::uint32_t drawn[4 * kGroups];
  core::rounding_bits<kGroups>(seed, rounding_step, row, first / 4, drawn);
  if constexpr (N == 1) {
    const std::uint32_t even = first % 4 < 2 ? drawn[0] : drawn[2];
    const std::uint32_t odd = first % 4 < 2 ? drawn[1] : drawn[3];
    return first % 2 == 0 ? even : odd;
  } else {
    core::BitsPack<N> numbers{};
    ASYNC_EMB_UNROLL
    for (int k = 0; k < N; ++k) numbers[k] = drawn[k];
    return numbers;
  }
}

template <class Weight, int N, int kLanesOfGroup, int kRows, bool kStochastic>
struct UpdateRows {
  static constexpr int kLanes = kLanesOfGroup;
  static constexpr bool kMeet = true;
  static constexpr int kStack = 0;
  static constexpr int kResident = N * sizeof(Weight) == 16 ? (kStochastic ? 2 : 3) : (kStochastic ? 3 : 4);
  static const char* name() { return "rowwise_adagrad"; }

  RowwiseAdagrad job;
  GradRows grads;                           // where single occurrences are read, and
  const std::int32_t* offsets = nullptr;    // null where they are not
  const std::int32_t* positions = nullptr;  // [tokens]
  static_assert(kRows <= kLanes);

  static constexpr bool kIsFloat = std::is_same_v<Weight, float>;

  // Rows of the table, -1 for none, and the token of each that occurs once, -1 where its sum is to be read.
  struct Rows {
    std::int32_t row[kRows];
    std::int32_t single[kRows];
  };

  // One pack of each row: the weights, and the sum of gradients or, lodged there, the only gradient.
  struct Packs {
    RawPack<N, Weight> weights[kRows];
    core::FloatPack<N> sums[kRows];
  };

  ASYNC_EMB_INLINE Weight* row_of(std::int32_t row) const {
    return static_cast<Weight*>(job.table) + row * job.table_row_stride;
  }

  ASYNC_EMB_INLINE void load(Packs& packs, const Rows& rows, std::int64_t u, std::int64_t column) const {
    ASYNC_EMB_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (rows.row[r] < 0 || column >= job.width) continue;
      packs.weights[r] = core::load_pack<RawPack<N, Weight>>(row_of(rows.row[r]) + column);
      const float* sum = job.sums + (u + r) * job.width + column;
      if constexpr (kIsFloat) {
        if (rows.single[r] >= 0) sum = grads.template at<float>(rows.single[r]) + column;
        packs.sums[r] = core::load_pack<core::FloatPack<N>>(sum);
      } else if (rows.single[r] >= 0) {
        const Weight* const single = grads.template at<Weight>(rows.single[r]) + column;
        packs.sums[r] = lodged<N>(core::load_pack<core::HalvesPack<N>>(single));
      } else {
        packs.sums[r] = core::load_pack<core::FloatPack<N>>(sum);
      }
    }
  }

  template <class Lanes>
  ASYNC_EMB_INLINE static std::int32_t broadcast(Lanes lanes, std::int32_t value, int lane) {
    const float bits = core::float_of(static_cast<std::uint32_t>(value));
    return static_cast<std::int32_t>(core::bits_of(lanes.broadcast(bits, lane)));
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
      // Of the row that is this lane's to decide on; -1 for none.
      const std::int64_t mine = u + lanes.index();
      const std::int32_t my_row = lanes.index() < kRows && mine < kept ? job.unique[mine] : -1;
      std::int32_t my_single = -1;
      if (offsets != nullptr && my_row >= 0) {
        const std::int32_t first = offsets[mine];
        if (offsets[mine + 1] - first == 1) my_single = positions[first];
      }
      Rows rows;
      ASYNC_EMB_UNROLL
      for (int r = 0; r < kRows; ++r) {
        rows.row[r] = broadcast(lanes, my_row, r);
        rows.single[r] = broadcast(lanes, my_single, r);
      }
      // Everything on its way before anything is worked out.
      const float statistic = my_row >= 0 ? job.statistics[mine] : 0.0f;
      const float state = my_row >= 0 ? job.row_state[my_row] : 0.0f;
      const std::int32_t last_step = my_row >= 0 && rule.lazy ? job.last_step[my_row] : 0;
      std::int64_t column = lanes.index() * N;
      Packs packs{};
      load(packs, rows, u, column);
      core::RowUpdate my_update{};
      if (my_row >= 0) {
        my_update = core::row_update(rule, statistic, state, last_step);
        if (my_update.touched) {
          job.row_state[my_row] = my_update.state;
          if (rule.lazy) job.last_step[my_row] = rule.step;
        }
      }
      core::RowUpdate updates[kRows];
      ASYNC_EMB_UNROLL
      for (int r = 0; r < kRows; ++r) {
        updates[r].touched = broadcast(lanes, my_update.touched ? 1 : 0, r) != 0;
        updates[r].weight_factor = lanes.broadcast(my_update.weight_factor, r);
        updates[r].step_size = lanes.broadcast(my_update.step_size, r);
      }
      for (; column < job.width;) {
        ASYNC_EMB_UNROLL
        for (int r = 0; r < kRows; ++r) {
          if (!updates[r].touched) continue;
          core::FloatPack<N> sums = packs.sums[r];
          if constexpr (!kIsFloat) {
            if (rows.single[r] >= 0) sums = widened<N>(dislodged<N>(sums), Weight{});
          }
          const core::FloatPack<N> values =
              core::new_weights<N>(updates[r], clip, widened<N>(packs.weights[r], Weight{}), sums);
          Weight* const to = row_of(rows.row[r]) + column;
          if constexpr (kStochastic) {
            const auto first = static_cast<std::uint32_t>(job.column_begin + column);
            core::store_stochastic<N>(
                values, rounding_numbers<N>(seed, rounding_step, static_cast<std::uint32_t>(rows.row[r]), first), to,
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
