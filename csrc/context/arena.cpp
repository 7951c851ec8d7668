#include "context/arena.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#include "cpu/huge_pages.h"
#include "cpu/kernels.h"

namespace async_emb::context {
namespace {

constexpr std::int64_t kAlignment = 64;

template <typename... Factors>
std::int64_t bytes_of(const char* what, std::int64_t element_bytes, Factors... factors) {
  return core::checked_product(what, {element_bytes, static_cast<std::int64_t>(factors)...});
}

}  // namespace

Buffer::Buffer(std::int64_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  const std::int64_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  data_.reset(std::aligned_alloc(kAlignment, static_cast<std::size_t>(rounded)));
  if (!data_) throw std::bad_alloc();
  cpu::prefer_huge_pages(data_.get(), bytes);
}

void Buffer::Free::operator()(void* p) const { std::free(p); }

BatchIds::BatchIds(std::int64_t tokens)
    : ids(bytes_of("token ids", 4, tokens)),
      unique(bytes_of("unique ids", 4, tokens)),
      offsets(bytes_of("segment offsets", 4, tokens + 1)),
      positions(bytes_of("token positions", 4, tokens)) {}

Arena::Arena(const ContextSpec& spec, const core::ColumnLayout& layout, const std::vector<int>& local_ranks)
    : rows(static_cast<std::size_t>(spec.group_size)), sums(static_cast<std::size_t>(spec.group_size)) {
  // Kernels number tokens by int32; this also makes sure that spec.tokens() itself does not overflow.
  core::checked_int32("tokens of a batch",
                      core::checked_product("tokens of a batch", {spec.tokens_per_rank, spec.group_size}));
  const std::int64_t element = core::size_of(spec.dtype);
  const std::int64_t unique = std::min(spec.num_unique, spec.tokens());
  for (const int rank : local_ranks) {
    rows[static_cast<std::size_t>(rank)] =
        Buffer(bytes_of("looked-up rows", element, spec.tokens_per_rank, spec.emb_width));
  }
  if (spec.lookup_only) return;
  for (const int rank : local_ranks) {
    sums[static_cast<std::size_t>(rank)] = Buffer(bytes_of("gradient sums", 4, unique, layout.width(rank)));
  }
  const auto held = static_cast<std::int64_t>(local_ranks.size()) * spec.shard_width();
  grads = Buffer(bytes_of("staged gradient rows", element, spec.tokens(), held));
  subtree_sums = Buffer(bytes_of("row statistics", 4, unique, layout.total_subtrees()));
  statistics = Buffer(bytes_of("row statistics", 4, unique));
  sort_scratch = Buffer(bytes_of("sort scratch", 8, cpu::unique_ids_scratch(spec.tokens())));
}

std::int64_t Arena::bytes() const {
  std::int64_t total = grads.bytes() + subtree_sums.bytes() + statistics.bytes() + sort_scratch.bytes();
  for (const Buffer& buffer : rows) total += buffer.bytes();
  for (const Buffer& buffer : sums) total += buffer.bytes();
  return total;
}

}  // namespace async_emb::context
