// How fp32 values become bf16 and fp16, against slow rules that share no code with core.
#include "core/dtype.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace async_emb::core {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float value_of_float16(std::uint32_t bits) {
  const int exponent = static_cast<int>(bits >> 10) & 31;
  const int mantissa = static_cast<int>(bits & 1023u);
  const float sign = (bits & 0x8000u) != 0 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa == 0 ? sign * kInfinity : std::numeric_limits<float>::quiet_NaN();
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
}

// Nearest even by search: consecutive magnitudes are consecutive bit patterns, so even means an even pattern.
std::uint32_t search_nearest_float16(float value) {
  const double magnitude = std::fabs(static_cast<double>(value));
  std::uint32_t below = 0;
  for (std::uint32_t step = 1u << 14; step != 0; step >>= 1) {
    if (below + step < 0x7c00u && value_of_float16(below + step) <= magnitude) below += step;
  }
  const double low = value_of_float16(below);
  const double high = below == 0x7bffu ? 65536.0 : value_of_float16(below + 1);
  const bool up = magnitude - low > high - magnitude || (magnitude - low == high - magnitude && below % 2 == 1);
  const std::uint32_t rounded = below + (up ? 1u : 0u);
  return std::min(rounded, 0x7bffu) | (std::signbit(value) ? 0x8000u : 0u);
}

std::vector<float> interesting_floats() {
  std::mt19937 random(7);
  std::vector<float> values = {0.0f, -0.0f, 1e-45f, -1e-45f, 65504.0f, 65519.9f, 65520.0f, -65520.0f, 1e38f};
  for (int i = 0; i < 200000; ++i) values.push_back(float_of(static_cast<std::uint32_t>(random())));
  for (std::uint32_t h = 0; h < 0x7c00u;
       ++h) {  // every fp16, every tie between two of them, and the floats beside the tie
    const float tie = h == 0x7bffu ? 65520.0f : 0.5f * (value_of_float16(h) + value_of_float16(h + 1));
    for (const float v : {value_of_float16(h), tie, std::nextafter(tie, 0.0f), std::nextafter(tie, kInfinity)}) {
      values.push_back(v);
      values.push_back(-v);
    }
  }
  return values;
}

TEST(Float16, EveryNumberWidensExactly) {
  for (std::uint32_t h = 0; h < 0x10000u; ++h) {
    const float expected = value_of_float16(h);
    const float got = float_of_float16<1>(h);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(got)) << h;
    } else {
      EXPECT_EQ(bits_of(got), bits_of(expected)) << h;
    }
  }
}

TEST(Float16, RoundsToNearestEvenAndSaturates) {
  for (const float value : interesting_floats()) {
    if (std::isnan(value)) continue;
    std::uint32_t saturated = 0;
    ASSERT_EQ(nearest_float16<1>(value, saturated), search_nearest_float16(value)) << value;
    ASSERT_EQ(saturated, std::fabs(value) >= 65520.0f ? 1u : 0u) << value;
  }
}

TEST(Float16, InfinitySaturatesAndIsCounted) {
  std::uint32_t saturated = 0;
  EXPECT_EQ(nearest_float16<1>(kInfinity, saturated), 0x7bffu);
  EXPECT_EQ(nearest_float16<1>(-kInfinity, saturated), 0xfbffu);
  EXPECT_EQ(stochastic_float16<1>(kInfinity, 0u, saturated), 0x7bffu);
  EXPECT_EQ(saturated, 3u);
}

TEST(BFloat16, RoundsToNearestEven) {
  for (const float value : interesting_floats()) {
    if (!std::isfinite(value)) continue;
    const std::uint32_t bits = bits_of(value);
    const double low = float_of(bits & 0xffff0000u);
    const double step = std::fabs(static_cast<double>(float_of((bits & 0xff800000u) | 0x00010000u)) -
                                  static_cast<double>(float_of(bits & 0xff800000u)));
    const double past = std::fabs(value - low);
    const bool up = past > step / 2 || (past == step / 2 && (bits >> 16) % 2 == 1);
    ASSERT_EQ(nearest_bfloat16<1>(value), (bits >> 16) + (up ? 1u : 0u)) << value;
  }
  EXPECT_EQ(nearest_bfloat16<1>(3.4e38f), 0x7f80u) << "bf16 overflow follows IEEE";
  EXPECT_EQ(nearest_bfloat16<1>(-kInfinity), 0xff80u);
}

TEST(NaN, IsStoredAsTheCanonicalOne) {
  for (const std::uint32_t bits : {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xff812345u, 0x7fffffffu}) {
    std::uint32_t saturated = 0;
    const float nan = float_of(bits);
    EXPECT_EQ(bits_of(canonical(nan)), 0x7fc00000u);
    EXPECT_EQ(nearest_bfloat16<1>(nan), 0x7fc0u);
    EXPECT_EQ(stochastic_bfloat16<1>(nan, 0xffffffffu), 0x7fc0u);
    EXPECT_EQ(nearest_float16<1>(nan, saturated), 0x7e00u);
    EXPECT_EQ(stochastic_float16<1>(nan, 0xffffffffu, saturated), 0x7e00u);
    EXPECT_EQ(saturated, 0u) << "a NaN is no overflow";
  }
}

// The rule as the documentation words it.
std::uint32_t worded_stochastic_float16(float value, std::uint32_t r, std::uint32_t& saturated) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t field = (bits >> 23) & 255u;
  const std::uint64_t e = field == 0 ? 1 : field;
  const std::uint64_t m = (bits & 0x7fffffu) + (field == 0 ? 0 : 0x800000u);
  const std::uint64_t s = e >= 113 ? 13 : 13 + 113 - e;
  const std::uint64_t q =
      s > 31 ? ((m >> std::min<std::uint64_t>(s - 31, 63)) + (r >> 1)) >> 31 : (m + (r >> (32 - s))) >> s;
  std::uint64_t magnitude = q + (e >= 113 ? (e - 113) << 10 : 0);
  if (magnitude >= 0x7c00) {
    magnitude = 0x7bff;
    ++saturated;
  }
  return static_cast<std::uint32_t>(magnitude) | ((bits >> 16) & 0x8000u);
}

TEST(StochasticRounding, FollowsItsRule) {
  std::mt19937 random(11);
  for (const float value : interesting_floats()) {
    if (std::isnan(value)) continue;
    for (const std::uint32_t r : {0u, 0xffffffffu, static_cast<std::uint32_t>(random())}) {
      std::uint32_t saturated = 0;
      std::uint32_t expected_saturated = 0;
      const std::uint32_t expected = worded_stochastic_float16(value, r, expected_saturated);
      ASSERT_EQ(stochastic_float16<1>(value, r, saturated), expected) << value << " " << r;
      ASSERT_EQ(saturated, expected_saturated);
      if (std::isfinite(value)) {
        ASSERT_EQ(stochastic_bfloat16<1>(value, r), (bits_of(value) + (r >> 16)) >> 16) << value << " " << r;
      }
    }
  }
}

TEST(StochasticRounding, KeepsWhatTheFormatHolds) {
  for (std::uint32_t h = 0; h < 0x7c00u; ++h) {
    std::uint32_t saturated = 0;
    ASSERT_EQ(stochastic_float16<1>(value_of_float16(h), 0xffffffffu, saturated), h);
    ASSERT_EQ(stochastic_bfloat16<1>(float_of(h << 16), 0xffffffffu), h);
  }
}

TEST(StochasticRounding, IsUnbiased) {
  std::mt19937 random(13);
  const float value = 1.0f + 0.3f / 128.0f;  // three tenths of the way to the next bf16
  int up = 0;
  for (int i = 0; i < 100000; ++i) up += stochastic_bfloat16<1>(value, static_cast<std::uint32_t>(random())) == 0x3f81u;
  EXPECT_NEAR(up / 100000.0, 0.3, 0.01);
}

TEST(Packs, GiveTheBitsOfSingleValues) {
  std::mt19937 random(17);
  const std::vector<float> values = interesting_floats();
  for (std::size_t i = 0; i + 4 <= values.size(); i += 4) {
    const FloatPack<4> pack = load<4>(values.data() + i);
    BitsPack<4> draws{};
    for (int k = 0; k < 4; ++k) draws[k] = static_cast<std::uint32_t>(random());
    BitsPack<4> saturated{};
    std::uint32_t saturated_singly = 0;
    const BitsPack<4> results[] = {nearest_bfloat16<4>(pack), stochastic_bfloat16<4>(pack, draws),
                                   nearest_float16<4>(pack, saturated), stochastic_float16<4>(pack, draws, saturated)};
    for (int k = 0; k < 4; ++k) {
      ASSERT_EQ(results[0][k], nearest_bfloat16<1>(values[i + k]));
      ASSERT_EQ(results[1][k], stochastic_bfloat16<1>(values[i + k], draws[k]));
      ASSERT_EQ(results[2][k], nearest_float16<1>(values[i + k], saturated_singly));
      ASSERT_EQ(results[3][k], stochastic_float16<1>(values[i + k], draws[k], saturated_singly));
    }
    ASSERT_EQ(total_of<4>(saturated), saturated_singly);
  }
}

}  // namespace
}  // namespace async_emb::core
