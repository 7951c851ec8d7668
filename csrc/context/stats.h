// Counters of one pipeline. Guarded by the pipeline's lock.
#pragma once

#include <cstdint>

namespace async_emb::context {

struct Stats {
  // Native calls that reached the context, over all local ranks.
  std::int64_t lookup_begin_calls = 0;
  std::int64_t lookup_lease_calls = 0;
  std::int64_t lookup_done_calls = 0;
  std::int64_t stage_calls = 0;
  std::int64_t update_begin_calls = 0;
  std::int64_t update_lease_calls = 0;
  std::int64_t update_done_calls = 0;
  std::int64_t refused_calls = 0;

  std::int64_t lookups = 0;          // steps, whole group
  std::int64_t updates = 0;          // steps that changed the table
  std::int64_t skipped_updates = 0;  // steps whose gradients were staged and then not applied
  std::int64_t tokens = 0;           // ids looked up
  std::int64_t trained_tokens = 0;   // ids whose gradients were summed, and
  std::int64_t unique_tokens = 0;    // the distinct ones among them
  std::int64_t bad_ids = 0;
  std::int64_t padding_ids = 0;
  std::int64_t bytes_moved = 0;      // rows and gradient rows that crossed from one rank to another
  std::int64_t bytes_sent = 0;       // to other processes, all told
  std::int64_t saturated = 0;        // fp16 stores that hit the largest finite value
  std::int64_t exposed_wait_ns = 0;  // a done was called and its result was not there yet; summed over local ranks
};

}  // namespace async_emb::context
