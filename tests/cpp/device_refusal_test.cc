// Refusals and failures on emulated GPUs: what only the device can know stops all ranks at the same call, what the host
// knows is refused at once, and every wait ends.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "device_ranks.h"
#include "plain_model.h"

namespace async_emb::context {
namespace {

struct Two {
  ContextSpec spec = small_spec(2);
  DeviceGroup group{spec, kRows, {0, 0}, false};
  PlainModel model{spec, kRows, 1};
  std::vector<Batch> batches;

  Two() {
    model.write_shards(group.shards);
    for (int i = 0; i < 3; ++i) {
      Batch batch;
      for (int token = 0; token < 8; ++token) batch.ids.push_back((token * 5 + i) % static_cast<int>(kRows));
      batch.grads = cpu::encode(spec.dtype, std::vector<float>(8 * 4, 0.25f));
      batches.push_back(batch);
    }
  }

  template <typename Body>
  void on_ranks(Body body) {
    const auto failures = run_ranks(2, [&](int rank) { body(rank, *group.ranks[static_cast<std::size_t>(rank)]); });
    for (const auto& failure : failures) EXPECT_FALSE(failure) << failure->message;
  }
  std::vector<std::int32_t> ids(int batch, int rank) {
    return slice(batches[static_cast<std::size_t>(batch)].ids, spec, rank);
  }
  std::vector<unsigned char> grads(int batch, int rank) {
    return slice(batches[static_cast<std::size_t>(batch)].grads, spec, rank);
  }
  // A whole step of the exact schedule, as the model does it.
  void run(int batch) {
    const std::vector<Call> program = {
        {Op::kLookupStart, batch}, {Op::kLookupDone}, {Op::kStage, batch}, {Op::kUpdateStart}, {Op::kUpdateDone}};
    const std::vector<Expected> expected = expect(model, program, batches, plain_rule());
    on_ranks([&](int rank, DeviceRankCalls& calls) {
      float pin = 0;
      run_program(calls, spec, rank, program, batches, expected, plain_rule(), pin);
    });
    model.expect_shards(group.shards);
  }
};

bool is_nan(Tensor& rows) { return std::isnan(*rows.as<float>()); }

TEST(DeviceRefusal, VoidsEverythingFromAStalePinOn) {
  Two two;
  two.run(0);
  const float stale = 1;
  std::vector<Tensor*> rows(2);
  std::vector<Tensor*> outcomes(2);
  two.on_ranks([&](int rank, DeviceRankCalls& calls) {
    calls.lookup_start(two.ids(1, rank));
    rows[static_cast<std::size_t>(rank)] = &calls.lookup_done_later(nullptr, &stale);
    calls.stage(two.grads(1, rank).data());
    calls.update_start(plain_rule());  // the host does not know yet
    outcomes[static_cast<std::size_t>(rank)] = &calls.update_done_later();
    calls.settle();
  });
  for (int rank : {0, 1}) {
    EXPECT_TRUE(is_nan(*rows[static_cast<std::size_t>(rank)]));
    EXPECT_EQ(DeviceRankCalls::outcome_of(*outcomes[static_cast<std::size_t>(rank)]), UpdateOutcome());
  }
  two.model.expect_shards(two.group.shards);
  const auto refusal = two.group.pipeline->take_refusal();
  ASSERT_TRUE(refusal);
  EXPECT_NE(refusal->find("lookup_done on rank 0 (device 10): lookup_done got a stale pin of step 1, but step 2 is "
                          "armed"),
            std::string::npos)
      << *refusal;
  EXPECT_NE(refusal->find("first-step state"), std::string::npos) << *refusal;
  EXPECT_FALSE(two.group.pipeline->take_refusal());
  two.model.machine.reset(2, 2, 2);
  two.run(1);
}

TEST(DeviceRefusal, OfOneRankStopsTheOthersAtTheSamePlace) {
  Two two;
  two.run(0);
  std::vector<Tensor*> outcomes(2);
  two.on_ranks([&](int rank, DeviceRankCalls& calls) {
    calls.lookup_start(two.ids(1, rank));
    const std::vector<std::int32_t> other = two.ids(rank == 1 ? 2 : 1, rank);  // only rank 1 gets another batch
    calls.lookup_done_later(&other);
    calls.stage(two.grads(1, rank).data());
    calls.update_start(plain_rule());
    outcomes[static_cast<std::size_t>(rank)] = &calls.update_done_later();
    calls.settle();
  });
  for (int rank : {0, 1}) {
    EXPECT_EQ(DeviceRankCalls::outcome_of(*outcomes[static_cast<std::size_t>(rank)]), UpdateOutcome()) << rank;
  }
  two.model.expect_shards(two.group.shards);
  const auto refusal = two.group.pipeline->take_refusal();
  ASSERT_TRUE(refusal);
  EXPECT_NE(refusal->find("rank 1 (device 11): lookup_done was given token_ids of another batch: step 2 was armed with "
                          "row 21 at position 4, but token_ids have 22 there"),
            std::string::npos)
      << *refusal;
  two.model.machine.reset(2, 2, 2);
  two.run(2);
}

TEST(DeviceRefusal, ByTheHostIsToldAtOnceAndLosesNothing) {
  Two two;
  two.run(0);
  two.on_ranks([&](int rank, DeviceRankCalls& calls) {
    calls.lookup_start(two.ids(1, rank));
    calls.lookup_start(two.ids(2, rank));  // before the pending done
    Tensor& rows = calls.lookup_done_later();
    calls.settle();
    EXPECT_TRUE(is_nan(rows));
  });
  const auto refusal = two.group.pipeline->take_refusal();
  ASSERT_TRUE(refusal);
  EXPECT_NE(refusal->find("lookup_start of step 3 came before lookup_done of step 2"), std::string::npos) << *refusal;
  two.on_ranks([&](int rank, DeviceRankCalls& calls) {
    Tensor& rows = calls.lookup_done_later();  // the lookup that was armed is still there
    calls.settle();
    const std::vector<unsigned char> want = slice(two.model.lookup(two.batches[1].ids), two.spec, rank);
    EXPECT_EQ(0, std::memcmp(rows.as<char>(), want.data(), want.size()));
  });
}

TEST(DeviceFailure, NamesWhoIsMissingWhenTheTimeIsOver) {
  Two two;
  std::string message;
  std::thread waiting([&] {
    try {
      two.group.ranks[0]->lookup_start(two.ids(0, 0));
      two.group.ranks[0]->lookup_done_later();
    } catch (const Error& error) {
      message = error.what();
    }
  });
  for (int i = 0; i < 200; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    two.group.pipeline->check_timeout(Clock::now() + std::chrono::hours(1));
  }
  waiting.join();
  EXPECT_EQ(message,
            "async_emb 'users' timed out after 1800 s in lookup_start of step 1: missing rank 1 (device 11). Set "
            "ASYNC_EMB_TIMEOUT_SECONDS to wait longer");
  EXPECT_THROW(two.group.ranks[1]->lookup_start(two.ids(0, 1)), Error);
}

TEST(DeviceFailure, EndsEveryWaitAndSticks) {
  Two two;
  std::string message;
  std::thread waiting([&] {
    try {
      two.group.ranks[0]->lookup_start(two.ids(0, 0));
      two.group.ranks[0]->lookup_done_later();
    } catch (const Error& error) {
      message = error.what();
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  two.group.pipeline->fail({FailureKind::kAborted, "why"});
  waiting.join();
  EXPECT_EQ(message, "why");
  two.group.pipeline->fail({FailureKind::kAborted, "another reason"});
  try {
    two.group.ranks[1]->lookup_start(two.ids(0, 1));
    FAIL() << "a failed pipeline took a call";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "why");
  }
  two.group.pipeline->drain();
}

TEST(DeviceFailure, RefusesAnUpdateOfAnotherTable) {
  Two two;
  two.on_ranks([&](int rank, DeviceRankCalls& calls) {
    calls.lookup_start(two.ids(0, rank));
    calls.lookup_done_later();
    calls.stage(two.grads(0, rank).data());
    calls.settle();
  });
  std::swap(two.group.shards[0]->table, two.group.shards[1]->table);
  try {
    two.group.ranks[0]->update_start(plain_rule());
    FAIL() << "XLA's copy was taken";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("different table buffers"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace async_emb::context
