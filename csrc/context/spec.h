// Everything that defines a context. Whatever must agree between ranks is in `key`; `id` is its hash.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/ids.h"

namespace async_emb::context {

struct ContextSpec {
  std::int64_t id = 0;
  std::string key;
  std::string name;
  int group_size = 1;
  std::vector<std::int64_t> devices;  // device ids of every group, in rank order, concatenated
  std::vector<int> gpus;       // ordinals of the same devices where they are GPUs (-1: another process's), else empty
  std::vector<int> processes;  // that have the same devices; empty where all are this process's
  int process = 0;             // this one
  std::vector<int> token_blocks;  // [group_size]: which block of the global token array each rank holds
  std::int64_t tokens_per_rank = 0;
  std::int64_t emb_width = 0;      // columns of the whole table, padding included
  std::int64_t logical_width = 0;  // columns that count
  std::int64_t num_unique = 0;
  core::DType dtype = core::DType::kBFloat16;
  core::IdPolicy id_policy = core::IdPolicy::kError;
  bool has_padding_id = false;
  std::int64_t padding_id = 0;
  bool lookup_only = false;       // never updated: no memory for gradients
  double timeout_seconds = 1800;  // of one wait

  std::int64_t shard_width() const { return emb_width / group_size; }
  std::int64_t tokens() const { return tokens_per_rank * group_size; }
};

}  // namespace async_emb::context
