// Ids on their way into the kernels: cleaned, counted, compared, and indexed.
#pragma once

#include <cstdint>

#include "core/ids.h"
#include "cuda/launches.h"
#include "cuda/share.h"

namespace async_emb::cuda {
inline namespace ASYNC_EMB_ISA {

// Whether an id found in `step` may still become the finding. Its position is the smallest so far; -1, none, is the
// largest as an unsigned number.
ASYNC_EMB_INLINE bool may_note(const IdFinding& finding, std::int64_t step) {
  return finding.step == 0 || (finding.step == step && finding.distinct == 0);
}

// Cleans one token's id: what clean_ids and ids_of_segments differ in.
struct TokenIds {
  CleanIds job;

  ASYNC_EMB_INLINE std::int64_t id_of(std::int64_t i, bool&) const {
    return job.wide ? static_cast<const std::int64_t*>(job.ids)[i] : static_cast<const std::int32_t*>(job.ids)[i];
  }
  ASYNC_EMB_INLINE std::int32_t row_of(std::int64_t i, bool& is_padding, bool& is_bad) const {
    return core::clean_id(id_of(i, is_bad), job.rows, job.policy, job.has_padding, job.padding_id, is_padding, is_bad);
  }
  static constexpr bool kCountsPadding = true;
  static const char* name() { return "clean_ids"; }
};

struct SegmentIds {
  IdsOfSegments job;

  // The row that a token's index leads to; the index itself where it leads nowhere.
  ASYNC_EMB_INLINE std::int64_t id_of(std::int64_t i, bool& in_range) const {
    const std::int32_t segment = job.segment_ids[i];
    in_range = segment >= 0 && segment < job.num_unique;
    return in_range ? job.unique_tokens[segment] : segment;
  }
  ASYNC_EMB_INLINE std::int32_t row_of(std::int64_t i, bool& is_padding, bool& is_bad) const {
    bool in_range = false;
    const std::int64_t id = id_of(i, in_range);
    is_padding = in_range ? job.has_padding && id == job.padding_id : id == -1;
    const bool has_row = in_range && !is_padding && id >= 0 && id < job.rows;
    is_bad = !is_padding && !has_row;
    return has_row ? static_cast<std::int32_t>(id) : -1;
  }
  // A token that is not trained is no padding of the batch.
  static constexpr bool kCountsPadding = false;
  static const char* name() { return "ids_of_segments"; }
};

template <class Source>
struct WriteRows {
  static constexpr int kLanes = 32;
  static constexpr bool kMeet = true;
  static constexpr int kStack = 0;
  static constexpr int kResident = 4;
  static const char* name() { return Source::name(); }

  Source source;

  template <class Lanes>
  ASYNC_EMB_INLINE void operator()(Lanes lanes, Share share) const {
    const auto& job = source.job;
    const bool notes = job.report_bad && may_note(*job.finding, job.step);
    std::uint32_t bad = 0;
    std::uint32_t padding = 0;
    for (std::int64_t i = share.lane_first(lanes); i < job.count; i += share.lane_step(lanes)) {
      bool is_padding = false;
      bool is_bad = false;
      job.out[i] = source.row_of(i, is_padding, is_bad);
      padding += is_padding ? 1 : 0;
      bad += is_bad ? 1 : 0;
      if (is_bad && notes) keep_first_atomically(&job.finding->position, job.first_position + i);
    }
    bad = lanes.sum(bad);
    padding = lanes.sum(padding);
    if (lanes.index() != 0) return;
    if (bad > 0) add_atomically(&job.counters->bad_ids, bad);
    if (Source::kCountsPadding && padding > 0) add_atomically(&job.counters->padding_ids, padding);
  }
};

// Completes the finding whose position WriteRows left, where that is one of this job.
template <class Source>
struct NoteFirst {
  static constexpr int kLanes = 1;
  static constexpr bool kMeet = false;
  static constexpr int kStack = 0;
  static constexpr int kResident = 4;
  static const char* name() { return Source::name(); }

  Source source;

  template <class Lanes>
  ASYNC_EMB_INLINE void operator()(Lanes, Share) const {
    const auto& job = source.job;
    const std::int64_t i = job.finding->position - job.first_position;
    if (!may_note(*job.finding, job.step) || job.finding->position < 0 || i < 0 || i >= job.count) return;
    bool ignored = false;
    bool is_bad = false;
    source.row_of(i, ignored, is_bad);
    if (!is_bad) return;  // of another job with the same tokens
    job.finding->id = source.id_of(i, ignored);
    job.finding->step = job.step;
  }
};

// ---- check_lookup

struct ForgetDifference {
  static constexpr int kLanes = 1;
  static constexpr bool kMeet = false;
  static constexpr int kStack = 0;
  static constexpr int kResident = 4;
  static const char* name() { return "check_lookup"; }

  CheckLookup job;

  template <class Lanes>
  ASYNC_EMB_INLINE void operator()(Lanes, Share) const {
    *job.first_differing = -1;
  }
};

ASYNC_EMB_INLINE std::int32_t given_row(const CheckLookup& job, std::int64_t i) {
  const std::int64_t id =
      job.wide ? static_cast<const std::int64_t*>(job.ids)[i] : static_cast<const std::int32_t*>(job.ids)[i];
  bool is_padding = false;
  bool is_bad = false;
  return core::clean_id(id, job.rows, job.policy, job.has_padding, job.padding_id, is_padding, is_bad);
}

struct FindDifference {
  static constexpr int kLanes = 32;
  static constexpr bool kMeet = false;
  static constexpr int kStack = 0;
  static constexpr int kResident = 4;
  static const char* name() { return "check_lookup"; }

  CheckLookup job;

  template <class Lanes>
  ASYNC_EMB_INLINE void operator()(Lanes lanes, Share share) const {
    for (std::int64_t i = share.lane_first(lanes); i < job.count; i += share.lane_step(lanes)) {
      if (given_row(job, i) == job.armed[i]) continue;
      keep_first_atomically(job.first_differing, i);
      return;  // what this lane has left comes later
    }
  }
};

struct RefuseLookup {
  static constexpr int kLanes = 1;
  static constexpr bool kMeet = false;
  static constexpr int kStack = 0;
  static constexpr int kResident = 4;
  static const char* name() { return "check_lookup"; }

  CheckLookup job;

  template <class Lanes>
  ASYNC_EMB_INLINE void operator()(Lanes, Share) const {
    if (read_shared(&job.refusal->refused_call) <= job.call) return;
    const float pin = *job.pin;
    const std::int64_t position = job.ids != nullptr ? *job.first_differing : -1;
    if (pin != job.expected) {
      job.refusal->kind = RefusalKind::kStalePin;
      job.refusal->pin = pin;
    } else if (position >= 0) {
      job.refusal->kind = RefusalKind::kOtherBatch;
      job.refusal->position = position;
      job.refusal->given = given_row(job, position);
      job.refusal->armed = job.armed[position];
    } else {
      return;
    }
    write_last(job.call, &job.refusal->refused_call);
  }
};

// ---- unique_ids: keys in sorted order lie between these two bodies

// Keys to sort by: ids, and `rows`, the largest, where there is none. Values: token positions.
struct MakeKeys {
  static constexpr int kLanes = 32;
  static constexpr bool kMeet = false;
  static constexpr int kStack = 0;
  static constexpr int kResident = 4;
  static const char* name() { return "unique_ids"; }

  const std::int32_t* ids;
  std::int64_t count;
  std::uint32_t rows;
  std::uint32_t* keys;
  std::int32_t* positions;

  template <class Lanes>
  ASYNC_EMB_INLINE void operator()(Lanes lanes, Share share) const {
    for (std::int64_t i = share.lane_first(lanes); i < count; i += share.lane_step(lanes)) {
      keys[i] = ids[i] >= 0 ? static_cast<std::uint32_t>(ids[i]) : rows;
      positions[i] = static_cast<std::int32_t>(i);
    }
  }
};

// Whether a segment of equal ids starts at an index of the sorted keys.
struct StartsSegment {
  const std::uint32_t* keys;
  std::uint32_t rows;

  ASYNC_EMB_INLINE bool operator()(std::int32_t i) const {
    return keys[i] < rows && (i == 0 || keys[i - 1] != keys[i]);
  }
};

// From the sorted keys, and counts->distinct starts of segments in `offsets`, the rest of the result.
struct FinishUnique {
  static constexpr int kLanes = 32;
  static constexpr bool kMeet = false;
  static constexpr int kStack = 0;
  static constexpr int kResident = 4;
  static const char* name() { return "unique_ids"; }

  UniqueIds job;
  const std::uint32_t* keys;

  template <class Lanes>
  ASYNC_EMB_INLINE void operator()(Lanes lanes, Share share) const {
    const std::int32_t distinct = job.count > 0 ? job.counts->distinct : 0;
    const auto rows = static_cast<std::uint32_t>(job.rows);
    for (std::int64_t i = share.lane_first(lanes); i <= job.count; i += share.lane_step(lanes)) {
      if (i < distinct) job.unique[i] = static_cast<std::int32_t>(keys[job.offsets[i]]);
      const bool before_is_trained = i == 0 || keys[i - 1] < rows;
      const bool ends_here = before_is_trained && (i == job.count || keys[i] >= rows);
      if (ends_here) finish(distinct, static_cast<std::int32_t>(i));
    }
  }

  ASYNC_EMB_INLINE void finish(std::int32_t distinct, std::int32_t tokens) const {
    job.offsets[distinct] = tokens;
    job.counts->distinct = distinct;
    const bool too_many = distinct > job.limit;
    job.counts->kept = too_many ? static_cast<std::int32_t>(job.limit) : distinct;
    job.counts->trained = too_many ? job.offsets[job.limit] : tokens;
    if (!too_many || job.finding == nullptr || job.finding->step != 0) return;
    job.finding->position = -1;
    job.finding->distinct = distinct;
    job.finding->step = job.step;
  }
};

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::cuda
