// Row-wise Adagrad: one fp32 accumulator for a row, one rounding at the store of each weight.
//
//   a <- a * decay + ss / D;   s = lr / (sqrt(a) + eps), 0 where that denominator is 0;   w <- round(w * wd - s * G)
//
// Every operation is rounded to fp32. J. Duchi, E. Hazan, Y. Singer, "Adaptive subgradient methods", JMLR 12, 2011,
// with one accumulator for a row as in Facebook's DLRM (arXiv:1906.00091) and its FBGEMM kernels.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/exp.h"
#include "core/philox.h"
#include "core/platform.h"

namespace async_emb::core {
inline namespace ASYNC_EMB_ISA {

ASYNC_EMB_INLINE float square_root(float value) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(value);
#else
  return __builtin_sqrtf(value);
#endif
}

// The global gradient norm from the dyadic sum of all row statistics.
ASYNC_EMB_FN float gradient_norm(float sum_of_statistics) { return canonical(square_root(sum_of_statistics)); }

// min(1, max_grad_norm / norm), and 1 for a norm of 0.
ASYNC_EMB_FN float clip_factor(float max_grad_norm, float norm) {
  const float factor = max_grad_norm / norm;
  return factor < 1.0f ? factor : 1.0f;
}

// What the rule needs beside the row: the numbers of one update.
struct AdagradRule {
  float learning_rate;
  float eps;
  float decay;         // lazy: rate of decay of the state per step
  float weight_decay;  // lazy: rate of decay of the weights per step
  float logical_width;
  float clip;
  std::int32_t step;  // lazy form only
  bool lazy;
};

ASYNC_EMB_FN bool is_finite_and_not_negative(float value) { return value >= 0.0f && value <= 3.402823466e38f; }

// Whether an update may be applied with these numbers, which a schedule may have made anything of: one that is not
// finite, or negative, would spoil every row it touches. Two may be more: weight_decay as a factor, which is
// 1 - learning_rate * rate, may be negative, and a bound on the norm may be infinite.
ASYNC_EMB_FN bool can_be_applied(float learning_rate, float eps, float decay, float weight_decay, bool lazy,
                                 float max_grad_norm) {
  const float rate_or_size = lazy || weight_decay >= 0.0f ? weight_decay : -weight_decay;
  return is_finite_and_not_negative(learning_rate) && is_finite_and_not_negative(eps) &&
         is_finite_and_not_negative(decay) && is_finite_and_not_negative(rate_or_size) && max_grad_norm >= 0.0f;
}

// What the rule says about one row.
struct RowUpdate {
  bool touched;
  float state;
  float weight_factor;  // wd
  float step_size;      // s
};

ASYNC_EMB_INLINE RowUpdate row_update(const AdagradRule& rule, float statistic, float state, std::int32_t last_step) {
  const float clipped = (statistic * rule.clip) * rule.clip;
  if (clipped == 0.0f) return RowUpdate{false, state, 1.0f, 0.0f};
  float decay = rule.decay;
  float weight_factor = rule.weight_decay;
  if (rule.lazy) {
    const std::int64_t steps = static_cast<std::int64_t>(rule.step) - last_step;
    const float elapsed = static_cast<float>(steps < 0 ? 0 : steps > 0x7fffffff ? 0x7fffffff : steps);
    decay = exp32(-(rule.decay * elapsed));
    weight_factor = exp32(-(rule.weight_decay * elapsed));
  }
  const float new_state = canonical(state * decay + clipped / rule.logical_width);
  const float denominator = square_root(new_state) + rule.eps;
  const float step_size = denominator == 0.0f ? 0.0f : rule.learning_rate / denominator;
  return RowUpdate{true, new_state, weight_factor, step_size};
}

template <int N>
ASYNC_EMB_INLINE FloatPack<N> new_weights(const RowUpdate& update, float clip, FloatPack<N> weights,
                                          FloatPack<N> grads) {
  return weights * update.weight_factor - (grads * clip) * update.step_size;
}

// Columns [column, width) of a touched row, rounded to nearest, in packs of N and then in smaller ones. Returns this
// lane's number of saturated stores.
template <class Lanes, int N, class Weight>
ASYNC_EMB_INLINE std::uint32_t update_columns_nearest(Lanes lanes, const RowUpdate& update, float clip,
                                                      const float* grads, std::int64_t column, std::int64_t width,
                                                      Weight* weights) {
  BitsPack<N> saturated{};
  const std::int64_t end = width - (width - column) % (N * Lanes::kCount);
  for (std::int64_t i = column + lanes.index() * N; i < end; i += N * Lanes::kCount) {
    store_nearest<N>(new_weights<N>(update, clip, load<N>(weights + i), load<N>(grads + i)), weights + i, saturated);
  }
  std::uint32_t count = total_of<N>(saturated);
  if constexpr (N > 1) {
    count += update_columns_nearest<Lanes, N / 2>(lanes, update, clip, grads, end, width, weights);
  } else if constexpr (Lanes::kCount > 1) {
    const std::int64_t i = end + lanes.index();
    if (i < width) {
      BitsPack<1> last = 0;
      store_nearest<1>(new_weights<1>(update, clip, load<1>(weights + i), load<1>(grads + i)), weights + i, last);
      count += last;
    }
  }
  return count;
}

// The same, rounded stochastically. A lane takes whole groups of four logical columns, since one draw rounds four.
template <class Lanes, class Weight>
ASYNC_EMB_INLINE std::uint32_t update_columns_stochastic(Lanes lanes, const RowUpdate& update, float clip,
                                                         const float* grads, std::int64_t column_begin,
                                                         std::int64_t width, std::uint32_t row, std::uint32_t seed,
                                                         std::uint32_t rounding_step, Weight* weights) {
  constexpr int kGroups = Lanes::kCount == 1 ? 16 : 1;  // drawn together, so that one lane draws in vectors
  BitsPack<kPack> saturated{};
  BitsPack<1> saturated_singly = 0;
  const std::int64_t first_group = column_begin / 4 + lanes.index();
  for (std::int64_t group = first_group; group * 4 < column_begin + width; group += kGroups * Lanes::kCount) {
    std::uint32_t random[4 * kGroups];
    rounding_bits<kGroups>(seed, rounding_step, row, static_cast<std::uint32_t>(group), random);
    const std::int64_t first =
        group * 4 - column_begin;  // of the shard's columns; negative where a group straddles shards
    std::int64_t k = first < 0 ? -first : 0;
    const std::int64_t end = width - first < 4 * kGroups ? width - first : 4 * kGroups;
    for (; k + kPack <= end; k += kPack) {
      const std::int64_t i = first + k;
      store_stochastic<kPack>(new_weights<kPack>(update, clip, load<kPack>(weights + i), load<kPack>(grads + i)),
                              load_pack<BitsPack<kPack>>(random + k), weights + i, saturated);
    }
    for (; k < end; ++k) {
      const std::int64_t i = first + k;
      store_stochastic<1>(new_weights<1>(update, clip, load<1>(weights + i), load<1>(grads + i)), random[k],
                          weights + i, saturated_singly);
    }
  }
  return total_of<kPack>(saturated) + saturated_singly;
}

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::core
