// What one lane does between the large jobs: operands in, decisions out.
#pragma once

#include <cstdint>

#include "cuda/launches.h"
#include "cuda/share.h"

namespace async_emb::cuda {
inline namespace ASYNC_EMB_ISA {

struct OneLaneBody {
  static constexpr int kLanes = 1;
  static constexpr bool kMeet = false;
  static constexpr int kStack = 0;
  static constexpr int kResident = 4;
};

struct LookForRefusals : OneLaneBody {
  OpenRound job;

  static const char* name() { return "open_round"; }
  ASYNC_EMB_INLINE void operator()(core::OneLane, Share) const {
    bool skip = job.also != nullptr && *job.also != 0;
    for (int rank = 0; rank < job.refusals.num_ranks; ++rank) {
      skip = skip || read_shared(&job.refusals.of_rank[rank]->refused_call) <= job.call;
    }
    *job.skip = skip ? 1 : 0;
  }
};

struct ReadPending : OneLaneBody {
  TakePending job;

  static const char* name() { return "take_pending"; }
  ASYNC_EMB_INLINE void operator()(core::OneLane, Share) const {
    const bool pending = job.is_bool ? *static_cast<const std::uint8_t*>(job.from) != 0
                                     : *static_cast<const std::int32_t*>(job.from) != 0;
    *job.pending = pending ? 1 : 0;
  }
};

struct ReadNumbers : OneLaneBody {
  TakeNumbers job;

  static const char* name() { return "take_numbers"; }
  ASYNC_EMB_INLINE void operator()(core::OneLane, Share) const {
    RuleNumbers numbers;
    if (job.learning_rate != nullptr) numbers.learning_rate = *job.learning_rate;
    if (job.eps != nullptr) numbers.eps = *job.eps;
    if (job.decay != nullptr) numbers.decay = *job.decay;
    if (job.weight_decay != nullptr) numbers.weight_decay = *job.weight_decay;
    if (job.max_grad_norm != nullptr) numbers.max_grad_norm = *job.max_grad_norm;
    if (job.step != nullptr) numbers.step = *job.step;
    if (job.seed != nullptr) numbers.seed = *job.seed;
    if (job.rounding_step != nullptr) numbers.rounding_step = *job.rounding_step;
    *job.numbers = numbers;
  }
};

struct WriteOutcome : OneLaneBody {
  DeliverOutcome job;

  static const char* name() { return "deliver_outcome"; }
  ASYNC_EMB_INLINE void operator()(core::OneLane, Share) const {
    Outcome outcome;
    if (job.outcome != nullptr && *job.skip == 0) outcome = *job.outcome;
    *job.norm = outcome.norm;
    *job.valid = outcome.valid;
    *job.pending = outcome.pending;
  }
};

struct WritePin : OneLaneBody {
  float value;
  float* pin;

  static const char* name() { return "write_pin"; }
  ASYNC_EMB_INLINE void operator()(core::OneLane, Share) const { *pin = value; }
};

struct WritePositions {
  static constexpr int kLanes = 32;
  static constexpr bool kMeet = false;
  static constexpr int kStack = 0;
  static constexpr int kResident = 4;
  static const char* name() { return "write_positions"; }

  std::int32_t* out;
  std::int64_t count;

  template <class Lanes>
  ASYNC_EMB_INLINE void operator()(Lanes lanes, Share share) const {
    for (std::int64_t i = share.lane_first(lanes); i < count; i += share.lane_step(lanes)) {
      out[i] = static_cast<std::int32_t>(i);
    }
  }
};

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::cuda
