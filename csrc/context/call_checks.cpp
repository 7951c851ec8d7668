#include "context/call_checks.h"

#include <algorithm>
#include <cstdio>
#include <limits>

namespace async_emb::context {
namespace {

bool are_ids(const DLTensor& ids) { return same_type(ids.dtype, kInt32) || same_type(ids.dtype, kInt64); }

[[noreturn]] void refuse(const std::string& message) { throw Error(FailureKind::kInvalidArgument, message); }

}  // namespace

std::string CallChecks::where(const char* call, int rank) const {
  return "async_emb '" + spec_.name + "' " + call + " on rank " + std::to_string(rank) + " (device " +
         std::to_string(devices_[static_cast<std::size_t>(rank)]) + ")";
}

void CallChecks::lookup_start(int rank, const DLTensor& ids, std::int64_t rows) const {
  if (!are_ids(ids)) {
    refuse(where("lookup_start", rank) + ": token_ids are " + describe(ids) + ", but must be int32 or int64");
  }
  if (element_count(ids) != spec_.tokens_per_rank) {
    refuse(where("lookup_start", rank) + ": token_ids are " + describe(ids) + ", but the context has " +
           std::to_string(spec_.tokens_per_rank) +
           " tokens on each rank: call lookup_start inside jax.shard_map, with token_ids sharded over data_axis");
  }
  if (rows < 0 || rows > std::numeric_limits<std::int32_t>::max()) {
    refuse(where("lookup_start", rank) + ": the table has " + std::to_string(rows) +
           " rows, but rows are numbered by 32-bit integers");
  }
}

void CallChecks::lookup_done_ids(int rank, const DLTensor& ids) const {
  if (are_ids(ids) && element_count(ids) == spec_.tokens_per_rank) return;
  refuse(where("lookup_done", rank) + ": token_ids are " + describe(ids) + ", but the context has " +
         std::to_string(spec_.tokens_per_rank) + " int32 or int64 tokens on each rank");
}

void CallChecks::rows(const DLTensor& rows) const {
  const std::int64_t shape[] = {spec_.tokens_per_rank, spec_.emb_width};
  require(rows, "rows", dlpack_type(spec_.dtype), shape);
}

void CallChecks::stage_update(int rank, const DLTensor& grads, const DLTensor* segment_ids,
                              const DLTensor* unique_tokens) const {
  const std::int64_t shape[] = {spec_.tokens_per_rank, spec_.emb_width};
  require(grads, "grads", dlpack_type(spec_.dtype), shape);
  if ((segment_ids == nullptr) != (unique_tokens == nullptr)) {
    refuse(where("stage_update", rank) + ": segment_ids and unique_tokens go together; give both or neither");
  }
  if (segment_ids != nullptr) {
    const std::int64_t tokens[] = {spec_.tokens_per_rank};
    const std::int64_t unique[] = {spec_.num_unique};
    require(*segment_ids, "segment_ids", kInt32, tokens);
    require(*unique_tokens, "unique_tokens", kInt32, unique);
  }
  if (spec_.lookup_only) refuse(where("stage_update", rank) + ": this context only looks up");
}

void CallChecks::staged(std::int64_t tokens, std::int64_t bytes) const {
  const std::int64_t wanted = spec_.tokens() * spec_.emb_width * core::size_of(spec_.dtype);
  if (tokens == spec_.tokens() && bytes == wanted) return;
  refuse("async_emb '" + spec_.name + "': staged gradients of " + std::to_string(tokens) + " tokens and " +
         std::to_string(bytes) + " bytes do not fit a context of " + std::to_string(spec_.tokens()) + " tokens and " +
         std::to_string(wanted) + " bytes: restore with the batch size and width that the snapshot was taken with");
}

void CallChecks::not_idle() const {
  refuse("async_emb '" + spec_.name + "': restore needs an idle context, but a step is under way: flush first");
}

void CallChecks::pending(const DLTensor& pending) {
  if (element_count(pending) == 1 && (pending.dtype.code == kDLBool || same_type(pending.dtype, kInt32))) return;
  refuse("async_emb stage_update: pending is " + describe(pending) + ", but must be one bool or int32");
}

std::optional<Failure> CallChecks::lookup_table(int rank, std::int64_t step, const DLTensor& table,
                                                std::int64_t rows) const {
  const std::int64_t shape[] = {rows, spec_.shard_width()};
  try {
    require(table, "table", dlpack_type(spec_.dtype), shape);
  } catch (const Error& error) {
    return Failure{error.kind(),
                   where("lookup_start", rank) + " of step " + std::to_string(step) + ": " + error.what()};
  }
  return std::nullopt;
}

std::optional<Failure> CallChecks::rows_of_peers(int rank, std::int64_t step, std::int64_t rows,
                                                 std::int64_t peer_rows) const {
  if (rows == peer_rows) return std::nullopt;
  return Failure{FailureKind::kInvalidArgument, where("lookup_start", rank) + " of step " + std::to_string(step) +
                                                    ": the table has " + std::to_string(rows) + " rows here and " +
                                                    std::to_string(peer_rows) + " on another rank"};
}

std::optional<Failure> CallChecks::update_buffers(int rank, std::int64_t step, const UpdateBuffers& buffers, bool lazy,
                                                  std::int64_t staged_rows, const void* last_table) const {
  const std::string here = where("update start", rank) + " of step " + std::to_string(step) + ": ";
  const std::int64_t rows = buffers.table.ndim == 2 ? buffers.table.shape[0] : -1;
  const std::int64_t shape[] = {rows, spec_.shard_width()};
  const std::int64_t per_row[] = {rows};
  try {
    require(buffers.table, "table", dlpack_type(spec_.dtype), shape);
    require(buffers.row_state, "row_state", kFloat32, per_row);
    if (buffers.last_step != nullptr) require(*buffers.last_step, "last_step", kInt32, per_row);
  } catch (const Error& error) {
    return Failure{error.kind(), here + error.what()};
  }
  if (lazy != (buffers.last_step != nullptr)) {
    return Failure{FailureKind::kInvalidArgument,
                   here + (lazy ? "the lazy rule needs last_step" : "only the lazy rule takes last_step")};
  }
  if (staged_rows < 0) return std::nullopt;
  if (rows < staged_rows) {
    return Failure{FailureKind::kInvalidArgument, here + "the table has " + std::to_string(rows) +
                                                      " rows, but the staged gradients are for one with at least " +
                                                      std::to_string(staged_rows) +
                                                      ": update the table that was looked up"};
  }
  if (last_table != nullptr && data_of(buffers.table) != last_table) {
    return Failure{FailureKind::kUnmatchedBuffers,
                   here +
                       "lookup and update see different table buffers, so XLA has put a copy between them. Thread "
                       "the table through every call (use the table that lookup_start returns) and donate it to "
                       "the jitted step (jax.jit(step, donate_argnums=...))"};
  }
  return std::nullopt;
}

std::string CallChecks::of_step(const char* call, std::int64_t step) const {
  return "async_emb '" + spec_.name + "' " + call + " of step " + std::to_string(step);
}

std::string CallChecks::list(const std::vector<int>& ranks) const {
  std::string text;
  for (const int rank : ranks) {
    const std::int64_t device = devices_[static_cast<std::size_t>(rank)];
    text += (text.empty() ? "rank " : ", rank ") + std::to_string(rank) + " (device " + std::to_string(device);
    if (!spec_.processes.empty()) {
      const auto place = std::find(spec_.devices.begin(), spec_.devices.end(), device) - spec_.devices.begin();
      text += ", process " + std::to_string(spec_.processes[static_cast<std::size_t>(place)]);
    }
    text += ")";
  }
  return text;
}

std::string CallChecks::lost(const char* call, std::int64_t step, const std::vector<int>& ranks,
                             const std::string& why) const {
  return "async_emb '" + spec_.name + "' lost " + list(ranks) + " in " + call + " of step " + std::to_string(step) +
         ": the process has ended or its connection broke (" + why + ")";
}

std::string CallChecks::absent(const char* call, std::int64_t step, int rank, const std::string& why) const {
  return of_step(call, step) + " waits for " + list({rank}) + ", which " + why;
}

std::string CallChecks::timed_out(const char* call, std::int64_t step, const std::vector<int>& missing) const {
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%g", spec_.timeout_seconds);
  return "async_emb '" + spec_.name + "' timed out after " + seconds + " s in " + call + " of step " +
         std::to_string(step) + ": missing " + list(missing) + ". Set ASYNC_EMB_TIMEOUT_SECONDS to wait longer";
}

}  // namespace async_emb::context
