// One step of one channel, while it is in flight: who has come, which buffers they brought, who waits for what.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "context/failure.h"
#include "core/adagrad.h"

namespace async_emb::context {

// Called once, when a lease has ended or a done is complete: with the failure, or null.
using Completion = std::function<void(const Failure*)>;

using Clock = std::chrono::steady_clock;

inline std::int64_t nanoseconds_since(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

struct Progress {
  std::int64_t step = 0;        // 0: this slot holds no round
  std::int64_t start = 0;       // which start of the channel opened it, refused ones counted
  std::int64_t begin_call = 0;  // the ordered call of each rank that opened it
  bool running = false;         // the work has begun: buffers are in use
  bool complete = false;        // the work is over
  bool is_void = false;         // nothing was done, by decision of the whole group
  Clock::time_point first_wait{};
  bool waited_for = false;  // somebody's lease or done is pending

  void note_wait() {
    if (waited_for) return;
    waited_for = true;
    first_wait = Clock::now();
  }
};

struct LookupRound : Progress {
  struct Rank {
    bool begun = false;
    bool arrived = false;           // the rendezvous has heard of it
    const void* table = nullptr;    // offered by the start
    bool lent = false;              // the work may use it: the lease holds it, or the done does
    bool done_lends = false;        // the done came before the lease, and holds the table until the work is over
    bool waits_for_update = false;  // the lease came while an update of this rank has the table
    Completion lease;
    void* out = nullptr;  // where the done wants the rows, once it was called
    Completion done;
    Clock::time_point done_called{};
    void* destination = nullptr;  // where the work writes them
    int parts_left = 0;
    bool ready = false;
  };
  int batch = -1;  // index of the pipeline's BatchIds
  std::int64_t rows = 0;
  std::vector<Rank> ranks;
  std::vector<const void*> tables;  // of every rank, once the work runs
  int ranks_left = 0;
};

// The rule of one update and its numbers: the same on every rank.
struct UpdateRule {
  bool lazy = false;
  float learning_rate = 0;
  float eps = 0;
  float decay = 1;         // lazy: accum_decay_rate
  float weight_decay = 1;  // lazy: weight_decay_rate
  std::int32_t step = 0;   // lazy only
  bool clips = false;
  float max_grad_norm = 0;
  bool stochastic_rounding = false;
  std::uint32_t seed = 0;
  std::uint32_t rounding_step = 0;

  bool can_be_applied() const {
    return core::can_be_applied(learning_rate, eps, decay, weight_decay, lazy, clips ? max_grad_norm : 0.0f);
  }
};

// Where update_done wants its results.
struct UpdateResults {
  float* norm = nullptr;
  std::int32_t* valid = nullptr;
  std::int32_t* pending = nullptr;

  void write_nothing_done() const {
    *norm = 0;
    *valid = 0;
    *pending = 0;
  }
};

struct UpdateRound : Progress {
  struct Rank {
    bool begun = false;
    bool arrived = false;   // the rendezvous has heard of it
    bool lent = false;      // the work may use the buffers: the lease holds them, or the done does
    void* table = nullptr;  // offered by the start, with what follows
    float* row_state = nullptr;
    std::int32_t* last_step = nullptr;
    Completion lease;
    UpdateResults results;
    Completion done;
    Clock::time_point done_called{};
    int parts_left = 0;
    bool ready = false;
  };
  int batch = -1;                // -1: nothing was staged
  bool own_ids = false;          // stage_update was given segment_ids
  bool applies_nothing = false;  // nothing was staged, here or in another process
  bool pending = true;           // what stage_update was told, on every rank
  std::int64_t rows = 0;
  UpdateRule rule;
  std::vector<Rank> ranks;
  int ranks_left = 0;
  float norm = 0;
  bool applied = false;
};

}  // namespace async_emb::context
