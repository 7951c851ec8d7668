// The memory a pipeline works in. Sized once from the spec; nothing is allocated in a step once the pipeline runs.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "context/spec.h"
#include "core/layout.h"

namespace async_emb::context {

// Memory aligned to a cache line, zeroed by the system on first touch rather than by us.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::int64_t bytes);

  template <typename T>
  T* as() const {
    return static_cast<T*>(data_.get());
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(void* p) const;
  };
  std::unique_ptr<void, Free> data_;
  std::int64_t bytes_ = 0;
};

// The ids of one batch of the whole group, in token order, and where each distinct one occurs. Held by whoever may
// still need it: the armed lookup, the last consumed one, the staged gradients, the update that runs.
struct BatchIds {
  Buffer ids;             // int32 [tokens], cleaned: negative = reads zeros, trains nothing
  Buffer unique;          // int32 [tokens]
  Buffer offsets;         // int32 [tokens + 1]
  Buffer positions;       // int32 [tokens]
  std::int64_t rows = 0;  // every id is below this
  std::int64_t unique_count = 0;
  bool indexed = false;  // unique, offsets, positions are those of ids, or somebody sees to it
  int holders = 0;

  explicit BatchIds(std::int64_t tokens);
  std::int64_t bytes() const { return ids.bytes() + unique.bytes() + offsets.bytes() + positions.bytes(); }
};

struct Arena {
  // By rank of the group, empty for those of other processes:
  std::vector<Buffer> rows;  // looked-up rows that wait for their done, [tokens_per_rank, emb_width]
  std::vector<Buffer> sums;  // fp32 sums of its logical columns, [num_unique, width]
  // Staged gradient rows of the whole group in token order, [tokens, columns of the ranks of this process].
  Buffer grads;
  Buffer subtree_sums;  // fp32 [num_unique, subtrees]
  Buffer statistics;    // fp32 [num_unique]
  Buffer sort_scratch;

  Arena(const ContextSpec& spec, const core::ColumnLayout& layout, const std::vector<int>& local_ranks);
  std::int64_t bytes() const;
};

}  // namespace async_emb::context
