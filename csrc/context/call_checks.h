// What a call must bring, whichever device its tables live on: shapes, dtypes, buffers. Every message names the
// context, the call and the rank.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "context/failure.h"
#include "context/spec.h"
#include "context/tensor_view.h"

namespace async_emb::context {

class CallChecks {
 public:
  // Both are kept by reference.
  CallChecks(const ContextSpec& spec, const std::vector<std::int64_t>& devices) : spec_(spec), devices_(devices) {}

  // "async_emb 'users' lookup_start on rank 1 (device 3)"
  std::string where(const char* call, int rank) const;

  // These throw Error(kInvalidArgument).
  void lookup_start(int rank, const DLTensor& ids, std::int64_t rows) const;
  void lookup_done_ids(int rank, const DLTensor& ids) const;
  void rows(const DLTensor& rows) const;
  void stage_update(int rank, const DLTensor& grads, const DLTensor* segment_ids, const DLTensor* unique_tokens) const;
  // One bool or int32, [] or [1].
  static void pending(const DLTensor& pending);

  // Staged gradients that a snapshot brings, in tokens and bytes; and a context that is not idle.
  void staged(std::int64_t tokens, std::int64_t bytes) const;
  [[noreturn]] void not_idle() const;

  // Failures of a step that peers wait for: the caller fails its pipeline with them. Nothing where all is well.
  struct UpdateBuffers {
    const DLTensor& table;
    const DLTensor& row_state;
    const DLTensor* last_step;
  };
  std::optional<Failure> lookup_table(int rank, std::int64_t step, const DLTensor& table, std::int64_t rows) const;
  std::optional<Failure> rows_of_peers(int rank, std::int64_t step, std::int64_t rows, std::int64_t peer_rows) const;
  // `staged_rows`: rows of the table that the staged gradients are for, or -1 where none are staged; `last_table`: what
  // the last lookup read, or null.
  std::optional<Failure> update_buffers(int rank, std::int64_t step, const UpdateBuffers& buffers, bool lazy,
                                        std::int64_t staged_rows, const void* last_table) const;

  // "async_emb 'users' lookup_start of step 5"
  std::string of_step(const char* call, std::int64_t step) const;
  // "async_emb 'users' lost rank 1 (device 3, process 1) in lookup_start of step 5: ..."
  std::string lost(const char* call, std::int64_t step, const std::vector<int>& ranks, const std::string& why) const;
  // "async_emb 'users' lookup_start of step 5 waits for rank 1 (device 3), which has closed the table"
  std::string absent(const char* call, std::int64_t step, int rank, const std::string& why) const;
  // "async_emb 'users' timed out after 30 s in lookup_start of step 5: missing rank 1 (device 3). ..."
  std::string timed_out(const char* call, std::int64_t step, const std::vector<int>& missing) const;

 private:
  // "rank 1 (device 3), rank 2 (device 4)", with the processes where there are several.
  std::string list(const std::vector<int>& ranks) const;

  const ContextSpec& spec_;
  const std::vector<std::int64_t>& devices_;
};

}  // namespace async_emb::context
