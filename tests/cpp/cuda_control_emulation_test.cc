// The small jobs between the large ones: what the device decides, reads and hands over.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <vector>

#include "cuda/launches.h"
#include "emulated_launches.h"

namespace async_emb::testing {
namespace {

using cuda::Refusal;
using cuda::RefusalKind;

struct LookupCheck {
  std::vector<std::int32_t> ids = std::vector<std::int32_t>(200, 3);
  std::vector<std::int32_t> armed = ids;
  float pin = 5;
  std::int64_t call = 8;
  Refusal refusal;
  std::int64_t scratch = 77;  // whatever the last check left

  void run(bool compares = true) {
    cuda::CheckLookup job;
    job.pin = &pin;
    job.expected = 5;
    job.ids = compares ? ids.data() : nullptr;
    job.count = static_cast<std::int64_t>(ids.size());
    job.rows = 10;
    job.has_padding = true;
    job.padding_id = 9;
    job.armed = armed.data();
    job.call = call;
    job.refusal = &refusal;
    job.first_differing = &scratch;
    emulated_launches().check_lookup(job, nullptr);
  }
};

TEST(CudaControlEmulation, AcceptsTheArmedBatch) {
  LookupCheck check;
  check.ids[7] = 9;  // padding and bad ids have no row, and were armed as such
  check.ids[8] = 1000;
  check.armed[7] = check.armed[8] = -1;
  check.run();
  EXPECT_EQ(check.refusal.refused_call, cuda::kNeverRefused);
  EXPECT_EQ(check.refusal.kind, RefusalKind::kNone);
}

TEST(CudaControlEmulation, RefusesAnotherBatchAtItsFirstDifference) {
  LookupCheck check;
  for (const std::size_t at : {199, 130, 64, 131}) check.ids[at] = 4;
  check.armed[64] = 2;
  check.run();
  EXPECT_EQ(check.refusal.refused_call, 8);
  EXPECT_EQ(check.refusal.kind, RefusalKind::kOtherBatch);
  EXPECT_EQ(check.refusal.position, 64);
  EXPECT_EQ(check.refusal.given, 4);
  EXPECT_EQ(check.refusal.armed, 2);
}

TEST(CudaControlEmulation, RefusesAStalePinBeforeAnotherBatch) {
  for (const float pin : {4.0f, std::numeric_limits<float>::quiet_NaN()}) {
    LookupCheck check;
    check.ids[3] = 4;
    check.pin = pin;
    check.run();
    EXPECT_EQ(check.refusal.refused_call, 8);
    EXPECT_EQ(check.refusal.kind, RefusalKind::kStalePin);
    EXPECT_EQ(check.refusal.pin == 4.0f, pin == 4.0f);
  }
}

TEST(CudaControlEmulation, ComparesNoIdsUnlessAsked) {
  LookupCheck check;
  check.ids[3] = 4;
  check.run(false);
  EXPECT_EQ(check.refusal.kind, RefusalKind::kNone);
  check.pin = 4;
  check.run(false);
  EXPECT_EQ(check.refusal.kind, RefusalKind::kStalePin);
}

TEST(CudaControlEmulation, KeepsAnEarlierRefusal) {
  LookupCheck check;
  check.pin = 4;
  check.refusal.refused_call = 3;
  check.refusal.kind = RefusalKind::kOtherBatch;
  check.run();
  EXPECT_EQ(check.refusal.refused_call, 3);
  EXPECT_EQ(check.refusal.kind, RefusalKind::kOtherBatch);
  check.refusal.refused_call = 9;  // the host was ahead
  check.run();
  EXPECT_EQ(check.refusal.refused_call, 8);
  EXPECT_EQ(check.refusal.kind, RefusalKind::kStalePin);
}

TEST(CudaControlEmulation, SkipsARoundThatAnyRankRefused) {
  std::vector<Refusal> refusals(3);
  cuda::OpenRound job;
  for (std::size_t rank = 0; rank < 3; ++rank) job.refusals.of_rank[rank] = &refusals[rank];
  job.refusals.num_ranks = 3;
  job.call = 10;
  std::int32_t skip = -1;
  job.skip = &skip;
  const auto skips = [&] {
    emulated_launches().open_round(job, nullptr);
    return skip;
  };
  EXPECT_EQ(skips(), 0);
  refusals[2].refused_call = 11;
  EXPECT_EQ(skips(), 0);
  refusals[2].refused_call = 10;
  EXPECT_EQ(skips(), 1);
  refusals[2].refused_call = cuda::kNeverRefused;
  EXPECT_EQ(skips(), 0);
  std::int32_t also = 1;
  job.also = &also;
  EXPECT_EQ(skips(), 1);
  also = 0;
  EXPECT_EQ(skips(), 0);
  job.also = &skip;  // a round that looks again into its own flag
  skip = 1;
  EXPECT_EQ(skips(), 1);
}

TEST(CudaControlEmulation, ReadsPendingAsBoolOrInteger) {
  const std::uint8_t flags[] = {0, 1, 0xff};
  const std::int32_t integers[] = {0, 256, -1};
  for (std::size_t i = 0; i < 3; ++i) {
    std::int32_t pending = 7;
    emulated_launches().take_pending({&flags[i], true, &pending}, nullptr);
    EXPECT_EQ(pending, i == 0 ? 0 : 1);
    pending = 7;
    emulated_launches().take_pending({&integers[i], false, &pending}, nullptr);
    EXPECT_EQ(pending, i == 0 ? 0 : 1);
  }
}

TEST(CudaControlEmulation, TakesTheNumbersThereAre) {
  cuda::RuleNumbers numbers;
  numbers.decay = 0.5f;  // of an earlier step
  numbers.seed = 3;
  cuda::TakeNumbers job;
  job.numbers = &numbers;
  emulated_launches().take_numbers(job, nullptr);
  EXPECT_EQ(numbers.decay, 1.0f);
  EXPECT_EQ(numbers.seed, 0u);
  const float values[] = {1, 2, 3, 4, 5};
  const std::int32_t step = -6;
  const std::uint32_t seeds[] = {0xfffffff0u, 8};
  job = {&values[0], &values[1], &values[2], &values[3], &values[4], &step, &seeds[0], &seeds[1], &numbers};
  emulated_launches().take_numbers(job, nullptr);
  EXPECT_EQ(numbers.learning_rate, 1.0f);
  EXPECT_EQ(numbers.eps, 2.0f);
  EXPECT_EQ(numbers.decay, 3.0f);
  EXPECT_EQ(numbers.weight_decay, 4.0f);
  EXPECT_EQ(numbers.max_grad_norm, 5.0f);
  EXPECT_EQ(numbers.step, -6);
  EXPECT_EQ(numbers.seed, 0xfffffff0u);
  EXPECT_EQ(numbers.rounding_step, 8u);
}

TEST(CudaControlEmulation, DeliversAnOutcomeOrZeros) {
  const cuda::Outcome outcome{2.5f, 1, 1, 0.5f};
  for (const std::int32_t skip : {0, 1}) {
    for (const bool was_staged : {false, true}) {
      float norm = -1;
      std::int32_t valid = -1, pending = -1;
      emulated_launches().deliver_outcome({was_staged ? &outcome : nullptr, &skip, &norm, &valid, &pending}, nullptr);
      const bool delivers = skip == 0 && was_staged;
      EXPECT_EQ(norm, delivers ? 2.5f : 0.0f);
      EXPECT_EQ(valid, delivers ? 1 : 0);
      EXPECT_EQ(pending, delivers ? 1 : 0);
    }
  }
}

TEST(CudaControlEmulation, WritesPinsAndPositions) {
  float pin = 0;
  emulated_launches().write_pin(7, &pin, nullptr);
  EXPECT_EQ(pin, 7.0f);
  std::vector<std::int32_t> positions(1001, -1);
  emulated_launches().write_positions(positions.data(), 1000, nullptr);
  for (std::int32_t i = 0; i < 1000; ++i) ASSERT_EQ(positions[static_cast<std::size_t>(i)], i);
  EXPECT_EQ(positions[1000], -1);
}

// ---- words between processes

// Process 0 has ranks 0 and 2, process 1 has ranks 1 and 3.
struct Words {
  Refusal refusals[4];
  cuda::IdFinding found[2];
  cuda::RuleNumbers numbers;
  cuda::PeerWord word;

  Refusal heard[4];  // in process 1
  Refusal own;
  cuda::RuleNumbers theirs;
  cuda::RuleDifference difference;
  cuda::IdFinding finding;
  std::int32_t skip = 0;

  void speak(bool of_update = false) {
    cuda::SpeakToPeers job;
    job.refusals.num_ranks = 4;
    job.refusals.of_rank[0] = &refusals[0];
    job.refusals.of_rank[2] = &refusals[2];
    job.call = 10;
    job.findings[0] = &found[0];
    job.findings[1] = &found[1];
    job.num_findings = 2;
    job.step = 5;
    job.numbers = of_update ? &numbers : nullptr;
    job.word = &word;
    emulated_launches().speak_to_peers(job, nullptr);
  }
  void hear(bool of_update = false) {
    cuda::HearPeers job;
    job.own = &own;
    job.words[0] = &word;
    job.num_processes = 2;
    job.refusals[0] = &heard[0];
    job.refusals[2] = &heard[2];
    job.finding = &finding;
    job.numbers = of_update ? &theirs : nullptr;
    job.difference = &difference;
    job.step = 5;
    job.skip = &skip;
    emulated_launches().hear_peers(job, nullptr);
  }
};

TEST(CudaControlEmulation, TellsPeersNothingWhereThereIsNothing) {
  Words words;
  words.refusals[2].refused_call = 11;  // of a later call than the round's
  words.found[0] = {4, 1, 99, 0};       // of an earlier step
  words.speak(true);
  words.hear(true);
  EXPECT_EQ(words.skip, 0);
  EXPECT_EQ(words.finding.step, 0);
  EXPECT_EQ(words.difference.step, 0);
  for (const Refusal& refusal : words.heard) EXPECT_EQ(refusal.refused_call, cuda::kNeverRefused);
}

TEST(CudaControlEmulation, TellsPeersTheFirstRefusalAndWhoseItIs) {
  Words words;
  words.refusals[0] = {9, RefusalKind::kStalePin, 3, -1, 0, 0};
  words.refusals[2] = {8, RefusalKind::kOtherBatch, 0, 6, 21, 22};
  words.speak();
  words.hear();
  EXPECT_EQ(words.skip, 1);
  EXPECT_EQ(words.heard[0].refused_call, cuda::kNeverRefused);
  EXPECT_EQ(words.heard[2].refused_call, 8);
  EXPECT_EQ(words.heard[2].kind, RefusalKind::kOtherBatch);
  EXPECT_EQ(words.heard[2].position, 6);
  EXPECT_EQ(words.heard[2].given, 21);
  EXPECT_EQ(words.heard[2].armed, 22);
}

TEST(CudaControlEmulation, TellsPeersTheFirstBadIdOfTheStep) {
  Words words;
  words.found[0] = {5, 13, 70, 0};
  words.found[1] = {5, 4, 60, 0};
  words.speak();
  words.hear();
  EXPECT_EQ(words.skip, 0);
  EXPECT_EQ(words.finding.position, 4);
  EXPECT_EQ(words.finding.id, 60);
  words.finding = {5, 2, 50, 0};
  words.hear();
  EXPECT_EQ(words.finding.id, 50);
}

TEST(CudaControlEmulation, TellsPeersAnyNumberOfARuleThatDiffers) {
  for (std::size_t number = 0; number < sizeof(cuda::RuleNumbers) / 4; ++number) {
    Words words;
    reinterpret_cast<std::uint32_t*>(&words.numbers)[number] ^= 1u;
    words.speak(true);
    words.hear(true);
    EXPECT_EQ(words.skip, 1) << number;
    EXPECT_EQ(words.difference.step, 5) << number;
    EXPECT_EQ(words.difference.process, 0) << number;
    EXPECT_EQ(words.difference.number, static_cast<std::int32_t>(number));
    EXPECT_EQ(words.difference.mine ^ words.difference.theirs, 1u) << number;
  }
}

TEST(CudaControlEmulation, KeepsNothingOfWhatABrokenExchangeHasLeft) {
  Words words;
  words.speak();
  std::memset(static_cast<void*>(&words.word), 0x11, sizeof(words.word));
  words.own.refused_call = cuda::kRefusedByHost;
  words.hear(true);
  EXPECT_EQ(words.skip, 1);
  EXPECT_EQ(words.finding.step, 0);
  EXPECT_EQ(words.difference.step, 0);
}

}  // namespace
}  // namespace async_emb::testing
