// Token ids as a face brings them, turned into what the kernels read: an int32 row, or a negative number for "no row".
#pragma once

#include <cstdint>

#include "context/spec.h"
#include "context/tensor_view.h"
#include "core/ids.h"

namespace async_emb::context {

// Cleans `ids` (int32 or int64, any shape) under the spec's policy into `out`.
core::IdReport clean_ids(const DLTensor& ids, const ContextSpec& spec, std::int64_t rows, std::int32_t* out);

struct IdDifference {
  std::int64_t position = -1;  // -1: none
  std::int32_t given = 0;      // the cleaned id there
};

// Where `ids`, once cleaned, first differ from the cleaned ids `armed`.
IdDifference first_difference(const DLTensor& ids, const ContextSpec& spec, std::int64_t rows,
                              const std::int32_t* armed);

// Ids of tokens from each token's index into `unique_tokens`; -1 for a token that is not trained: its index is -1, or
// leads to the spec's padding_id. An index outside [0, num_unique) or one that leads to a row outside [0, rows) is bad,
// and trains nothing.
core::IdReport ids_of_segments(const DLTensor& segment_ids, const DLTensor& unique_tokens, const ContextSpec& spec,
                               std::int64_t rows, std::int32_t* out);

}  // namespace async_emb::context
