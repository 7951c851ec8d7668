// The bodies on several lanes, as a GPU runs them: here a lane is a thread. The bits are those of one lane.
#include "core/lanes.h"

#include <gtest/gtest.h>

#include <barrier>
#include <random>
#include <thread>
#include <vector>

#include "core/adagrad.h"
#include "core/copy_rows.h"
#include "core/sums.h"

namespace async_emb::core {
namespace {

template <int kLanes>
struct Team {
  std::barrier<> barrier{kLanes};
  float floats[kLanes];
  std::uint32_t integers[kLanes];
};

template <int kLanes>
struct ThreadLanes {
  static constexpr int kCount = kLanes;
  Team<kLanes>* team;
  int lane;

  int index() const { return lane; }
  float exchange(float value, int mask) const {
    team->floats[lane] = value;
    synchronize();
    const float got = team->floats[lane ^ mask];
    synchronize();
    return got;
  }
  std::uint32_t sum(std::uint32_t value) const {
    team->integers[lane] = value;
    synchronize();
    std::uint32_t total = 0;
    for (const std::uint32_t each : team->integers) total += each;
    synchronize();
    return total;
  }
  void synchronize() const { team->barrier.arrive_and_wait(); }
};

template <int kLanes, class Body>
void on_lanes(Body body) {
  Team<kLanes> team;
  std::vector<std::thread> threads;
  for (int lane = 0; lane < kLanes; ++lane) {
    threads.emplace_back([&, lane] { body(ThreadLanes<kLanes>{&team, lane}); });
  }
  for (auto& thread : threads) thread.join();
}

std::vector<float> random_values(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> draw(-2.0f, 2.0f);
  std::vector<float> values(count);
  for (auto& value : values) value = draw(random);
  return values;
}

template <int kLanes>
void expect_same_sums(std::int64_t width) {
  const std::vector<float> grads = random_values(static_cast<std::size_t>(70 * width), 1);
  std::vector<std::int32_t> positions;
  for (int i = 0; i < 70; ++i) positions.push_back((i * 13) % 70);
  const std::int64_t begin = 5;  // of logical columns: the subtrees are of many sizes
  std::int8_t levels[kMaxSubtrees];
  const int count = subtree_levels(begin, begin + width, levels);

  std::vector<float> sums(grads.size()), squares(kMaxSubtrees);
  sum_segment(OneLane(), grads.data(), width, width, positions.data(), 70, sums.data());
  sum_squares(OneLane(), sums.data(), levels, count, squares.data());
  const float total = dyadic_sum(OneLane(), grads.data(), 70 * width);

  std::vector<float> lane_sums(grads.size()), lane_squares(kMaxSubtrees);
  float lane_total = 0;
  on_lanes<kLanes>([&](auto lanes) {
    sum_segment(lanes, grads.data(), width, width, positions.data(), 70, lane_sums.data());
    lanes.synchronize();
    sum_squares(lanes, lane_sums.data(), levels, count, lane_squares.data());
    const float root = dyadic_sum(lanes, grads.data(), 70 * width);
    if (lanes.index() == 0) lane_total = root;
  });
  EXPECT_EQ(sums, lane_sums);
  EXPECT_EQ(squares, lane_squares);
  EXPECT_EQ(total, lane_total);
}

TEST(Lanes, GiveTheSameSums) {
  for (const std::int64_t width : {1, 3, 7, 16, 33, 100, 129}) {
    expect_same_sums<2>(width);
    expect_same_sums<4>(width);
  }
}

template <int kLanes, class Weight>
void expect_same_update(std::int64_t width) {
  const std::vector<float> grads = random_values(static_cast<std::size_t>(width), 2);
  std::vector<Weight> weights(grads.size());
  for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = Weight{static_cast<std::uint16_t>(0x3f00u + i)};
  const RowUpdate update{true, 1.0f, 0.75f, 0.3f};
  for (const std::int64_t column_begin : {0, 3}) {
    std::vector<Weight> one_nearest = weights, one_stochastic = weights, nearest = weights, stochastic = weights;
    update_columns_nearest<OneLane, kPack>(OneLane(), update, 0.5f, grads.data(), 0, width, one_nearest.data());
    update_columns_stochastic(OneLane(), update, 0.5f, grads.data(), column_begin, width, 9, 8, 7,
                              one_stochastic.data());
    on_lanes<kLanes>([&](auto lanes) {
      using Lanes = decltype(lanes);
      update_columns_nearest<Lanes, kPack>(lanes, update, 0.5f, grads.data(), 0, width, nearest.data());
      update_columns_stochastic(lanes, update, 0.5f, grads.data(), column_begin, width, 9, 8, 7, stochastic.data());
    });
    for (std::size_t i = 0; i < weights.size(); ++i) {
      EXPECT_EQ(one_nearest[i].bits, nearest[i].bits) << i;
      EXPECT_EQ(one_stochastic[i].bits, stochastic[i].bits) << i;
    }
  }
}

TEST(Lanes, GiveTheSameWeights) {
  for (const std::int64_t width : {1, 2, 5, 16, 33, 129}) {
    expect_same_update<4, BFloat16>(width);
    expect_same_update<2, Float16>(width);
  }
}

TEST(Lanes, CountSaturatedStoresOnce) {
  const std::vector<float> grads(37, -1e9f);
  for (const bool nearest : {true, false}) {
    std::vector<Float16> weights(37, Float16{0});
    std::uint32_t saturated = 0;
    on_lanes<4>([&](auto lanes) {
      using Lanes = decltype(lanes);
      const RowUpdate update{true, 1.0f, 1.0f, 1.0f};
      const std::uint32_t mine =
          nearest ? update_columns_nearest<Lanes, kPack>(lanes, update, 1.0f, grads.data(), 0, 37, weights.data())
                  : update_columns_stochastic(lanes, update, 1.0f, grads.data(), 1, 37, 0, 0, 0, weights.data());
      const std::uint32_t total = lanes.sum(mine);
      if (lanes.index() == 0) saturated = total;
    });
    EXPECT_EQ(saturated, 37u);
  }
}

TEST(Lanes, CopyRowsOfAnySizeAndAlignment) {
  std::vector<unsigned char> from(600);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<unsigned char>(i * 7 + 1);
  for (const std::int64_t bytes : {0, 1, 2, 15, 16, 34, 256, 258}) {
    for (const int shift : {0, 1, 2}) {
      std::vector<unsigned char> to(600, 0);
      on_lanes<4>(
          [&](auto lanes) { copy_row<decltype(lanes), 0>(lanes, from.data() + shift, bytes, to.data() + shift); });
      for (std::int64_t i = 0; i < 600; ++i) {
        const bool copied = i >= shift && i < shift + bytes;
        ASSERT_EQ(to[static_cast<std::size_t>(i)], copied ? from[static_cast<std::size_t>(i)] : 0);
      }
      on_lanes<4>([&](auto lanes) { zero_row<decltype(lanes), 0>(lanes, bytes, to.data() + shift); });
      EXPECT_EQ(to, std::vector<unsigned char>(600, 0));
    }
  }
}

}  // namespace
}  // namespace async_emb::core
