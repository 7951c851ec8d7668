// What the processes of a group tell each other at each start, and whether they mean the same step.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "context/group_pipeline.h"
#include "context/process_map.h"
#include "context/round.h"
#include "cuda/launches.h"

namespace async_emb::context {

// Sent as it lies in memory: the processes of a job run one build on one kind of machine.
struct Notice {
  std::int64_t start = 0;  // which start of the channel this is, refused ones counted
  std::int64_t step = 0;   // 0 where the start was refused
  std::int64_t rows = 0;
  bool refused = false;  // `why`
  bool staged = false;   // updates alone, as what follows
  bool pending = false;
  bool own_ids = false;  // stage_update was given segment_ids
  UpdateRule rule{};
  bool has_id_problem = false;  // of this step, with the policy `error`
  IdProblem id_problem{};
  char why[512] = {};
};

// The first number in which two rules differ, in words: "learning_rate is 0.05 on rank 0 and 0.1 on rank 1".
std::optional<std::string> difference(const UpdateRule& a, const std::string& where_a, const UpdateRule& b,
                                      const std::string& where_b);

// How the notices of one start, by process, disagree: the first difference, in words, or nothing. `names` are the
// processes' numbers in the program.
std::optional<std::string> disagreement(const std::vector<Notice>& notices, const std::vector<int>& names);

// The same of the numbers of a rule, which only GPUs know: "learning_rate is 0.05 on process 0 and 0.1 on process 1".
std::string in_words(const cuda::RuleDifference& difference, bool lazy, const ProcessMap& map);

}  // namespace async_emb::context
