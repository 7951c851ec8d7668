// One embedding table's pipeline over the ranks of one group that live in this process. Ranks of other processes take
// part through peers.h.
//
// A rank's calls come from threads of XLA's (or of a caller's own); none of them blocks. A start is two calls:
// `*_begin` takes what it needs into the arena and returns the pin's step at once, `*_lease` lends the table for the
// length of the work. The work starts when every rank of the group has lent its table, and runs on the executor.
// `*_done` completes when its result is there. What the work computes is in column_sharded.h; which call may follow
// which, in state_machine.h.
//
// Refusals. A call that comes at the wrong time applies nothing and passes its outputs through; so does every later
// call, until take_refusal(). Ranks run the same program, so they refuse the same call; where only one can know (rows
// of another batch), the others stop at the same place in the program, because refusals are ordered by each rank's
// count of calls.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/arrivals.h"
#include "comm/transport.h"
#include "context/arena.h"
#include "context/call_checks.h"
#include "context/column_sharded.h"
#include "context/executor.h"
#include "context/failure.h"
#include "context/group_pipeline.h"
#include "context/notice.h"
#include "context/peers.h"
#include "context/process_map.h"
#include "context/round.h"
#include "context/spec.h"
#include "context/state_machine.h"
#include "context/stats.h"
#include "context/tensor_view.h"

namespace async_emb::context {

class Pipeline : public GroupPipeline, public std::enable_shared_from_this<Pipeline> {
 public:
  // `devices` are the group's device ids in rank order; `transport` leads to the other processes of the map.
  Pipeline(ContextSpec spec, std::vector<std::int64_t> devices, Executor& executor, ProcessMap map,
           std::shared_ptr<comm::Transport> transport = nullptr);

  // The ordered calls of one rank. Pins are step numbers; state_machine.h turns them into float32.
  //
  // An offer tells the table that the lease will lend. XLA may run a small program one call after the other, in any
  // order that the data allow, so a done may come before its lease, which then cannot come before the done has ended.
  // With an offer the done lends the table itself: it completes when nobody uses it any more.
  float lookup_begin(int rank, const DLTensor& ids, std::int64_t rows);
  // The same beside an update that this rank has begun and not yet done, with the table that the update has: the lease,
  // whose table is there when that update has ended, comes after it, and no done before the lease.
  float lookup_begin_beside_update(int rank, const DLTensor& ids);
  void lookup_offer(int rank, const DLTensor& table);
  void lookup_lease(int rank, const DLTensor& table, Completion completion);
  void lookup_done(int rank, float pin, const DLTensor* ids, const DLTensor& rows, Completion completion);
  // segment_ids and unique_tokens: both, or neither (then the ids of the last consumed lookup are used).
  float stage_update(int rank, const DLTensor& grads, const DLTensor* segment_ids, const DLTensor* unique_tokens,
                     bool pending);
  float update_begin(int rank, const UpdateRule& rule);
  void update_offer(int rank, const DLTensor& table, const DLTensor& row_state, const DLTensor* last_step);
  void update_lease(int rank, const DLTensor& table, const DLTensor& row_state, const DLTensor* last_step,
                    Completion completion);
  float update_done(int rank, UpdateResults results, Completion completion);

  std::optional<std::string> take_refusal() override;
  std::optional<IdProblem> take_id_problem() override;
  void return_to_first_step() override;
  std::optional<StagedGradients> staged() const override;
  void restore_staged(const StagedGradients& staged) override;
  Stats stats() const override;
  std::int64_t arena_bytes() const override;
  void fail(Failure failure) override;
  std::optional<Failure> failure() const override;
  void set_absent(int rank, std::string why) override;
  void check_timeout(Clock::time_point now) override;
  void drain() override;

  const ContextSpec& spec() const override { return spec_; }

 private:
  struct Rank {
    StateMachine machine;
    std::int64_t calls = 0;                              // ordered calls so far
    std::array<std::int64_t, comm::kChannels> starts{};  // of them, refused ones too
    bool lookup_open = false;  // the last lookup_begin opened a round: its lease belongs to it
    bool update_open = false;
    int consumed_batch = -1;
    int staged_batch = -1;
    bool staged_pending = true;
    bool staged_own_ids = false;
    const void* last_table = nullptr;  // of the last lookup's lease
    std::int64_t last_rows = 0;        // of that table
    std::string why_absent;            // empty: it is there
  };

  using Lock = std::unique_lock<std::mutex>;

  float begin_lookup(int rank, const DLTensor& ids, std::int64_t rows, bool beside_update);
  bool refuses(Rank& rank, StateMachine::Refusal refusal, const char* call);
  void require_working() const;
  // A call that can neither go on nor be refused: its rank has begun a step that peers wait for.
  [[noreturn]] void fail_and_throw(Failure failure);
  StateMachine::Refusal check_same_ids(int rank, float pin, const DLTensor& ids) const;
  LookupRound& lookup_round(std::int64_t step) { return lookups_[step % 2]; }
  UpdateRound& update_round(std::int64_t step) { return updates_[step % 2]; }
  int take_batch();
  void hold(int batch);
  void release(int& batch);
  // How the numbers that `rank` gives differ from those of the first rank to begin the round.
  std::optional<std::string> difference_between(const UpdateRound& round, const UpdateRule& rule, int rank) const;
  void take_offer(int rank, LookupRound& round, const DLTensor& table);
  void take_offer(int rank, UpdateRound& round, const DLTensor& table, const DLTensor& row_state,
                  const DLTensor* last_step);
  // The last rank of this process to arrive hands the round on: to the work, or to the peers. They take part in starts
  // that are refused too, since no process can know what the others refuse; so theirs are counted by starts.
  std::int64_t number_of(const Progress& round) const { return peers_ != nullptr ? round.start : round.step; }
  void arrive(comm::Channel channel, std::int64_t number, int rank);
  void lookup_with_peers(std::int64_t start);
  void update_with_peers(std::int64_t start);
  void share_sums(std::int64_t step);
  void share_statistics(std::int64_t step);
  std::int64_t unique_of(const UpdateRound& round) const;
  // Runs `body`, which waits for other processes while `round` runs; null where the start was refused here.
  template <typename Body>
  void with_peers(const char* call, std::int64_t step, Progress* round, Body body);
  void begin_running(Progress& round);
  void stop_running(Progress& round);
  // Whether the step goes on: nobody has refused its start.
  template <typename Round>
  bool take_notices(const std::vector<Notice>& notices, const char* call, Round* round);
  std::vector<int> local_in_token_order() const;
  void why_refused(Notice& notice) const;
  void finish_lookup(int rank, LookupRound& round);
  void run_lookup(std::int64_t step);
  void gather(std::int64_t step);
  void gather_part(std::int64_t step, int rank, int part, int parts);
  void run_update(std::int64_t step);
  void work_on_update(std::int64_t step);
  void index_then_sum(std::int64_t step);
  void decide(std::int64_t step);
  void apply(std::int64_t step);
  void finish_update(std::int64_t step, int rank);
  // The number of the lookup that has waited for this, or 0.
  std::int64_t end_update(std::int64_t step, int rank);
  // Runs body(0) .. body(count - 1) on the executor, then `then` on whichever ended last.
  void parallel(int count, std::function<void(int)> body, std::function<void()> then);
  // Runs `body`; an exception fails the pipeline instead of the process.
  template <typename Body>
  void guarded(const char* call, Body body);
  void void_rounds();
  void finish_void(LookupRound& round);
  void finish_void(UpdateRound& round);
  void consume_lookup(int rank, LookupRound& round);
  void consume_update(int rank, UpdateRound& round);
  void write_results(const UpdateRound& round, const UpdateRound::Rank& rank) const;
  void note(const IdProblem& problem);
  // Of one lookup, or of the gradient rows of one update: what the ranks of this process get from all others.
  std::int64_t moved_bytes() const;
  void later(Completion& completion);
  void fail_waiting();
  void adopt(Failure failure);  // with the lock held
  void record(const char* name, int rank, std::int64_t step) const;

  const ContextSpec spec_;
  const std::vector<std::int64_t> devices_;
  const CallChecks check_;
  Executor& executor_;
  comm::Arrivals arrivals_;
  const std::vector<int>& local_;  // ranks of this process
  ColumnSharded work_;
  const std::unique_ptr<Peers> peers_;  // null where the whole group is in this process
  // A lookup that is over before a thread has woken up for it runs on the thread of the call that lends the table:
  // where there is one rank, so that nobody's program goes on there but the caller's own, when its call has returned.
  const bool at_once_;

  mutable std::mutex mutex_;
  std::condition_variable settled_;
  std::vector<Rank> ranks_;
  std::array<LookupRound, 2> lookups_;
  std::array<UpdateRound, 2> updates_;
  std::vector<std::unique_ptr<BatchIds>> batches_;
  struct Override {
    std::int64_t stage = 0;
    int batch = -1;
  };
  std::array<Override, 2> overrides_;  // ids given to stage_update instead of the lookup's
  int running_ = 0;                    // pieces of work that may touch borrowed buffers
  std::optional<Failure> failure_;
  std::optional<std::string> refusal_;
  std::int64_t refused_call_ = std::numeric_limits<std::int64_t>::max();
  std::vector<IdProblem> id_problems_;  // the first of a step, of the last steps
  Stats stats_;
};

template <typename Body>
void Pipeline::guarded(const char* call, Body body) {
  try {
    body();
  } catch (const std::exception& error) {
    fail({FailureKind::kInternal, "async_emb '" + spec_.name + "' " + call + " failed: " + error.what()});
  }
}

}  // namespace async_emb::context
