// What one lane does between the large jobs: operands in, decisions out.
#pragma once

#include <cstddef>
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

struct WriteWord : OneLaneBody {
  SpeakToPeers job;

  static const char* name() { return "speak_to_peers"; }
  ASYNC_EMB_INLINE void operator()(core::OneLane, Share) const {
    PeerWord word;
    for (int rank = 0; rank < job.refusals.num_ranks; ++rank) {
      const Refusal* const refusal = job.refusals.of_rank[rank];
      if (refusal == nullptr) continue;
      const std::int64_t call = read_shared(&refusal->refused_call);
      if (call > job.call || call >= word.refusal.refused_call) continue;
      word.refusal = *refusal;
      word.refusal.refused_call = call;
      word.rank = rank;
    }
    for (int i = 0; i < job.num_findings; ++i) {
      const IdFinding& finding = *job.findings[i];
      if (finding.step != job.step) continue;
      if (word.finding.step == 0 || finding.position < word.finding.position) word.finding = finding;
    }
    if (job.numbers != nullptr) word.numbers = *job.numbers;
    *job.word = word;
  }
};

struct ReadWords : OneLaneBody {
  HearPeers job;

  static const char* name() { return "hear_peers"; }
  ASYNC_EMB_INLINE void operator()(core::OneLane, Share) const {
    if (read_shared(&job.own->refused_call) == kRefusedByHost) {
      *job.skip = 1;
      return;
    }
    for (int process = 0; process < job.num_processes; ++process) {
      if (job.words[process] == nullptr) continue;
      const PeerWord& word = *job.words[process];
      if (word.refusal.refused_call != kNeverRefused) keep(word);
      if (job.finding != nullptr && word.finding.step != 0) keep(word.finding);
      if (job.numbers != nullptr) compare(word.numbers, process);
    }
  }

 private:
  ASYNC_EMB_INLINE void keep(const PeerWord& word) const {
    *job.skip = 1;
    Refusal* const known = job.refusals[word.rank];
    if (read_shared(&known->refused_call) != kNeverRefused) return;
    known->kind = word.refusal.kind;
    known->pin = word.refusal.pin;
    known->position = word.refusal.position;
    known->given = word.refusal.given;
    known->armed = word.refusal.armed;
    write_last(word.refusal.refused_call, &known->refused_call);
  }
  ASYNC_EMB_INLINE void keep(const IdFinding& finding) const {
    IdFinding& known = *job.finding;
    if (known.step == 0 || (known.step == finding.step && finding.position < known.position)) known = finding;
  }
  ASYNC_EMB_INLINE void compare(const RuleNumbers& theirs, int process) const {
    static_assert(sizeof(RuleNumbers) % sizeof(std::uint32_t) == 0);
    const auto* const a = reinterpret_cast<const std::uint32_t*>(job.numbers);
    const auto* const b = reinterpret_cast<const std::uint32_t*>(&theirs);
    for (std::size_t i = 0; i < sizeof(RuleNumbers) / sizeof(std::uint32_t); ++i) {
      if (a[i] == b[i]) continue;
      *job.skip = 1;
      RuleDifference* const known = job.difference;
      if (read_shared(&known->step) != 0) return;
      known->process = process;
      known->number = static_cast<std::int32_t>(i);
      known->mine = a[i];
      known->theirs = b[i];
      write_last(job.step, &known->step);
      return;
    }
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
