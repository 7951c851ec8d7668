// How gradient sums, statistics and the decision are launched.
#pragma once

#include <algorithm>
#include <stdexcept>

#include "cuda/launch_shape.h"
#include "cuda/launches.h"
#include "cuda/norm_bodies.h"
#include "cuda/sum_bodies.h"

namespace async_emb::cuda {
inline namespace ASYNC_EMB_ISA {

// The workspace of segment_sum: a segment number and a row of sums for each window.
struct SumWorkspace {
  std::int64_t windows;
  std::int64_t sums_offset;
  std::int64_t bytes;

  SumWorkspace(std::int64_t max_tokens, std::int64_t width)
      : windows(ceil_divide(max_tokens, kBlock)),
        sums_offset(ceil_divide(windows * 4, 256) * 256),
        bytes(sums_offset + windows * width * 4) {}
};

inline std::int64_t segment_sum_workspace(std::int64_t max_tokens, std::int64_t width) {
  return SumWorkspace(max_tokens, width).bytes;
}

// How many rows of a group are summed at once: as many as leave room for other groups.
template <class Grad>
inline constexpr int kPacksAtOnce = sizeof(Grad) == 4 ? 4 : 2;

template <class Runner, class Grad, int N>
void sum_first_blocks(const SumWork& work, Stream stream) {
  const SegmentSum& job = work.job;
  const std::int64_t packs = job.width / N;
  const bool aligned = job.column_begin % next_power_of_two(job.width) == 0;
  constexpr int kPacks = kPacksAtOnce<Grad>;
  const auto run = [&](auto body) {
    static_cast<SumWork&>(body) = work;
    Runner::run(body, ceil_divide(job.max_segments, decltype(body)::kRowsAtOnce), stream);
  };
  if (!aligned || packs > 64 || (packs > 32 && packs < 64)) {
    return run(FirstBlocks<Grad, N, 32, kPacks / 2, Fit::kAny>());
  }
  if constexpr (N * sizeof(Grad) == 16) {
    if (packs == 64) return run(FirstBlocks<Grad, N, 32, kPacks / 2, Fit::kTwoPacks>());
  } else {
    if (packs == 64) return run(FirstBlocks<Grad, N, 32, kPacks / 2, Fit::kAny>());
  }
  with_group<Grad, N>(packs, [&](auto lanes) {
    if constexpr (N * sizeof(Grad) == 16) {
      if (packs == lanes.value) return run(FirstBlocks<Grad, N, lanes.value, kPacks, Fit::kOnePack>());
    }
    run(FirstBlocks<Grad, N, lanes.value, kPacks, Fit::kRagged>());
  });
}

template <class Runner, class Grad, int N>
void sum_later_blocks(SumWork work, std::int64_t windows, Stream stream) {
  const std::int64_t packs = work.job.width / N;
  with_group<Grad, N>(packs, [&](auto lanes) {
    const std::int64_t tiles = ceil_divide(packs, lanes.value);
    require_countable("segment_sum", "blocks of gradient rows", windows * tiles);
    work.column_tiles = fast_divide(tiles);
    LaterBlocks<Grad, N, lanes.value> body;
    static_cast<SumWork&>(body) = work;
    Runner::run(body, windows * tiles, stream);
  });
}

template <class Runner>
void segment_sum(const SegmentSum& job, Stream stream) {
  if (job.width == 0 || job.max_segments == 0 || job.max_tokens == 0) return;
  const SumWorkspace layout(job.max_tokens, job.width);
  if (job.workspace_bytes < layout.bytes)
    throw std::runtime_error("async_emb: segment_sum: the workspace is too small");
  SumWork work;
  work.job = job;
  work.grads = grad_rows_of(job);
  work.subtrees = core::count_subtrees(job.column_begin, job.column_begin + job.width);
  work.long_segment = static_cast<std::int32_t*>(job.workspace);
  work.block_sums = reinterpret_cast<float*>(static_cast<char*>(job.workspace) + layout.sums_offset);

  const bool aligned_sums = common_alignment({address_of(job.sums), address_of(work.block_sums)}) == 16;
  const std::int64_t most =
      std::min({aligned_elements(job), aligned_sums ? std::int64_t{16} : std::int64_t{1}, job.width & -job.width});
  with_element(job.grad_dtype, [&](auto grad) {
    using Grad = decltype(grad);
    with_pack<Grad>(most, [&](auto n) {
      sum_first_blocks<Runner, Grad, n.value>(work, stream);
      sum_later_blocks<Runner, Grad, n.value>(work, layout.windows, stream);
    });
  });

  CombineBlocks combine;
  static_cast<SumWork&>(combine) = work;
  const std::int64_t tiles = ceil_divide(job.width, 32);
  require_countable("segment_sum", "columns of blocks", layout.windows * tiles);
  combine.column_tiles = fast_divide(tiles);
  Runner::run(combine, layout.windows * tiles, stream);
  LongSquares squares;
  static_cast<SumWork&>(squares) = work;
  Runner::run(squares, layout.windows, stream);
}

template <class Runner>
void row_statistic(const RowStatistic& job, Stream stream) {
  if (job.max_segments == 0) return;
  FinishRows body{job};
  for (int rank = 0; rank < job.num_ranks; ++rank) body.subtrees += job.subtrees[rank];
  Runner::run(body, ceil_divide(job.max_segments, 32), stream);
}

// The roots of every level of tiles but the last one's, one level after the other.
inline std::int64_t decide_workspace(std::int64_t max_segments) {
  std::int64_t roots = 0;
  for (std::int64_t count = max_segments; count > (1 << kTileLevels);) {
    count = tiles_of(count);
    roots += count;
  }
  return roots * 4;
}

template <class Runner>
void decide(const Decide& job, Stream stream) {
  if (job.workspace_bytes < decide_workspace(job.max_segments)) {
    throw std::runtime_error("async_emb: decide: the workspace is too small");
  }
  SumTiles tiles{job.statistics, job.counts, 0, static_cast<float*>(job.workspace), job.skip};
  for (std::int64_t count = job.max_segments; count > (1 << kTileLevels);) {
    count = tiles_of(count);
    Runner::run(tiles, count, stream);
    tiles = SumTiles{tiles.roots, job.counts, tiles.levels_below + 1, tiles.roots + count, job.skip};
  }
  Runner::run(DecideUpdate{job, tiles}, 1, stream);
}

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::cuda
