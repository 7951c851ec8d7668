// Lookups through the bodies that a GPU runs: every byte as the CPU's kernels copy it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "cpu/kernels.h"
#include "cuda/launch_lookup.h"
#include "cuda_problem.h"
#include "emulated_launches.h"

namespace async_emb::testing {
namespace {

constexpr std::int64_t kRows = 40;

std::vector<unsigned char> random_bytes(std::int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<unsigned char> bytes(static_cast<std::size_t>(count));
  for (auto& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

std::vector<std::int32_t> random_ids(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::int32_t> ids(count);
  for (auto& id : ids) id = random() % 5 == 0 ? -1 : static_cast<std::int32_t>(random() % kRows);
  return ids;
}

// Shards of these row sizes, their rows `gap` bytes apart, at addresses `shift` bytes behind an aligned one.
void expect_same_rows(const std::vector<std::int64_t>& row_bytes, std::int64_t gap, std::int64_t shift,
                      std::size_t count) {
  cuda::GatherRows job;
  cpu::GatherRows expected;
  std::vector<Buffer> tables;
  std::vector<cpu::ColumnShard> shards;
  std::int64_t out_bytes = 0;
  for (std::size_t s = 0; s < row_bytes.size(); ++s) {
    const std::int64_t stride = row_bytes[s] + gap;
    tables.push_back(buffer_of(random_bytes(kRows * stride, static_cast<unsigned>(s + 1)), shift));
    shards.push_back({tables.back().at(), stride, row_bytes[s]});
    job.shards[s] = {tables.back().at(), stride, row_bytes[s]};
    out_bytes += row_bytes[s];
  }
  const std::vector<std::int32_t> ids = random_ids(count, static_cast<unsigned>(out_bytes));
  const std::int64_t out_stride = out_bytes + gap;
  const auto bytes = static_cast<std::int64_t>(count) * out_stride;
  Buffer out(bytes, shift), expected_out(bytes);
  job.ids = expected.ids = ids.data();
  job.count = expected.count = static_cast<std::int64_t>(count);
  job.num_shards = expected.num_shards = static_cast<int>(row_bytes.size());
  job.out = out.at();
  job.out_row_stride_bytes = expected.out_row_stride_bytes = out_stride;
  expected.shards = shards.data();
  expected.out = expected_out.at();
  emulated_launches().gather_rows(job, nullptr);
  cpu::all_kernels()[0]->gather_rows(expected);
  // What lies between rows is untouched on both sides.
  EXPECT_EQ(0, std::memcmp(out.at(), expected_out.at(), static_cast<std::size_t>(bytes)))
      << row_bytes.size() << " shards of " << row_bytes[0] << " bytes, gap " << gap << ", shift " << shift;
}

TEST(CudaLookupEmulation, CopiesRowsOfAnySizeAtAnyAddress) {
  for (const std::int64_t bytes : {1, 2, 3, 4, 6, 8, 12, 16, 20, 32, 34, 48, 64, 100, 128, 130, 256, 512, 1030}) {
    for (const std::int64_t gap : {0, 2, 16}) {
      for (const std::int64_t shift : {0, 1, 2, 4, 8}) expect_same_rows({bytes}, gap, shift, 77);
    }
  }
}

TEST(CudaLookupEmulation, PutsShardsSideBySide) {
  for (const std::int64_t bytes : {2, 16, 30, 64}) {
    for (const std::size_t shards : {2, 3, 4, 7, 64}) {
      expect_same_rows(std::vector<std::int64_t>(shards, bytes), 0, 0, 50);
    }
  }
  expect_same_rows({64, 32, 6}, 0, 0, 50);
  expect_same_rows({16, 0, 16, 4}, 16, 0, 50);
}

TEST(CudaLookupEmulation, CopiesNothingWhereThereIsNothing) {
  expect_same_rows({64}, 0, 0, 0);
  expect_same_rows({0}, 16, 0, 9);
}

// Remembers what was asked for.
struct Recorder {
  static inline std::vector<cuda::GatherRows> jobs;
  template <class Body>
  static void run(const Body& body, std::int64_t, cuda::Stream) {
    jobs.push_back(body.job);
  }
};

TEST(CudaLookupEmulation, CutsJobsThatAreTooLongToCount) {
  Recorder::jobs.clear();
  cuda::GatherRows job;
  const std::vector<std::int32_t> no_ids;
  job.ids = no_ids.data();
  job.count = std::int64_t{1} << 30;
  job.num_shards = 1;
  job.shards[0] = {nullptr, 256, 256};
  job.out_row_stride_bytes = 256;
  cuda::gather_rows<Recorder>(job, nullptr);
  ASSERT_GT(Recorder::jobs.size(), 1u);
  std::int64_t rows = 0;
  for (const cuda::GatherRows& part : Recorder::jobs) {
    EXPECT_EQ(part.ids, job.ids + rows);
    EXPECT_EQ(reinterpret_cast<std::intptr_t>(part.out), rows * 256);
    EXPECT_LE(part.count * 16, cuda::kMostItems);
    rows += part.count;
  }
  EXPECT_EQ(rows, job.count);
}

TEST(CudaLookupEmulation, DividesLikeADivision) {
  std::mt19937 random(9);
  for (std::int64_t divisor = 1; divisor < 3000; ++divisor) {
    const cuda::FastDivide divide = cuda::fast_divide(divisor);
    for (const std::uint32_t near : {1u, 2u, 1000u, 0x7fffffffu / static_cast<std::uint32_t>(divisor)}) {
      const std::uint32_t multiple = near * static_cast<std::uint32_t>(divisor);
      for (const std::uint32_t number :
           {multiple - 1, multiple, multiple + 1, static_cast<std::uint32_t>(random()) >> 1, 0u, 0x7fffffffu}) {
        if (number > 0x7fffffffu) continue;
        ASSERT_EQ(cuda::quotient(divide, number), number / divisor) << number << " / " << divisor;
      }
    }
  }
  for (const std::int64_t divisor : {0x7fffffffll, 0x7ffffffell, 0x40000000ll, 0x40000001ll}) {
    for (const std::uint32_t number : {0u, 1u, 0x3fffffffu, 0x40000000u, 0x40000001u, 0x7ffffffeu, 0x7fffffffu}) {
      EXPECT_EQ(cuda::quotient(cuda::fast_divide(divisor), number), number / divisor) << number << " / " << divisor;
    }
  }
}

TEST(CudaLookupEmulation, DeliversRowsOrNaNs) {
  for (const core::DType dtype : {core::DType::kFloat32, core::DType::kBFloat16, core::DType::kFloat16}) {
    for (const std::int64_t count : {0, 1, 2, 7, 8, 64, 999}) {
      for (const std::int64_t shift : {0, 2, 4}) {
        const std::int64_t element = core::size_of(dtype);
        if (shift % element != 0) continue;
        for (const std::int32_t skip : {0, 1}) {
          const std::vector<unsigned char> rows = random_bytes(count * element, 3);
          Buffer from = buffer_of(rows, shift), to(count * element + 16, shift);
          cuda::DeliverRows job;
          job.rows = from.at();
          job.out = to.at();
          job.count = count;
          job.dtype = dtype;
          job.skip = &skip;
          emulated_launches().deliver_rows(job, nullptr);
          const std::uint32_t nan = dtype == core::DType::kFloat32    ? 0x7fc00000u
                                    : dtype == core::DType::kBFloat16 ? 0x7fc0u
                                                                      : 0x7e00u;
          for (std::int64_t i = 0; i < count; ++i) {
            const unsigned char* const expected =
                skip != 0 ? reinterpret_cast<const unsigned char*>(&nan) : rows.data() + i * element;
            ASSERT_EQ(0, std::memcmp(to.at() + i * element, expected, static_cast<std::size_t>(element)))
                << core::name_of(dtype) << " " << count << " skip " << skip << " element " << i;
          }
          EXPECT_EQ(to.at()[count * element], 0xff) << "past the end";
        }
      }
    }
  }
}

}  // namespace
}  // namespace async_emb::testing
