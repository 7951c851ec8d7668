#include "context/device_arena.h"

#include <algorithm>

namespace async_emb::context {
namespace {

template <typename... Factors>
std::int64_t product(const char* what, Factors... factors) {
  return core::checked_product(what, {static_cast<std::int64_t>(factors)...});
}

template <typename Arrays>
std::int64_t bytes_of(const Arrays& arrays) {
  std::int64_t total = 0;
  for (const auto& array : arrays) total += array.bytes();
  return total;
}

}  // namespace

DeviceArena::DeviceArena(const ContextSpec& spec, const core::ColumnLayout& layout, int rank,
                         const std::vector<cuda::Device*>& devices) {
  core::checked_int32("tokens of a batch",
                      core::checked_product("tokens of a batch", {spec.tokens_per_rank, spec.group_size}));
  cuda::Device& device = *devices[rank];
  const cuda::Launches& launches = device.launches();
  const std::int64_t element = core::size_of(spec.dtype);
  const std::int64_t tokens = spec.tokens();
  const std::int64_t unique_rows = std::min(spec.num_unique, tokens);
  const std::int64_t block = product("looked-up rows", spec.tokens_per_rank, spec.emb_width, element);
  const std::int64_t shard_block = product("looked-up rows", spec.tokens_per_rank, spec.shard_width(), element);

  rows = {device, block};
  counters = {device, 1};
  const cuda::IdFinding none;
  for (auto* finding : {&bad_id, &too_many}) {
    *finding = {device, 1};
    device.write(finding->get(), &none, sizeof(none));
  }
  first_differing = {device, 1};
  for (auto& skip : round_skip) skip = {device, 1};
  for (auto& skip : done_skip) skip = {device, 1};
  always = {device, 1};
  const std::int32_t one = 1;
  device.write(always.get(), &one, sizeof(one));

  const std::size_t group_size = static_cast<std::size_t>(spec.group_size);
  rows_inbox.resize(group_size);
  rows_outbox.resize(group_size);
  asked.resize(group_size);
  grads_inbox.resize(group_size);
  subtree_inbox.resize(group_size);
  pending_inbox.resize(group_size);
  for (int peer = 0; peer < spec.group_size; ++peer) {
    if (devices[peer] == nullptr) {
      if (token_positions.get() == nullptr) token_positions = {device, spec.tokens_per_rank};
      if (lookup_finding.get() == nullptr) lookup_finding = {device, 1};
      continue;
    }
    if (!device.reads(*devices[peer])) {
      rows_inbox[peer] = {device, shard_block};
      if (token_positions.get() == nullptr) token_positions = {device, spec.tokens_per_rank};
      if (!spec.lookup_only) {
        grads_inbox[peer] = {device, block};
        subtree_inbox[peer] = {device, product("row statistics", unique_rows, layout.subtree_count(peer))};
        pending_inbox[peer] = {device, 1};
      }
    }
    if (!devices[peer]->reads(device)) {
      rows_outbox[peer] = {device, shard_block};
      asked[peer] = {device, spec.tokens_per_rank};
    }
  }
  if (spec.lookup_only) return;

  grads = {device, block};
  ids = {device, tokens};
  unique = {device, tokens};
  offsets = {device, tokens + 1};
  positions = {device, tokens};
  counts = {device, 1};
  sort_workspace = {device, launches.unique_ids_workspace(tokens)};
  sum_workspace = {device, launches.segment_sum_workspace(tokens, layout.width(rank))};
  norm_workspace = {device, launches.decide_workspace(unique_rows)};
  sums = {device, product("gradient sums", unique_rows, layout.width(rank))};
  subtree_sums = {device, product("row statistics", unique_rows, layout.subtree_count(rank))};
  statistics = {device, unique_rows};
  const std::vector<std::int8_t> all = layout.levels();
  levels = {device, static_cast<std::int64_t>(all.size())};
  device.write(levels.get(), all.data(), levels.bytes());
  pending = {device, 1};
  numbers = {device, 1};
  outcome = {device, 1};
}

std::int64_t DeviceArena::bytes() const {
  std::int64_t total = bytes_of(rows_inbox) + bytes_of(rows_outbox) + bytes_of(asked) + bytes_of(grads_inbox) +
                       bytes_of(subtree_inbox) + bytes_of(pending_inbox) + bytes_of(round_skip) + bytes_of(done_skip);
  const auto add = [&](const auto&... arrays) { ((total += arrays.bytes()), ...); };
  add(rows, grads, ids, unique, offsets, positions, counts, sort_workspace, sum_workspace, norm_workspace, sums);
  add(subtree_sums, statistics, levels, pending, numbers, outcome, counters, bad_id, too_many, first_differing, always);
  add(token_positions, lookup_finding);
  return total;
}

}  // namespace async_emb::context
