// How the jobs on ids are launched.
#pragma once

#include <algorithm>
#include <bit>
#include <stdexcept>

#include "cuda/id_bodies.h"
#include "cuda/launch_shape.h"
#include "cuda/launches.h"

namespace async_emb::cuda {
inline namespace ASYNC_EMB_ISA {

// Lanes that take one token at a time.
inline std::int64_t groups_for(std::int64_t tokens) { return ceil_divide(tokens, 32); }

template <class Runner, class Source>
void write_rows(const Source& source, Stream stream) {
  if (source.job.count == 0) return;
  Runner::run(WriteRows<Source>{source}, groups_for(source.job.count), stream);
  if (source.job.report_bad) Runner::run(NoteFirst<Source>{source}, 1, stream);
}

template <class Runner>
void clean_ids(const CleanIds& job, Stream stream) {
  write_rows<Runner>(TokenIds{job}, stream);
}

template <class Runner>
void ids_of_segments(const IdsOfSegments& job, Stream stream) {
  write_rows<Runner>(SegmentIds{job}, stream);
}

template <class Runner>
void check_lookup(const CheckLookup& job, Stream stream) {
  if (job.ids != nullptr) {
    Runner::run(ForgetDifference{job}, 1, stream);
    if (job.count > 0) Runner::run(FindDifference{job}, groups_for(job.count), stream);
  }
  Runner::run(RefuseLookup{job}, 1, stream);
}

// The workspace of unique_ids: keys, sorted keys and the positions to sort, then what the sort itself needs.
struct UniqueWorkspace {
  static constexpr std::int64_t kAlignment = 256;
  std::int64_t array_bytes;
  std::int64_t sort_offset;

  explicit UniqueWorkspace(std::int64_t count)
      : array_bytes(ceil_divide(count * 4, kAlignment) * kAlignment), sort_offset(3 * array_bytes) {}
};

template <class Runner>
std::int64_t unique_ids_workspace(std::int64_t count) {
  return UniqueWorkspace(count).sort_offset + Runner::sort_workspace(count);
}

template <class Runner>
void unique_ids(const UniqueIds& job, Stream stream) {
  const UniqueWorkspace layout(job.count);
  char* const workspace = static_cast<char*>(job.workspace);
  auto* const keys = reinterpret_cast<std::uint32_t*>(workspace);
  auto* const sorted = reinterpret_cast<std::uint32_t*>(workspace + layout.array_bytes);
  auto* const positions = reinterpret_cast<std::int32_t*>(workspace + 2 * layout.array_bytes);
  const auto rows = static_cast<std::uint32_t>(job.rows);
  const StartsSegment starts{sorted, rows};
  const typename Runner::Scratch scratch{workspace + layout.sort_offset, job.workspace_bytes - layout.sort_offset};
  if (scratch.bytes < 0) throw std::runtime_error("async_emb: unique_ids: the workspace is too small");
  if (job.count > 0) {
    Runner::run(MakeKeys{job.ids, job.count, rows, keys, positions}, groups_for(job.count), stream);
    const int bits = std::max(static_cast<int>(std::bit_width(rows)), 1);
    Runner::sort(keys, sorted, positions, job.positions, job.count, bits, scratch, stream);
    Runner::select(starts, job.count, job.offsets, &job.counts->distinct, scratch, stream);
  }
  Runner::run(FinishUnique{job, sorted}, groups_for(job.count + 1), stream);
}

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::cuda
