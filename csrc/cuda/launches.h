// The CUDA launches of core's row loops, behind one table of function pointers.
//
// A launch puts work on a stream and returns: the host never waits, and a count, a decision or a number of the rule
// that only the device knows is read by the work itself. Pointers are to device memory (or to host memory that every
// device maps, where that is said) and are borrowed until the stream has passed the work. Nothing here allocates.
//
// This header needs no CUDA: the pipeline, and the emulation that stands for a GPU in tests, see only this.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/ids.h"

namespace async_emb::cuda {

using Stream = void*;  // a cudaStream_t

// Ranks of one group: what a launch knows of each rank is passed by value.
inline constexpr int kMaxRanks = 64;

// ---- what the device decides

inline constexpr std::int64_t kNeverRefused = INT64_MAX;
inline constexpr std::int64_t kRefusedByHost = 0;  // before any call: the pipeline has failed

enum class RefusalKind : std::int32_t { kNone = 0, kStalePin = 1, kOtherBatch = 2 };

// A rank's first refused call. In host memory that every device maps: written by the rank's own checks or by the host,
// read by the work of every rank. `refused_call` counts the rank's ordered calls; it is written last.
struct Refusal {
  std::int64_t refused_call = kNeverRefused;
  RefusalKind kind = RefusalKind::kNone;
  float pin = 0;               // kStalePin: what came
  std::int64_t position = -1;  // kOtherBatch: first difference, counted in the rank's tokens
  std::int32_t given = 0;      // kOtherBatch: cleaned ids there
  std::int32_t armed = 0;
};

// The refusals of all ranks of the group.
struct Refusals {
  const Refusal* of_rank[kMaxRanks] = {};
  int num_ranks = 0;
};

// Counted on the device, never reset by a launch.
struct Counters {
  std::uint64_t bad_ids = 0;
  std::uint64_t padding_ids = 0;
  std::uint64_t saturated = 0;
  std::uint64_t applied = 0;
  std::uint64_t skipped = 0;
  std::uint64_t trained_tokens = 0;
  std::uint64_t unique_tokens = 0;
};

// The first id of the earliest step that lay outside of the table, or a batch with too many distinct ids. The first one
// found stays: steps come in stream order, and within a step the smallest position wins.
struct IdFinding {
  std::int64_t step = 0;  // 0: none
  std::int64_t position = -1;
  std::int64_t id = 0;
  std::int64_t distinct = 0;  // 0: an id; otherwise the number of distinct ids, more than the limit
};

struct BatchCounts {
  std::int32_t distinct = 0;
  std::int32_t kept = 0;     // min(distinct, limit)
  std::int32_t trained = 0;  // tokens with a kept id
};

// Numbers of an update's rule, as the step's operands brought them.
struct RuleNumbers {
  float learning_rate = 0;
  float eps = 0;
  float decay = 1;
  float weight_decay = 1;
  float max_grad_norm = 0;
  std::int32_t step = 0;
  std::uint32_t seed = 0;
  std::uint32_t rounding_step = 0;
};

struct Outcome {
  float norm = 0;
  std::int32_t valid = 0;    // the update is applied
  std::int32_t pending = 0;  // an update was staged, applied or not
  float clip = 1;
};

// What a process tells every other one at the start of a round, in front of its ids.
struct PeerWord {
  Refusal refusal;        // the first of its ranks' that voids the round; kNeverRefused: none
  std::int32_t rank = 0;  // whose it is
  std::int32_t unused = 0;
  IdFinding finding;    // of this lookup; step 0: none
  RuleNumbers numbers;  // of this update
};

// The first number of a rule in which two processes differ, as bits. In mapped host memory; `step` is written last.
struct RuleDifference {
  std::int64_t step = 0;  // 0: none
  std::int32_t process = 0;
  std::int32_t number = 0;  // its place among RuleNumbers
  std::uint32_t mine = 0;
  std::uint32_t theirs = 0;
};

// ---- jobs

// Cleans token ids (core::clean_id) into `out`, counts, and keeps the first bad one if `report_bad`.
struct CleanIds {
  const void* ids = nullptr;
  bool wide = false;  // int64, not int32
  std::int64_t count = 0;
  std::int64_t rows = 0;
  core::IdPolicy policy = core::IdPolicy::kError;
  bool has_padding = false;
  std::int64_t padding_id = 0;
  std::int32_t* out = nullptr;
  Counters* counters = nullptr;
  IdFinding* finding = nullptr;
  bool report_bad = false;
  std::int64_t step = 0;
  std::int64_t first_position = 0;  // of this rank in the global token array; findings are in that array
};

// Ids of tokens from each token's index into unique_tokens, as context::ids_of_segments.
struct IdsOfSegments {
  const std::int32_t* segment_ids = nullptr;  // [count]
  std::int64_t count = 0;
  const std::int32_t* unique_tokens = nullptr;  // [num_unique]
  std::int64_t num_unique = 0;
  std::int64_t rows = 0;
  bool has_padding = false;
  std::int64_t padding_id = 0;
  std::int32_t* out = nullptr;
  Counters* counters = nullptr;
  IdFinding* finding = nullptr;
  bool report_bad = false;
  std::int64_t step = 0;
  std::int64_t first_position = 0;
};

// Refuses call `call` of a rank where the pin is not `expected`, or where `ids`, once cleaned, differ from `armed`. An
// earlier refusal of the rank stays.
struct CheckLookup {
  const float* pin = nullptr;
  float expected = 0;
  const void* ids = nullptr;  // null: no comparison
  bool wide = false;
  std::int64_t count = 0;
  std::int64_t rows = 0;
  core::IdPolicy policy = core::IdPolicy::kError;
  bool has_padding = false;
  std::int64_t padding_id = 0;
  const std::int32_t* armed = nullptr;  // [count], cleaned
  std::int64_t call = 0;
  Refusal* refusal = nullptr;               // this rank's, in mapped host memory
  std::int64_t* first_differing = nullptr;  // device scratch, one value
};

// skip = some rank has refused a call at or before `call`, or `also` is not 0.
struct OpenRound {
  Refusals refusals;
  std::int64_t call = 0;
  const std::int32_t* also = nullptr;  // the round's own skip, where a done looks again; may be null
  std::int32_t* skip = nullptr;
};

// Writes this process's word about a round. The refusals of other processes' ranks are null.
struct SpeakToPeers {
  Refusals refusals;
  std::int64_t call = 0;
  const IdFinding* findings[kMaxRanks] = {};  // of this process's ranks
  int num_findings = 0;
  std::int64_t step = 0;                 // findings of other steps were told, or are yet to be
  const RuleNumbers* numbers = nullptr;  // null for a lookup
  PeerWord* word = nullptr;
};

// Reads the words of all other processes. A refusal is kept in the place of its rank, in mapped host memory, and voids
// the round: *skip becomes 1. So does a rule that differs from `numbers`. Where the host has refused everything,
// because the exchange was broken off, the words may be anything: the round is void, and nothing is kept.
struct HearPeers {
  const Refusal* own = nullptr;  // of a rank of this process; refused_call is kRefusedByHost where the host has
  const PeerWord* words[kMaxRanks] = {};  // by process, null for this one
  int num_processes = 0;
  Refusal* refusals[kMaxRanks] = {};     // by rank of the group, null for those of this process
  IdFinding* finding = nullptr;          // the earliest one stays
  const RuleNumbers* numbers = nullptr;  // null for a lookup
  RuleDifference* difference = nullptr;  // in mapped host memory; the first one stays
  std::int64_t step = 0;
  std::int32_t* skip = nullptr;
};

struct ColumnShard {
  const void* data = nullptr;
  std::int64_t row_stride_bytes = 0;
  std::int64_t row_bytes = 0;  // bytes to copy from each row
};

// out[i] = the rows of every shard at ids[i], side by side in shard order; zeros where ids[i] < 0.
struct GatherRows {
  const std::int32_t* ids = nullptr;
  std::int64_t count = 0;
  ColumnShard shards[kMaxRanks];
  int num_shards = 0;
  void* out = nullptr;
  std::int64_t out_row_stride_bytes = 0;
};

// Rows that wait in the arena go to their output; NaN of `dtype` instead where *skip != 0.
struct DeliverRows {
  const void* rows = nullptr;
  void* out = nullptr;
  std::int64_t count = 0;  // elements
  core::DType dtype = core::DType::kFloat32;
  const std::int32_t* skip = nullptr;
};

// As cpu::UniqueIds; at most `limit` distinct ids are kept, the smallest.
struct UniqueIds {
  const std::int32_t* ids = nullptr;  // [count]
  std::int64_t count = 0;
  std::int64_t rows = 0;  // every id is below it: bounds the bits to sort
  std::int64_t limit = 0;
  std::int32_t* unique = nullptr;     // [count]
  std::int32_t* offsets = nullptr;    // [count + 1]
  std::int32_t* positions = nullptr;  // [count]
  BatchCounts* counts = nullptr;
  void* workspace = nullptr;  // [unique_ids_workspace(count)] bytes, at a multiple of 256
  std::int64_t workspace_bytes = 0;
  IdFinding* finding = nullptr;  // null: too many ids are not reported
  std::int64_t step = 0;
};

// pending = whether a bool or int32 is not zero.
struct TakePending {
  const void* from = nullptr;
  bool is_bool = false;
  std::int32_t* pending = nullptr;
};

// The operands of an update start; where a pointer is null, its number is the default of RuleNumbers.
struct TakeNumbers {
  const float* learning_rate = nullptr;
  const float* eps = nullptr;
  const float* decay = nullptr;
  const float* weight_decay = nullptr;
  const float* max_grad_norm = nullptr;
  const std::int32_t* step = nullptr;
  const std::uint32_t* seed = nullptr;
  const std::uint32_t* rounding_step = nullptr;
  RuleNumbers* numbers = nullptr;
};

// As cpu::SegmentSum, for all kept segments. Gradient rows lie in blocks, one of each rank in token order: token p is
// row p % tokens_per_block of block p / tokens_per_block.
struct SegmentSum {
  core::DType grad_dtype = core::DType::kFloat32;
  const void* blocks[kMaxRanks] = {};
  int num_blocks = 0;
  std::int64_t tokens_per_block = 0;
  std::int64_t grad_row_stride = 0;  // elements
  std::int64_t column_begin = 0;
  std::int64_t width = 0;
  const std::int32_t* offsets = nullptr;
  const std::int32_t* positions = nullptr;
  const BatchCounts* counts = nullptr;
  std::int64_t max_segments = 0;  // counts->kept is at most that
  std::int64_t max_tokens = 0;
  // May leave out the sum of a segment with one occurrence, which would be its gradient row. Then the update is given
  // this job too, and the gradient rows must stay until it is over. Saves much traffic where few ids repeat.
  bool leaves_singles = false;
  float* sums = nullptr;          // row u at u * width
  float* subtree_sums = nullptr;  // row u at u * subtrees of this shard
  // [segment_sum_workspace(max_tokens, width)] bytes, at a multiple of 256: block sums of long segments.
  void* workspace = nullptr;
  std::int64_t workspace_bytes = 0;
  const std::int32_t* skip = nullptr;
};

// The statistic of each kept row, from the subtree sums of all ranks.
struct RowStatistic {
  const float* subtree_sums[kMaxRanks] = {};  // of rank r: [kept, subtrees[r]]
  std::int32_t subtrees[kMaxRanks] = {};
  int num_ranks = 0;
  const std::int8_t* levels = nullptr;  // of all subtrees, in column order
  const BatchCounts* counts = nullptr;
  std::int64_t max_segments = 0;
  float* statistics = nullptr;
  const std::int32_t* skip = nullptr;
};

// The global norm, and whether the update is applied: finite, numbers that can be applied, every rank pending, no
// refusal.
struct Decide {
  const float* statistics = nullptr;
  const BatchCounts* counts = nullptr;
  std::int64_t max_segments = 0;
  void* workspace = nullptr;  // [decide_workspace(max_segments)] bytes, at a multiple of 4
  std::int64_t workspace_bytes = 0;
  const std::int32_t* pending[kMaxRanks] = {};
  int num_ranks = 0;
  const RuleNumbers* numbers = nullptr;
  bool lazy = false;
  bool clips = false;
  const std::int32_t* skip = nullptr;
  Outcome* outcome = nullptr;
  Counters* counters = nullptr;  // null on all ranks but one, which counts for the group
};

// The rule on the kept rows of one shard, where the outcome is to apply it.
struct RowwiseAdagrad {
  core::DType table_dtype = core::DType::kFloat32;
  void* table = nullptr;
  std::int64_t table_row_stride = 0;  // elements
  std::int64_t column_begin = 0;
  std::int64_t width = 0;
  std::int64_t logical_width = 0;
  float* row_state = nullptr;
  std::int32_t* last_step = nullptr;  // null: the plain form
  const std::int32_t* unique = nullptr;
  const float* sums = nullptr;
  // Null, or the job that wrote the sums, of gradients of the table's dtype: read while launching, and no longer.
  const SegmentSum* sum_job = nullptr;
  const float* statistics = nullptr;
  const BatchCounts* counts = nullptr;
  std::int64_t max_segments = 0;
  const RuleNumbers* numbers = nullptr;
  const Outcome* outcome = nullptr;
  bool stochastic_rounding = false;
  Counters* counters = nullptr;
};

// Results of an update go to their outputs; nothing done (zeros) where *skip != 0 or `outcome` is null.
struct DeliverOutcome {
  const Outcome* outcome = nullptr;
  const std::int32_t* skip = nullptr;
  float* norm = nullptr;
  std::int32_t* valid = nullptr;
  std::int32_t* pending = nullptr;
};

struct Launches {
  const char* name;  // "cuda"
  void (*clean_ids)(const CleanIds&, Stream);
  void (*ids_of_segments)(const IdsOfSegments&, Stream);
  void (*check_lookup)(const CheckLookup&, Stream);
  void (*open_round)(const OpenRound&, Stream);
  void (*speak_to_peers)(const SpeakToPeers&, Stream);
  void (*hear_peers)(const HearPeers&, Stream);
  void (*gather_rows)(const GatherRows&, Stream);
  void (*deliver_rows)(const DeliverRows&, Stream);
  void (*unique_ids)(const UniqueIds&, Stream);
  void (*take_pending)(const TakePending&, Stream);
  void (*take_numbers)(const TakeNumbers&, Stream);
  void (*segment_sum)(const SegmentSum&, Stream);
  void (*row_statistic)(const RowStatistic&, Stream);
  void (*decide)(const Decide&, Stream);
  void (*rowwise_adagrad)(const RowwiseAdagrad&, Stream);
  void (*deliver_outcome)(const DeliverOutcome&, Stream);
  void (*write_pin)(float value, float* pin, Stream);
  // out[i] = i: the rows of a copy that lies in token order.
  void (*write_positions)(std::int32_t* out, std::int64_t count, Stream);
  // Loads every kernel, so that the first step does not. Sorts a little, since CUB's kernels load in no other way.
  void (*warm_up)();
  // Bytes of workspace. That of unique_ids depends on the current device too, and a smaller count needs no more.
  std::int64_t (*unique_ids_workspace)(std::int64_t count);
  std::int64_t (*segment_sum_workspace)(std::int64_t max_tokens, std::int64_t width);
  std::int64_t (*decide_workspace)(std::int64_t max_segments);
};

// The launches on NVIDIA GPUs; the calling thread's current device is the one they run on. A launch that fails throws
// std::runtime_error with the kernel's name and CUDA's message. Defined where the module is built with CUDA.
const Launches& launches();

}  // namespace async_emb::cuda
