#include "context/clean_ids.h"

namespace async_emb::context {
namespace {

template <typename Id>
IdDifference first_difference_of(const Id* ids, const ContextSpec& spec, std::int64_t rows, const std::int32_t* armed) {
  bool is_padding = false;
  bool is_bad = false;
  for (std::int64_t i = 0; i < spec.tokens_per_rank; ++i) {
    const std::int32_t id =
        core::clean_id(ids[i], rows, spec.id_policy, spec.has_padding_id, spec.padding_id, is_padding, is_bad);
    if (id != armed[i]) return {i, id};
  }
  return {};
}

}  // namespace

core::IdReport clean_ids(const DLTensor& ids, const ContextSpec& spec, std::int64_t rows, std::int32_t* out) {
  if (same_type(ids.dtype, kInt64)) {
    return core::clean_ids(static_cast<const std::int64_t*>(data_of(ids)), spec.tokens_per_rank, rows, spec.id_policy,
                           spec.has_padding_id, spec.padding_id, out);
  }
  return core::clean_ids(static_cast<const std::int32_t*>(data_of(ids)), spec.tokens_per_rank, rows, spec.id_policy,
                         spec.has_padding_id, spec.padding_id, out);
}

IdDifference first_difference(const DLTensor& ids, const ContextSpec& spec, std::int64_t rows,
                              const std::int32_t* armed) {
  if (same_type(ids.dtype, kInt64)) {
    return first_difference_of(static_cast<const std::int64_t*>(data_of(ids)), spec, rows, armed);
  }
  return first_difference_of(static_cast<const std::int32_t*>(data_of(ids)), spec, rows, armed);
}

core::IdReport ids_of_segments(const DLTensor& segment_ids, const DLTensor& unique_tokens, const ContextSpec& spec,
                               std::int64_t rows, std::int32_t* out) {
  const auto* segments = static_cast<const std::int32_t*>(data_of(segment_ids));
  const auto* unique = static_cast<const std::int32_t*>(data_of(unique_tokens));
  const std::int64_t count = element_count(segment_ids);
  const std::int64_t num_unique = element_count(unique_tokens);
  core::IdReport report;
  for (std::int64_t i = 0; i < count; ++i) {
    out[i] = -1;
    if (segments[i] == -1) {
      ++report.padding;
      continue;
    }
    const bool in_range = segments[i] >= 0 && segments[i] < num_unique;
    const std::int64_t id = in_range ? unique[segments[i]] : segments[i];
    if (in_range && spec.has_padding_id && id == spec.padding_id) {
      ++report.padding;
      continue;
    }
    if (in_range && id >= 0 && id < rows) {
      out[i] = static_cast<std::int32_t>(id);
      continue;
    }
    if (report.bad++ == 0) {
      report.first_bad_position = i;
      report.first_bad_id = id;
    }
  }
  return report;
}

}  // namespace async_emb::context
