// The optimizer's rule on the kept rows of a shard: kRows rows at once for each group, one pack a lane at a time.
//
// Lane r works the rule out for row r, while the weights are on their way, and tells the others.
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
  // ptxas needs more registers for the same code where the compute capability is 10.0 or higher.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  static constexpr int kFewer = 1;
#else
  static constexpr int kFewer = 0;
#endif
  static constexpr int kResident =
      N * sizeof(Weight) == 16 ? (kStochastic ? 2 : 3 - kFewer) : (kStochastic ? 3 : 4) - kFewer;
  static const char* name() { return "rowwise_adagrad"; }

  RowwiseAdagrad job;
  GradRows grads;                           // where single occurrences are read, and
  const std::int32_t* offsets = nullptr;    // null where they are not
  const std::int32_t* positions = nullptr;  // [tokens]
  static_assert(kRows <= kLanes);

  static constexpr bool kIsFloat = std::is_same_v<Weight, float>;

  // Rows of the table, and the token of each that occurs once; -1 where its sum is to be read.
  struct Rows {
    std::int32_t row[kRows];
    std::int32_t single[kRows];
  };

  // One pack of each row: the weights, and the sum of gradients, or in its first half the only gradient as it lies in
  // memory.
  struct Packs {
    RawPack<N, Weight> weights[kRows];
    core::FloatPack<N> sums[kRows];
  };

  ASYNC_EMB_INLINE Weight* row_of(std::int32_t row) const {
    return static_cast<Weight*>(job.table) + row * job.table_row_stride;
  }

  // Reads at column 0 behind the end, and the last row again behind the last: no load waits for a branch.
  ASYNC_EMB_INLINE void load(Packs& packs, const Rows& rows, const std::uint32_t (&places)[kRows],
                             std::int64_t column) const {
    column = column < job.width ? column : 0;
    const void* from[kRows];
    ASYNC_EMB_UNROLL
    for (int r = 0; r < kRows; ++r) {
      from[r] = job.sums + static_cast<std::int64_t>(places[r]) * job.width + column;
      if (rows.single[r] >= 0) from[r] = grads.template at<Weight>(rows.single[r]) + column;
    }
    ASYNC_EMB_UNROLL
    for (int r = 0; r < kRows; ++r) {
      packs.weights[r] = core::load_pack<RawPack<N, Weight>>(row_of(rows.row[r]) + column);
      if constexpr (kIsFloat) {
        packs.sums[r] = core::load_pack<core::FloatPack<N>>(from[r]);
      } else if constexpr (N == 1) {
        packs.sums[r] = rows.single[r] < 0 ? *static_cast<const float*>(from[r])
                                           : core::float_of(std::uint32_t{*static_cast<const std::uint16_t*>(from[r])});
      } else {
        using Half = core::FloatPack<N / 2>;
        const Half first = core::load_pack<Half>(from[r]);
        Half second{};
        if (rows.single[r] < 0) second = core::load_pack<Half>(static_cast<const float*>(from[r]) + N / 2);
        ASYNC_EMB_UNROLL
        for (int i = 0; i < N / 2; ++i) {
          packs.sums[r][i] = first[i];
          packs.sums[r][N / 2 + i] = second[i];
        }
      }
    }
  }

  // The sum of gradients that load() left in a pack.
  ASYNC_EMB_INLINE static core::FloatPack<N> sum_of(core::FloatPack<N> pack, std::int32_t single) {
    if constexpr (!kIsFloat) {
      RawPack<N, Weight> raw;
      if constexpr (N == 1) {
        raw = static_cast<std::uint16_t>(core::bits_of(pack));
      } else {
        ASYNC_EMB_UNROLL
        for (int i = 0; i < N / 2; ++i) raw[i] = core::bits_of(pack[i]);
      }
      if (single >= 0) return widened<N, Weight>(raw);
    }
    return pack;
  }

  // What lane r knows of row r of a coming turn, as it was read.
  struct Ahead {
    std::int32_t row;
    Edges edges;
  };

  template <class Lanes>
  ASYNC_EMB_INLINE Ahead ahead(Lanes lanes, std::uint32_t u, std::uint32_t kept) const {
    const int mine = lanes.index() < kRows ? lanes.index() : kRows - 1;
    Ahead ahead{job.unique[place_of(u + mine, kept)], {0, 0}};
    if (offsets != nullptr) ahead.edges = edges_at<kRows>(lanes, offsets, u, kept);
    return ahead;
  }

  // The token of a row that occurs once, -1 for others.
  ASYNC_EMB_INLINE std::int32_t single_of(const Edges& edges) const {
    return offsets != nullptr && edges.end - edges.first == 1 ? positions[edges.first] : -1;
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
    const auto kept = static_cast<std::uint32_t>(job.counts->kept);
    core::BitsPack<N> saturated{};
    const auto step = static_cast<std::uint32_t>(share.step) * kRows;
    auto u = static_cast<std::uint32_t>(share.first) * kRows;
    // As in FirstBlocks: rows are known two turns ahead, and the tokens of single occurrences one.
    Ahead turn{};
    Ahead next{};
    std::int32_t single = -1;
    if (u < kept) {
      turn = ahead(lanes, u, kept);
      next = ahead(lanes, u + step, kept);
      single = single_of(turn.edges);
    }
    for (; u < kept; u += step) {
      // Places among the kept rows; behind the last one it is read again, and not touched.
      std::uint32_t places[kRows];
      ASYNC_EMB_UNROLL
      for (int r = 0; r < kRows; ++r) places[r] = place_of(u + r, kept);
      // The row that is this lane's to decide on.
      const std::uint32_t mine = u + lanes.index();
      const bool is_mine = lanes.index() < kRows && mine < kept;
      const std::int32_t my_row = turn.row;
      // Everything on its way before anything is worked out.
      const float statistic = is_mine ? job.statistics[mine] : 0.0f;
      const float state = is_mine ? job.row_state[my_row] : 0.0f;
      const std::int32_t last_step = is_mine && rule.lazy ? job.last_step[my_row] : 0;
      Rows rows;
      ASYNC_EMB_UNROLL
      for (int r = 0; r < kRows; ++r) {
        rows.row[r] = broadcast(lanes, my_row, r);
        rows.single[r] = broadcast(lanes, single, r);
      }
      single = single_of(next.edges);
      turn = next;
      next = ahead(lanes, u + 2 * step, kept);
      std::int64_t column = lanes.index() * N;
      Packs packs{};
      if (job.width > 0) load(packs, rows, places, column);
      core::RowUpdate my_update{};
      if (is_mine) {
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
          const core::FloatPack<N> values = core::new_weights<N>(updates[r], clip, widened<N, Weight>(packs.weights[r]),
                                                                 sum_of(packs.sums[r], rows.single[r]));
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
        if (column < job.width) load(packs, rows, places, column);
      }
    }
    const std::uint32_t total = lanes.sum(core::total_of<N>(saturated));
    if (total > 0 && lanes.index() == 0) add_atomically(&job.counters->saturated, total);
  }
};

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::cuda
