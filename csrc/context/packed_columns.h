// The columns of some ranks, cut out of whole rows and laid side by side: what one process sends to another.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace async_emb::context {

class PackedColumns {
 public:
  struct Run {
    std::int64_t begin;  // byte within a whole row
    std::int64_t bytes;
  };

  // `runs` ascending. Neighbours become one.
  PackedColumns(const std::vector<Run>& runs, std::int64_t row_bytes) : row_bytes_(row_bytes) {
    for (const Run& run : runs) {
      packed_bytes_ += run.bytes;
      if (!runs_.empty() && runs_.back().begin + runs_.back().bytes == run.begin) {
        runs_.back().bytes += run.bytes;
      } else if (run.bytes > 0) {
        runs_.push_back(run);
      }
    }
  }

  // Each of `ranks`, ascending, holds `shard_bytes` of a row of `row_bytes`.
  static PackedColumns of_ranks(const std::vector<int>& ranks, std::int64_t shard_bytes, std::int64_t row_bytes) {
    std::vector<Run> runs;
    for (const int rank : ranks) runs.push_back({rank * shard_bytes, shard_bytes});
    return {runs, row_bytes};
  }

  // Of one row, packed.
  std::int64_t bytes() const { return packed_bytes_; }
  std::int64_t row_bytes() const { return row_bytes_; }
  // Ascending, with gaps between them.
  const std::vector<Run>& runs() const { return runs_; }

  void pack(const void* rows, std::int64_t count, void* packed) const {
    const char* from = static_cast<const char*>(rows);
    char* to = static_cast<char*>(packed);
    for (std::int64_t i = 0; i < count; ++i, from += row_bytes_) {
      for (const Run& run : runs_) {
        std::memcpy(to, from + run.begin, static_cast<std::size_t>(run.bytes));
        to += run.bytes;
      }
    }
  }

  void unpack(const void* packed, std::int64_t count, void* rows) const {
    const char* from = static_cast<const char*>(packed);
    char* to = static_cast<char*>(rows);
    for (std::int64_t i = 0; i < count; ++i, to += row_bytes_) {
      for (const Run& run : runs_) {
        std::memcpy(to + run.begin, from, static_cast<std::size_t>(run.bytes));
        from += run.bytes;
      }
    }
  }

 private:
  std::int64_t row_bytes_;
  std::int64_t packed_bytes_ = 0;
  std::vector<Run> runs_;
};

}  // namespace async_emb::context
