// Groups whose ranks lie in several processes.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "context/pipeline.h"
#include "plain_model.h"
#include "ranks.h"

namespace async_emb::context {

inline ContextSpec over(const std::vector<int>& processes, std::int64_t logical_width = 7,
                        core::DType dtype = core::DType::kFloat32) {
  const int group_size = static_cast<int>(processes.size());
  ContextSpec spec = small_spec(group_size, 5, (logical_width + group_size - 1) / group_size);
  spec.processes = processes;
  spec.logical_width = logical_width;
  spec.dtype = dtype;
  spec.id_policy = core::IdPolicy::kDrop;
  spec.timeout_seconds = 60;
  for (int rank = 0; rank < group_size; ++rank) {
    spec.token_blocks[static_cast<std::size_t>(rank)] = group_size - 1 - rank;
  }
  return spec;
}

inline const std::vector<std::vector<int>> kLayouts = {{0, 1},
                                                       {1, 0},
                                                       {0, 0, 1, 1},
                                                       {0, 1, 0, 1},
                                                       {4, 2, 9},
                                                       {0, 0, 0, 1},
                                                       {0, 0, 1, 1, 2, 2, 3, 3},
                                                       {0, 1, 2, 3, 4, 5, 6, 7},
                                                       {0, 0, 0, 0, 1, 1, 1, 1}};

inline std::string name_of(const std::vector<int>& processes) {
  std::string name = "processes";
  for (const int process : processes) name += " " + std::to_string(process);
  return name;
}

inline std::vector<std::string> take_refusals(Setting& setting) {
  std::vector<std::string> told;
  for (const auto& pipeline : setting.group.pipelines) told.push_back(pipeline->take_refusal().value_or("nothing"));
  return told;
}

inline std::vector<std::string> messages_of(const std::vector<std::optional<Failure>>& failures) {
  std::vector<std::string> messages;
  for (const auto& failure : failures) messages.push_back(failure ? failure->message : "none");
  return messages;
}

}  // namespace async_emb::context
