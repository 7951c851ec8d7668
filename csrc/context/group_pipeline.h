// What the host does with the pipeline of one group of ranks, wherever its tables live: reads, restores, ends it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "context/failure.h"
#include "context/round.h"
#include "context/spec.h"
#include "context/stats.h"

namespace async_emb::context {

// The first id (in token order of the earliest step) that the policy `error` met, or a batch with too many distinct
// ids.
struct IdProblem {
  std::int64_t step = 0;
  std::int64_t position = 0;  // in the global token array
  std::int64_t id = 0;
  std::int64_t rows = 0;
  bool too_many_unique = false;
  std::int64_t unique = 0;  // with too_many_unique
};

// Staged gradients as a snapshot keeps them, in token order. Those of the ranks of this process are given back; those
// of the whole group are restored, on every process.
struct StagedGradients {
  std::vector<std::int32_t> ids;  // [tokens], cleaned
  std::vector<char> grads;        // [tokens, emb_width] of the context's dtype
  bool pending = true;
};

class GroupPipeline {
 public:
  virtual ~GroupPipeline() = default;

  virtual const ContextSpec& spec() const = 0;

  // The steps that were dispatched should have finished before these.
  virtual std::optional<std::string> take_refusal() = 0;
  virtual std::optional<IdProblem> take_id_problem() = 0;
  virtual void return_to_first_step() = 0;
  virtual std::optional<StagedGradients> staged() const = 0;
  virtual void restore_staged(const StagedGradients& staged) = 0;
  virtual Stats stats() const = 0;
  virtual std::int64_t arena_bytes() const = 0;

  // The first failure sticks: whatever waits ends with it, and every later call throws it.
  virtual void fail(Failure failure) = 0;
  virtual std::optional<Failure> failure() const = 0;
  // A rank on a CPU of this process will not come any more, for the reason given: whoever waits for it, now or later,
  // hears that. Empty: it is back.
  virtual void set_absent(int /*rank*/, std::string /*why*/) {}
  // Called by the watchdog: fails the group where somebody waits for longer than the timeout.
  virtual void check_timeout(Clock::time_point now) = 0;
  // Returns when no work runs any more.
  virtual void drain() = 0;
};

}  // namespace async_emb::context
