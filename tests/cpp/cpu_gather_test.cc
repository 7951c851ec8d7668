// Lookup copies rows bit for bit, from any number of shards.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "cpu_naive.h"

namespace async_emb::cpu {
namespace {

std::vector<unsigned char> random_bytes(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<unsigned char> bytes(count);
  for (auto& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

void expect_gathers(const Kernels& kernels, const std::vector<std::int64_t>& widths, std::int64_t gap,
                    std::int64_t count) {
  constexpr std::int64_t kRows = 40;
  std::vector<std::vector<unsigned char>> tables;
  std::vector<ColumnShard> shards;
  std::int64_t row_bytes = 0;
  for (const std::int64_t width : widths) {
    tables.push_back(random_bytes(static_cast<std::size_t>(kRows * (width + gap)), static_cast<unsigned>(width)));
    row_bytes += width;
  }
  for (std::size_t s = 0; s < widths.size(); ++s) shards.push_back({tables[s].data(), widths[s] + gap, widths[s]});
  std::mt19937 random(5);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(count));
  for (auto& id : ids) id = static_cast<std::int32_t>(random() % (kRows + 5)) - 5;

  const std::int64_t stride = row_bytes + gap;
  std::vector<unsigned char> out(static_cast<std::size_t>(count * stride), 0xab);
  std::vector<unsigned char> expected = out;
  kernels.gather_rows({ids.data(), count, shards.data(), static_cast<int>(shards.size()), out.data(), stride});
  for (std::int64_t i = 0; i < count; ++i) {
    unsigned char* at = expected.data() + i * stride;
    for (std::size_t s = 0; s < widths.size(); ++s) {
      for (std::int64_t b = 0; b < widths[s]; ++b) {
        *at++ = ids[static_cast<std::size_t>(i)] < 0
                    ? 0
                    : tables[s][static_cast<std::size_t>(ids[static_cast<std::size_t>(i)] * (widths[s] + gap) + b)];
      }
    }
  }
  EXPECT_TRUE(out == expected) << kernels.name << " first shard " << widths[0] << " shards " << widths.size();
}

TEST(GatherRows, CopiesEveryByteOfEveryShard) {
  for (const Kernels* kernels : all_kernels()) {
    for (const std::int64_t gap : {0, 6}) {
      for (const std::int64_t count : {0, 1, 15, 100}) {
        for (const std::int64_t bytes : {2, 4, 10, 16, 32, 64, 66, 128, 256, 400, 512, 1030}) {
          expect_gathers(*kernels, {bytes}, gap, count);
          expect_gathers(*kernels, {bytes, bytes, bytes}, gap, count);
        }
        expect_gathers(*kernels, {16, 6, 0, 130}, gap, count);
        expect_gathers(*kernels, {0}, gap, count);
      }
    }
  }
}

TEST(GatherRows, KeepsNaNPayloads) {
  const std::uint32_t table[4] = {0x7f812345u, 0xffc54321u, 0x00000001u, 0x80000000u};
  const std::int32_t ids[2] = {1, 0};
  std::uint32_t out[4] = {};
  const ColumnShard shard{table, 8, 8};
  for (const Kernels* kernels : all_kernels()) {
    kernels->gather_rows({ids, 2, &shard, 1, out, 8});
    EXPECT_EQ(out[0], table[2]);
    EXPECT_EQ(out[1], table[3]);
    EXPECT_EQ(out[2], table[0]);
    EXPECT_EQ(out[3], table[1]);
  }
}

}  // namespace
}  // namespace async_emb::cpu
