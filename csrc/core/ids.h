// Turning the caller's ids into rows: int32, negative where there is none. Kernels see only what comes out of here.
#pragma once

#include <cstdint>

#include "core/platform.h"

namespace async_emb::core {

// What happens to an id outside [0, rows). kError drops it too: the caller reports it once the step has finished.
enum class IdPolicy : std::int32_t { kError = 0, kDrop = 1, kClamp = 2 };

inline namespace ASYNC_EMB_ISA {

struct IdReport {
  std::int64_t bad = 0;                  // ids outside of [0, rows), whatever became of them
  std::int64_t padding = 0;              // ids equal to padding_id, in range or not
  std::int64_t first_bad_position = -1;  // -1 where there is none
  std::int64_t first_bad_id = 0;
};

// The row of one id, or -1. Padding comes first: a padding_id outside of the range is not bad. It also comes last: an
// id that is clamped onto padding_id is bad and has no row, because that row is never read nor trained.
ASYNC_EMB_INLINE std::int32_t clean_id(std::int64_t id, std::int64_t rows, IdPolicy policy, bool has_padding,
                                       std::int64_t padding_id, bool& is_padding, bool& is_bad) {
  is_padding = has_padding && id == padding_id;
  is_bad = !is_padding && (id < 0 || id >= rows);
  // A table without rows has nothing to clamp to.
  const std::int64_t nearest = id < 0 ? (rows > 0 ? 0 : -1) : rows - 1;
  const std::int64_t replacement = policy == IdPolicy::kClamp ? nearest : -1;
  const std::int64_t row = is_bad ? replacement : id;
  return static_cast<std::int32_t>(has_padding && row == padding_id ? -1 : row);
}

// Cleans ids in[0 .. count - 1] into out. rows is at most 2^31 - 1; Id is int32 or int64.
template <class Id>
ASYNC_EMB_FN IdReport clean_ids(const Id* in, std::int64_t count, std::int64_t rows, IdPolicy policy, bool has_padding,
                                std::int64_t padding_id, std::int32_t* out) {
  IdReport report;
  bool is_padding = false;
  bool is_bad = false;
  for (std::int64_t i = 0; i < count; ++i) {
    out[i] = clean_id(in[i], rows, policy, has_padding, padding_id, is_padding, is_bad);
    report.padding += is_padding ? 1 : 0;
    report.bad += is_bad ? 1 : 0;
  }
  // Bad ids are rare: the first is looked for only when there is one.
  for (std::int64_t i = 0; report.bad > 0 && i < count; ++i) {
    clean_id(in[i], rows, policy, has_padding, padding_id, is_padding, is_bad);
    if (is_bad) {
      report.first_bad_position = i;
      report.first_bad_id = in[i];
      break;
    }
  }
  return report;
}

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::core
