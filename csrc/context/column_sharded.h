// The work of one step on a column-sharded table: every rank holds all rows and a block of columns.
//
// Pure work on buffers: no locks, no order, no waiting. Each job can be cut into parts that run on any threads at once,
// and the cut never changes a bit. Ranks of one process read each other's shards and gradient rows where they lie; what
// is the same for every rank (distinct ids, statistics, norm) is computed once.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "context/arena.h"
#include "context/packed_columns.h"
#include "context/round.h"
#include "context/spec.h"
#include "core/layout.h"
#include "cpu/kernels.h"

namespace async_emb::context {

class ColumnSharded {
 public:
  // `local_ranks`: those of this process, ascending.
  ColumnSharded(const ContextSpec& spec, std::vector<int> local_ranks);

  Arena& arena() { return arena_; }
  const Arena& arena() const { return arena_; }

  // Rows of the part'th of `parts` pieces of rank's tokens, from every shard of this process, into their columns of
  // `destination` [tokens_per_rank, emb_width]. `tables` by rank.
  void gather(const BatchIds& batch, std::span<const void* const> tables, int rank, int part, int parts,
              void* destination) const;
  // The same for a rank of another process: the columns of this process side by side, [tokens_per_rank, held_width].
  void gather_for_peer(const BatchIds& batch, std::span<const void* const> tables, int rank, void* destination) const;

  // What a lookup gives that was refused: NaN, so that no step takes it for rows and its gradients are never applied.
  void fill_refused(void* destination) const;

  // Takes the gradient rows of a rank of this process, [tokens_per_rank, emb_width], into the arena: the columns that
  // this process holds. The part'th of `parts` pieces of its tokens.
  void stage(int rank, const void* grads, int part = 0, int parts = 1);
  // Gives them back: those columns of [tokens_per_rank, emb_width].
  void unstage(int rank, void* grads) const;

  // Finds the distinct ids of the batch and where they occur.
  void index(BatchIds& batch);
  // Canonical sums of the gradient rows over this rank's columns, and its subtrees of the row statistic.
  void sum(const BatchIds& batch, int rank, int part, int parts) const;
  // Statistics of the rows [begin, end) of the distinct ids, from all ranks' subtrees; and the global norm, from all.
  void statistics(std::int64_t begin, std::int64_t end) const;
  float norm(const BatchIds& batch) const;
  // The optimizer's rule on this rank's columns. Returns how many fp16 stores saturated.
  std::int64_t apply(const BatchIds& batch, const UpdateRule& rule, float norm, const UpdateRound::Rank& buffers,
                     int rank, int part, int parts) const;

  // The columns that this process holds, side by side in the order of their ranks; in elements.
  std::int64_t held_width() const { return static_cast<std::int64_t>(local_.size()) * spec_.shard_width(); }
  std::int64_t held_begin(int rank) const;
  const core::ColumnLayout& layout() const { return layout_; }

  // In how many parts to cut the work of one rank, given the threads there are for all of them.
  int parts_for(std::int64_t bytes, int threads) const;
  std::int64_t lookup_bytes() const { return spec_.tokens_per_rank * spec_.emb_width * element_; }
  std::int64_t sum_bytes(int rank) const;

 private:
  void gather_block(const std::int32_t* ids, std::int64_t count, std::span<const void* const> tables, char* out,
                    bool side_by_side) const;

  const ContextSpec& spec_;
  const cpu::Kernels& kernels_;
  const std::int64_t element_;
  const core::ColumnLayout layout_;
  const std::vector<int> local_;
  const PackedColumns held_;
  const std::vector<std::int8_t> levels_;  // of every rank's subtrees, in column order
  Arena arena_;
  std::mutex sorting_;  // one batch at a time: there is one scratch
};

}  // namespace async_emb::context
