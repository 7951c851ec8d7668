// How the columns of a table lie on the ranks of a group, and sizes that are computed without overflow.
//
// Rank r holds the physical columns [r * shard_width, (r + 1) * shard_width) of every row. Columns from logical_width
// on are padding: they are never trained and count in no sum.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/dyadic.h"
#include "core/platform.h"

namespace async_emb::core {
inline namespace ASYNC_EMB_ISA {

// Product of `factors`, none negative. Throws std::overflow_error with the name and the factors where it exceeds int64.
inline std::int64_t checked_product(const char* quantity, std::initializer_list<std::int64_t> factors) {
  std::int64_t product = 1;
  for (const std::int64_t factor : factors) {
    if (factor >= 0 && !__builtin_mul_overflow(product, factor, &product)) continue;
    std::string message = std::string("async_emb: ") + quantity + " = ";
    const char* separator = "";
    for (const std::int64_t f : factors) message += std::exchange(separator, " * ") + std::to_string(f);
    throw std::overflow_error(message + (factor < 0 ? " has a negative factor" : " does not fit in 64 bits"));
  }
  return product;
}

// Sum of `terms`, none negative; overflow as in checked_product.
inline std::int64_t checked_sum(const char* quantity, std::initializer_list<std::int64_t> terms) {
  std::int64_t sum = 0;
  for (const std::int64_t term : terms) {
    if (term >= 0 && !__builtin_add_overflow(sum, term, &sum)) continue;
    std::string message = std::string("async_emb: ") + quantity + " = ";
    const char* separator = "";
    for (const std::int64_t t : terms) message += std::exchange(separator, " + ") + std::to_string(t);
    throw std::overflow_error(message + (term < 0 ? " has a negative term" : " does not fit in 64 bits"));
  }
  return sum;
}

// `value`, which must fit in a non-negative int32: ids, positions and offsets are int32 in every kernel.
inline std::int32_t checked_int32(const char* quantity, std::int64_t value) {
  if (value >= 0 && value <= 0x7fffffff) return static_cast<std::int32_t>(value);
  throw std::overflow_error(std::string("async_emb: ") + quantity + " = " + std::to_string(value) +
                            " is outside [0, 2147483647], the range of 32-bit ids and positions");
}

class ColumnLayout {
 public:
  // Throws std::invalid_argument where the numbers do not describe a layout.
  ColumnLayout(int group_size, std::int64_t emb_width, std::int64_t logical_width)
      : group_size_(group_size), emb_width_(emb_width), logical_width_(logical_width) {
    const std::string got = " (group_size=" + std::to_string(group_size) + ", emb_width=" + std::to_string(emb_width) +
                            ", logical_width=" + std::to_string(logical_width) + ")";
    if (group_size < 1) throw std::invalid_argument("async_emb: group_size must be at least 1" + got);
    if (emb_width < 1) throw std::invalid_argument("async_emb: emb_width must be at least 1" + got);
    if (logical_width < 1 || logical_width > emb_width) {
      throw std::invalid_argument("async_emb: logical_width must lie in [1, emb_width]" + got);
    }
    if (emb_width % group_size != 0) {
      throw std::invalid_argument("async_emb: emb_width must be a multiple of group_size" + got);
    }
  }

  int group_size() const { return group_size_; }
  std::int64_t emb_width() const { return emb_width_; }
  std::int64_t logical_width() const { return logical_width_; }

  // Physical columns of every rank's shard.
  std::int64_t shard_width() const { return emb_width_ / group_size_; }

  // First logical column of a rank; logical_width() for a rank that holds only padding.
  std::int64_t column_begin(int rank) const {
    const std::int64_t begin = rank * shard_width();
    return begin < logical_width_ ? begin : logical_width_;
  }
  std::int64_t column_end(int rank) const { return column_begin(rank + 1); }

  // Logical columns of a rank: 0 for a rank that holds only padding.
  std::int64_t width(int rank) const { return column_end(rank) - column_begin(rank); }

  // Subtrees of the row statistic that a rank sums, and the first of them among those of all ranks in rank order.
  std::int64_t subtree_count(int rank) const { return count_subtrees(column_begin(rank), column_end(rank)); }
  std::int64_t subtree_begin(int rank) const {
    std::int64_t begin = 0;
    for (int r = 0; r < rank; ++r) begin += subtree_count(r);
    return begin;
  }
  std::int64_t total_subtrees() const { return subtree_begin(group_size_); }

  // Levels of the subtrees of one rank, and of all ranks in rank order, which is column order.
  std::vector<std::int8_t> levels(int rank) const {
    std::vector<std::int8_t> levels(static_cast<std::size_t>(subtree_count(rank)));
    core::subtree_levels(column_begin(rank), column_end(rank), levels.data());
    return levels;
  }
  std::vector<std::int8_t> levels() const {
    std::vector<std::int8_t> all;
    for (int rank = 0; rank < group_size_; ++rank) {
      const std::vector<std::int8_t> mine = levels(rank);
      all.insert(all.end(), mine.begin(), mine.end());
    }
    return all;
  }

 private:
  int group_size_;
  std::int64_t emb_width_;
  std::int64_t logical_width_;
};

// Places arrays one after the other in one allocation, each at a multiple of 64 bytes (a cache line, and DLPack's
// alignment).
class ArenaPlan {
 public:
  static constexpr std::int64_t kAlignment = 64;

  // Reserves count * element_bytes bytes for `quantity` and returns their offset. Throws std::overflow_error.
  std::int64_t reserve(const char* quantity, std::initializer_list<std::int64_t> counts, std::int64_t element_bytes) {
    const std::int64_t count = checked_product(quantity, counts);
    const std::int64_t bytes = checked_product(quantity, {count, element_bytes});
    const std::int64_t offset = bytes_;
    bytes_ = checked_sum(quantity, {offset, bytes, kAlignment - 1}) / kAlignment * kAlignment;
    return offset;
  }

  std::int64_t bytes() const { return bytes_; }

 private:
  std::int64_t bytes_ = 0;
};

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::core
