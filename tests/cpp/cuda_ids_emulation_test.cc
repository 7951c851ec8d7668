// Ids through the bodies that a GPU runs: cleaned, counted, reported, compared and indexed as on the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "context/clean_ids.h"
#include "core/ids.h"
#include "cuda_problem.h"
#include "emulated_launches.h"

namespace async_emb::testing {
namespace {

using core::IdPolicy;

constexpr IdPolicy kPolicies[] = {IdPolicy::kError, IdPolicy::kDrop, IdPolicy::kClamp};

// Ids of a table of 50 rows: some outside of it on either side, some equal to 7 or 99, the padding ids of the tests.
template <class Id>
std::vector<Id> random_ids(std::size_t count, unsigned seed, bool with_bad = true) {
  std::mt19937 random(seed);
  std::vector<Id> ids(count);
  for (auto& id : ids) {
    const std::uint32_t draw = random() % 20;
    id = draw == 0   ? Id{7}
         : draw == 1 ? Id{99}
         : draw == 2 ? Id{-1}
         : draw == 3 ? std::numeric_limits<Id>::max()
         : draw == 4 ? std::numeric_limits<Id>::min()
                     : static_cast<Id>(random() % 50);
    if (!with_bad && (id < 0 || id >= 50)) id = 3;
  }
  return ids;
}

template <class Id>
void expect_cleaned_alike(std::size_t count, IdPolicy policy, bool has_padding, std::int64_t padding_id,
                          std::int64_t rows) {
  const std::vector<Id> ids = random_ids<Id>(count, static_cast<unsigned>(count) + 5);
  std::vector<std::int32_t> expected(count), got(count, -7);
  const core::IdReport report = core::clean_ids(ids.data(), static_cast<std::int64_t>(count), rows, policy, has_padding,
                                                padding_id, expected.data());
  cuda::Counters counters;
  cuda::IdFinding finding;
  cuda::CleanIds job;
  job.ids = ids.data();
  job.wide = sizeof(Id) == 8;
  job.count = static_cast<std::int64_t>(count);
  job.rows = rows;
  job.policy = policy;
  job.has_padding = has_padding;
  job.padding_id = padding_id;
  job.out = got.data();
  job.counters = &counters;
  job.finding = &finding;
  job.report_bad = policy == IdPolicy::kError;
  job.step = 4;
  job.first_position = 1000;
  emulated_launches().clean_ids(job, nullptr);
  EXPECT_EQ(got, expected);
  EXPECT_EQ(counters.bad_ids, static_cast<std::uint64_t>(report.bad));
  EXPECT_EQ(counters.padding_ids, static_cast<std::uint64_t>(report.padding));
  const bool reports = report.bad > 0 && policy == IdPolicy::kError;
  EXPECT_EQ(finding.step, reports ? 4 : 0);
  EXPECT_EQ(finding.position, reports ? 1000 + report.first_bad_position : -1);
  EXPECT_EQ(finding.id, reports ? report.first_bad_id : 0);
  EXPECT_EQ(finding.distinct, 0);
}

TEST(CudaIdsEmulation, CleansLikeTheCpu) {
  for (const std::size_t count : {0, 1, 31, 33, 500}) {
    for (const IdPolicy policy : kPolicies) {
      for (const std::int64_t rows : {0, 1, 50}) {
        for (const std::int64_t padding_id : {7, 99, -1}) {
          for (const bool has_padding : {false, true}) {
            expect_cleaned_alike<std::int32_t>(count, policy, has_padding, padding_id, rows);
            expect_cleaned_alike<std::int64_t>(count, policy, has_padding, padding_id, rows);
          }
        }
      }
    }
  }
}

// ---- findings

struct Cleaning {
  cuda::Counters counters;
  cuda::IdFinding finding;

  void clean(const std::vector<std::int32_t>& ids, std::int64_t step, std::int64_t first_position = 0) {
    std::vector<std::int32_t> out(ids.size());
    cuda::CleanIds job;
    job.ids = ids.data();
    job.count = static_cast<std::int64_t>(ids.size());
    job.rows = 10;
    job.out = out.data();
    job.counters = &counters;
    job.finding = &finding;
    job.report_bad = true;
    job.step = step;
    job.first_position = first_position;
    emulated_launches().clean_ids(job, nullptr);
  }

  void expect_finding(std::int64_t step, std::int64_t position, std::int64_t id) const {
    EXPECT_EQ(finding.step, step);
    EXPECT_EQ(finding.position, position);
    EXPECT_EQ(finding.id, id);
  }
};

TEST(CudaIdsEmulation, KeepsTheFirstFindingOfTheEarliestStep) {
  Cleaning cleaning;
  cleaning.clean({1, 2, 3}, 1);
  cleaning.expect_finding(0, -1, 0);
  cleaning.clean({1, 2, 77, 3, 78}, 2);
  cleaning.expect_finding(2, 2, 77);
  cleaning.clean({79, 80}, 3);
  cleaning.expect_finding(2, 2, 77);
  EXPECT_EQ(cleaning.counters.bad_ids, 4u);
}

TEST(CudaIdsEmulation, PrefersTheSmallerPositionWithinAStep) {
  Cleaning cleaning;
  cleaning.clean({1, 77}, 2, 10);
  cleaning.expect_finding(2, 11, 77);
  cleaning.clean({1, 2, 3}, 2, 0);  // another rank's, with nothing to find
  cleaning.expect_finding(2, 11, 77);
  cleaning.clean({1, 2, 78}, 2, 4);
  cleaning.expect_finding(2, 6, 78);
  cleaning.clean({79}, 2, 20);
  cleaning.expect_finding(2, 6, 78);
}

TEST(CudaIdsEmulation, KeepsTheIdWhenAnotherJobHasTheSameTokens) {
  Cleaning cleaning;
  cleaning.clean({1, 77, 2}, 2);
  cleaning.clean({1, 2, 78}, 2);  // bad further on; position 1 is good here
  cleaning.expect_finding(2, 1, 77);
}

// ---- ids_of_segments

DLTensor tensor_of(std::vector<std::int32_t>& values, std::int64_t& count) {
  count = static_cast<std::int64_t>(values.size());
  return {values.data(), {kDLCPU, 0}, 1, {kDLInt, 32, 1}, &count, nullptr, 0};
}

TEST(CudaIdsEmulation, FollowsSegmentsLikeTheCpu) {
  std::mt19937 random(11);
  for (const bool has_padding : {false, true}) {
    for (const std::size_t count : {0, 1, 40, 333}) {
      std::vector<std::int32_t> unique = {0, 3, 7, 20, 49, 50, -1, 50}, segments(count);
      for (auto& segment : segments) segment = static_cast<std::int32_t>(random() % 12) - 2;
      context::ContextSpec spec;
      spec.has_padding_id = has_padding;
      spec.padding_id = 7;
      std::int64_t shapes[2];
      std::vector<std::int32_t> expected(count), got(count, -7);
      const core::IdReport report = context::ids_of_segments(tensor_of(segments, shapes[0]),
                                                             tensor_of(unique, shapes[1]), spec, 50, expected.data());
      cuda::Counters counters;
      cuda::IdFinding finding;
      cuda::IdsOfSegments job;
      job.segment_ids = segments.data();
      job.count = static_cast<std::int64_t>(count);
      job.unique_tokens = unique.data();
      job.num_unique = static_cast<std::int64_t>(unique.size());
      job.rows = 50;
      job.has_padding = has_padding;
      job.padding_id = 7;
      job.out = got.data();
      job.counters = &counters;
      job.finding = &finding;
      job.report_bad = true;
      job.step = 3;
      job.first_position = 20;
      emulated_launches().ids_of_segments(job, nullptr);
      EXPECT_EQ(got, expected);
      EXPECT_EQ(counters.bad_ids, static_cast<std::uint64_t>(report.bad));
      EXPECT_EQ(counters.padding_ids, 0u);
      EXPECT_EQ(finding.step, report.bad > 0 ? 3 : 0);
      EXPECT_EQ(finding.position, report.bad > 0 ? 20 + report.first_bad_position : -1);
      EXPECT_EQ(finding.id, report.first_bad_id);
    }
  }
}

// ---- unique_ids

TEST(CudaIdsEmulation, IndexesLikeTheCpu) {
  std::mt19937 random(12);
  for (const std::int64_t rows :
       {std::int64_t{1}, std::int64_t{2}, std::int64_t{255}, std::int64_t{256}, std::int64_t{0x7fffffff}}) {
    for (const std::size_t count : {0, 1, 2, 31, 600}) {
      std::vector<std::int32_t> ids(count);
      for (auto& id : ids) {
        id = random() % 7 == 0 ? -1 - static_cast<std::int32_t>(random() % 3)
                               : static_cast<std::int32_t>(static_cast<std::int64_t>(random() % 300) % rows);
        if (random() % 9 == 0) id = static_cast<std::int32_t>(rows - 1);
      }
      std::vector<std::int32_t> unique(count), offsets(count + 1), positions(count);
      std::vector<std::uint64_t> scratch(
          static_cast<std::size_t>(cpu::unique_ids_scratch(static_cast<std::int64_t>(count))));
      const auto distinct = static_cast<std::size_t>(
          cpu::all_kernels()[0]->unique_ids({ids.data(), static_cast<std::int64_t>(count), unique.data(),
                                             offsets.data(), positions.data(), scratch.data()}));
      std::vector<std::int32_t> got_unique(count), got_offsets(count + 1), got_positions(count);
      cuda::BatchCounts counts;
      Buffer workspace(emulated_launches().unique_ids_workspace(static_cast<std::int64_t>(count)));
      cuda::UniqueIds job;
      job.ids = ids.data();
      job.count = static_cast<std::int64_t>(count);
      job.rows = rows;
      job.limit = static_cast<std::int64_t>(count);
      job.unique = got_unique.data();
      job.offsets = got_offsets.data();
      job.positions = got_positions.data();
      job.counts = &counts;
      job.workspace = workspace.at();
      job.workspace_bytes = emulated_launches().unique_ids_workspace(job.count);
      emulated_launches().unique_ids(job, nullptr);
      ASSERT_EQ(counts.distinct, static_cast<std::int32_t>(distinct)) << rows << " rows, " << count << " tokens";
      const auto same = [](const auto& a, const auto& b, std::size_t n) {
        return std::equal(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(n), b.begin());
      };
      const auto trained = static_cast<std::size_t>(offsets[distinct]);
      EXPECT_EQ(counts.kept, counts.distinct);
      EXPECT_EQ(counts.trained, offsets[distinct]);
      EXPECT_TRUE(same(got_unique, unique, distinct));
      EXPECT_TRUE(same(got_offsets, offsets, distinct + 1));
      EXPECT_TRUE(same(got_positions, positions, trained));
    }
  }
}

TEST(CudaIdsEmulation, RefusesAWorkspaceThatIsTooSmall) {
  const std::int32_t id = 0;
  cuda::UniqueIds unique;
  unique.ids = &id;
  unique.count = 1;
  EXPECT_THROW(emulated_launches().unique_ids(unique, nullptr), std::runtime_error);
  cuda::SegmentSum sums;
  sums.width = sums.max_segments = sums.max_tokens = 1;
  EXPECT_THROW(emulated_launches().segment_sum(sums, nullptr), std::runtime_error);
  cuda::Decide decide;
  decide.max_segments = 5000;
  EXPECT_THROW(emulated_launches().decide(decide, nullptr), std::runtime_error);
}

}  // namespace
}  // namespace async_emb::testing
