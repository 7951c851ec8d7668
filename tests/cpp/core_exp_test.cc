// exp32 against the C library in double precision.
#include "core/exp.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace async_emb::core {
namespace {

TEST(Exp32, IsWithinOneUlp) {
  double worst = 0;
  for (float x = -87.0f; x < 88.7f; x += 0.00173f) {
    const double exact = std::exp(static_cast<double>(x));
    const float nearest = static_cast<float>(exact);
    const double ulp = std::nextafter(nearest, std::numeric_limits<float>::infinity()) - static_cast<double>(nearest);
    worst = std::max(worst, std::fabs(exp32(x) - exact) / ulp);
  }
  EXPECT_LT(worst, 1.0);
}

TEST(Exp32, ReachesTheDenormalsAndTheEnds) {
  EXPECT_EQ(exp32(0.0f), 1.0f);
  EXPECT_EQ(exp32(-0.0f), 1.0f);
  EXPECT_EQ(bits_of(exp32(-103.9f)), 1u) << "the smallest denormal";
  EXPECT_NEAR(exp32(-95.0f) / std::exp(-95.0), 1.0, 1e-3);
  EXPECT_EQ(exp32(-104.0f), 0.0f);
  EXPECT_EQ(exp32(-std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_TRUE(std::isfinite(exp32(88.72283f)));
  EXPECT_EQ(exp32(88.73f), std::numeric_limits<float>::infinity());
  EXPECT_EQ(bits_of(exp32(-std::numeric_limits<float>::quiet_NaN())), 0x7fc00000u);
}

}  // namespace
}  // namespace async_emb::core
