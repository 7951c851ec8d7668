// Philox against the known answers that its authors publish with Random123 (kat_vectors, philox4x32 with 10 rounds).
#include "core/philox.h"

#include <gtest/gtest.h>

namespace async_emb::core {
namespace {

void expect_answer(Philox4 counter, std::uint32_t key0, std::uint32_t key1, Philox4 expected) {
  const Philox4 got = philox4x32(counter, key0, key1);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(got.x[i], expected.x[i]) << i;
}

TEST(Philox, GivesThePublishedAnswers) {
  constexpr std::uint32_t kOnes = 0xffffffffu;
  expect_answer({{0, 0, 0, 0}}, 0, 0, {{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}});
  expect_answer({{kOnes, kOnes, kOnes, kOnes}}, kOnes, kOnes, {{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}});
  expect_answer({{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}}, 0xa4093822u, 0x299f31d0u,
                {{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}});
}

TEST(RoundingBits, AreTheSameHoweverColumnsAreGrouped) {
  std::uint32_t together[64];
  rounding_bits<16>(3, 4, 5, 6, together);
  for (std::uint32_t g = 0; g < 16; ++g) {
    const Philox4 alone = philox4x32({{5, 6 + g, 4, 0}}, 3, 0x61656d62u);
    for (int k = 0; k < 4; ++k) EXPECT_EQ(together[4 * g + k], alone.x[k]);
  }
}

}  // namespace
}  // namespace async_emb::core
