// The work of one step on a column-sharded table: every rank holds all rows and a block of columns.
//
// Pure work on buffers: no locks, no order, no waiting. Each job can be cut into parts that run on any threads at once,
// and the cut never changes a bit. Ranks of one process read each other's shards and gradient rows where they lie; what
// is the same for every rank (distinct ids, statistics, norm) is computed once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "context/arena.h"
#include "context/round.h"
#include "context/spec.h"
#include "core/layout.h"
#include "cpu/kernels.h"

namespace async_emb::context {

class ColumnSharded {
 public:
  explicit ColumnSharded(const ContextSpec& spec);

  Arena& arena() { return arena_; }
  const Arena& arena() const { return arena_; }

  // Rows of the part'th of `parts` pieces of rank's tokens, from every shard, into `destination` [tokens_per_rank,
  // emb_width].
  void gather(const BatchIds& batch, std::span<const void* const> tables, int rank, int part, int parts,
              void* destination) const;

  // What a lookup gives that was refused: NaN, so that no step takes it for rows and its gradients are never applied.
  void fill_refused(void* destination) const;

  // Finds the distinct ids of the batch and where they occur.
  void index(BatchIds& batch) const;
  // Canonical sums of the gradient rows over this rank's columns, and its subtrees of the row statistic.
  void sum(const BatchIds& batch, int rank, int part, int parts) const;
  // Row statistics from all ranks' subtrees; returns the global norm.
  float finish_norm(const BatchIds& batch) const;
  // The optimizer's rule on this rank's columns. Returns how many fp16 stores saturated.
  std::int64_t apply(const BatchIds& batch, const UpdateRule& rule, float norm, const UpdateRound::Rank& buffers,
                     int rank, int part, int parts) const;

  // In how many parts to cut the work of one rank, given the threads there are for all of them.
  int parts_for(std::int64_t bytes, int threads) const;
  std::int64_t lookup_bytes() const { return spec_.tokens_per_rank * spec_.emb_width * element_; }
  std::int64_t sum_bytes(int rank) const;

 private:
  const ContextSpec& spec_;
  const cpu::Kernels& kernels_;
  const std::int64_t element_;
  const core::ColumnLayout layout_;
  const std::vector<std::int8_t> levels_;  // of every rank's subtrees, in column order
  Arena arena_;
};

}  // namespace async_emb::context
