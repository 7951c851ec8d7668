// One embedding table's pipeline over the ranks of one group on GPUs: those of this process, where there are others.
//
// The same calls, states and refusals as pipeline.h, on streams. A call puts its part on XLA's stream and returns; the
// work of a step goes to one side stream of each rank when the last rank has begun it, and events order the two. Ranks
// may share a GPU. Three kinds of things are known only to the device and stay there: pins and ids (a wrong one is
// noted in mapped memory, and all work from that call on is void), the numbers of the rule, and whether an update is
// applied.
//
// The host never waits for a device. A done (and settle) waits on the host for the other ranks' threads to have begun
// the step, because an event can only be waited for once it is recorded; a peer that does not come ends in the timeout.
//
// Where the group spans processes, the last rank's begin hands the round to a communication thread instead, where the
// hosts agree about it (device_peers.h). It goes to the streams in the next call of the lead, the first rank of this
// process, which waits on the host until all have agreed: libraries that share a GPU must launch what waits for other
// processes in one order everywhere, and the order of a program's calls is one.
//
// Every round ends with all ranks waiting for each other on their side streams. So whatever follows a done on XLA's
// stream, or a round on a side stream, comes after every peer's reads and writes of the round before.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/arrivals.h"
#include "context/call_checks.h"
#include "context/device_arena.h"
#include "context/device_peers.h"
#include "context/group_pipeline.h"
#include "context/notice.h"
#include "context/process_map.h"
#include "context/state_machine.h"
#include "cuda/handles.h"

namespace async_emb::context {

class DevicePipeline : public GroupPipeline, public std::enable_shared_from_this<DevicePipeline> {
 public:
  // `devices` are the group's device ids in rank order, `gpus` the GPU of each, null for those of other processes.
  DevicePipeline(ContextSpec spec, std::vector<std::int64_t> devices, std::vector<cuda::Device*> gpus);
  // A group that spans processes: `links` lead to the others. For shared pointers alone.
  DevicePipeline(ContextSpec spec, std::vector<std::int64_t> devices, std::vector<cuda::Device*> gpus, ProcessMap map,
                 DeviceLinks links);
  ~DevicePipeline() override;

  // The ordered calls of one rank, on XLA's stream of its device. Tensors and outputs are in device memory. A lookup
  // whose start and done are one call has no pin, which then is null.
  void lookup_begin(int rank, const DLTensor& ids, const DLTensor& table, float* pin, cuda::Stream stream);
  // The same beside an update that this rank has begun and not yet done, with the table that the update has; that table
  // is shown when it has come. Both pins are of this step.
  void lookup_begin_beside_update(int rank, const DLTensor& ids, float* issued, float* pin, cuda::Stream stream);
  void lookup_show(int rank, const DLTensor& table);
  void lookup_done(int rank, const float* pin, const DLTensor* ids, const DLTensor& rows, cuda::Stream stream);
  void stage_update(int rank, const DLTensor& grads, const DLTensor* segment_ids, const DLTensor* unique_tokens,
                    const DLTensor& pending, float* pin, cuda::Stream stream);
  struct RuleForm {
    bool lazy = false;
    bool clips = false;
    bool stochastic_rounding = false;
  };
  // `operands` names the numbers; its destination is filled in here.
  void update_begin(int rank, const RuleForm& form, cuda::TakeNumbers operands, const DLTensor& table,
                    const DLTensor& row_state, const DLTensor* last_step, float* pin, cuda::Stream stream);
  struct Results {
    float* norm = nullptr;
    std::int32_t* valid = nullptr;
    std::int32_t* pending = nullptr;
  };
  void update_done(int rank, const Results& results, float* pin, cuda::Stream stream);
  // What follows on `stream` comes after all work that was begun: the table of this rank is at rest.
  void settle(int rank, cuda::Stream stream);
  // The same for the work that is on the side streams by now, whatever has failed: for a call that ends a program, so
  // that XLA does not give a buffer away that is in use.
  void hold(int rank, cuda::Stream stream) noexcept;

  std::optional<std::string> take_refusal() override;
  std::optional<IdProblem> take_id_problem() override;
  void return_to_first_step() override;
  std::optional<StagedGradients> staged() const override;
  void restore_staged(const StagedGradients& staged) override;
  Stats stats() const override;
  std::int64_t arena_bytes() const override;
  void fail(Failure failure) override;
  std::optional<Failure> failure() const override;
  void check_timeout(Clock::time_point now) override;
  void drain() override;

  const ContextSpec& spec() const override { return spec_; }

 private:
  using Lock = std::unique_lock<std::mutex>;
  static constexpr int kLookup = static_cast<int>(comm::Channel::kLookup);
  static constexpr int kUpdate = static_cast<int>(comm::Channel::kUpdate);
  static constexpr int kBatches = 3;

  struct Rank {
    cuda::Device& device;
    DeviceArena arena;
    cuda::Mapped<cuda::Refusal> refusal;
    std::vector<std::unique_ptr<DeviceBatch>> batches;
    // Events: this rank has begun a round on XLA's stream; its own work of the round is over; everybody's is.
    std::array<std::array<cuda::OwnedEvent, 3>, comm::kChannels> events;
    cuda::OwnedStream side;  // goes first, so that nothing runs when the rest goes

    StateMachine machine;
    std::int64_t calls = 0;
    std::array<std::int64_t, comm::kChannels> starts{};  // of the calls, refused ones too
    int armed_batch = -1;
    int consumed_batch = -1;
    int staged_batch = -1;
    cuda::SegmentSum sum_job;  // of the update that is put on the side stream
    void* last_table = nullptr;
    std::int64_t rows = 0;  // of the table of the last lookup
    // Which lookup step each of the latest dones was for: a refusal that the device finds is told with it.
    struct Done {
      std::int64_t call = 0;
      std::int64_t step = 0;
    };
    std::array<Done, 64> dones{};
    std::size_t next_done = 0;

    Rank(const ContextSpec& spec, const core::ColumnLayout& layout, int rank, const std::vector<cuda::Device*>& gpus);
    cuda::Event begun(int channel) const { return events[static_cast<std::size_t>(channel)][0].get(); }
    cuda::Event worked(int channel) const { return events[static_cast<std::size_t>(channel)][1].get(); }
    cuda::Event closed(int channel) const { return events[static_cast<std::size_t>(channel)][2].get(); }
  };

  struct Round {
    std::int64_t step = 0;
    std::int64_t start = 0;  // which start of the channel this is, refused ones counted
    std::int64_t begin_call = 0;
    std::int64_t rows = 0;
    bool staged = false;
    bool works = false;  // gradients are staged, in every process
    RuleForm form;
    struct Buffers {
      bool here = false;
      const std::int32_t* ids = nullptr;
      void* table = nullptr;
      float* row_state = nullptr;
      std::int32_t* last_step = nullptr;
    };
    std::vector<Buffers> ranks;
    bool running = false;  // agreed with all processes
    bool enqueued = false;
    bool is_void = false;
    bool waited_for = false;
    Clock::time_point first_wait{};
  };

  Rank& of(int rank) { return *ranks_[static_cast<std::size_t>(rank)]; }
  const Rank& of(int rank) const { return *ranks_[static_cast<std::size_t>(rank)]; }
  Round& round(int channel, std::int64_t step) { return rounds_[static_cast<std::size_t>(channel)][step % 2]; }
  // `table`: null for that of the update under way. Returns the step that pins are of.
  std::int64_t begin_lookup(Lock& lock, int rank, const DLTensor& ids, const DLTensor* table, cuda::Stream stream);
  bool refuses(int rank, StateMachine::Refusal refusal, const char* call);
  void require_working() const;
  [[noreturn]] void fail_and_throw(Failure failure);
  int take_batch(Rank& rank);
  void release(Rank& rank, int& batch);
  Round& open(int channel, std::int64_t step, int rank);
  void make_ranks(const std::vector<cuda::Device*>& gpus);
  Rank& lead() { return of(local_.front()); }
  const Rank& lead() const { return of(local_.front()); }
  bool leads(int rank) const { return rank == local_.front(); }
  // Rank has begun its part; the last one puts the work of all on the side streams.
  void arrive(int channel, Round& round, int rank, cuda::Stream stream);
  // Returns when the round's work is on the side streams or void.
  void await_peers(Lock& lock, Round& round);
  void arrive_at_peers(int channel, std::int64_t start, int rank);
  void agree(int channel, std::int64_t start);
  Round* round_of_start(int channel, std::int64_t start);
  Notice notice_of(int channel, std::int64_t start, const Round* round) const;
  // The round goes on, unless somebody has refused its start.
  void accept(const std::vector<Notice>& notices, Round* round);
  // What the lead has begun in earlier calls goes to the streams, once all have agreed about it.
  void launch_rounds(Lock& lock, int rank);
  void launch(Lock& lock, int channel, Round& round);
  static void note_wait(Round& round);
  Failure failure_on_device(const char* call, const Round& round, const std::exception& error) const;
  std::optional<Failure> fault_of_peers() const;
  // What another process's rule has voided, as the device has found it.
  std::optional<Failure> difference_of_peers() const;
  void enqueue_lookup(Round& round);
  void enqueue_update(Round& round);
  void enqueue_lookup_with_peers(Round& round);
  void enqueue_update_with_peers(Round& round);
  void open_local(int channel, Round& round);
  void speak(int channel, const Round& round);
  void hear(int channel, const Round& round);
  void follow_lead(int channel, bool takes_skip);
  void gather_for_peers(const Round& round);
  void place_rows(const Round& round, int rank);
  void pack_grads(int rank);
  void collect_from_peers(cuda::SegmentSum& job, int rank);
  void ask_for_rows(Round& round);
  void gather(Round& round, int rank);
  void sum(Round& round, int rank);
  void apply(Round& round, int rank);
  void wait_for_all(int channel, int rank, cuda::Event (Rank::*event)(int) const);
  void close_round(int channel);
  // Peers' refusals count where they came before the round; the rank's own up to the call under way.
  void look_for_refusals(int channel, int rank, cuda::Stream stream);
  cuda::Refusal& refusal_of(int rank) const;
  cuda::Refusals all_refusals() const;
  std::int64_t moved_bytes() const;
  std::vector<int> local_in_token_order() const;
  void adopt(Failure failure);  // with the lock held
  void write_pin(Rank& rank, std::int64_t step, float* pin, cuda::Stream stream);
  std::string told_by_device(int rank, const cuda::Refusal& refusal) const;
  void start_anew(std::int64_t lookup_step, std::int64_t update_step, std::int64_t stages);
  void record(const char* name, int rank, std::int64_t step) const;

  const ContextSpec spec_;
  const std::vector<std::int64_t> devices_;
  const CallChecks check_;
  const core::ColumnLayout layout_;
  const std::int64_t element_;
  comm::Arrivals arrivals_;
  const std::vector<int>& local_;  // ranks of this process

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Rank>> ranks_;  // null for those of other processes
  std::array<std::array<Round, 2>, comm::kChannels> rounds_;
  std::optional<Failure> failure_;
  std::optional<std::string> refusal_;
  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();
  std::int64_t refused_call_ = kNone;
  Stats stats_;

  // Of a group that spans processes.
  std::vector<std::optional<cuda::Mapped<cuda::Refusal>>> peer_refusals_;  // by rank
  std::optional<cuda::Mapped<cuda::RuleDifference>> difference_;
  cuda::DeviceArray<cuda::IdFinding> peer_bad_id_;
  cuda::DeviceArray<cuda::Counters> peer_counters_;  // of ids that their own process has counted
  std::vector<cuda::OwnedEvent> ready_;              // by channel: the lead has come to the round's first exchange
  std::unique_ptr<DevicePeers> peers_;               // goes first; null where the whole group is in this process
};

}  // namespace async_emb::context
