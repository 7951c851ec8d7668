// Many threads at random times: done calls around the work, aborts around everything, many ranks on one worker.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "plain_model.h"
#include "ranks.h"

namespace async_emb::context {
namespace {

TEST(PipelineStress, GivesRowsWhetherTheDoneComesBeforeTheLeaseDuringTheWorkOrAfterIt) {
  ContextSpec spec = small_spec(2, 2048, 32);
  spec.id_policy = core::IdPolicy::kDrop;
  Setting setting(spec, 1, 2, nullptr, 1);
  std::mt19937 random(5);
  for (int repetition = 0; repetition < 60; ++repetition) {
    const Batch& batch = setting.batches[0];
    const std::vector<unsigned char> expected = setting.model.lookup(batch.ids);
    const auto pause = std::chrono::microseconds(random() % 1500);
    run_ranks(2, [&](int r) {
      RankCalls& rank = setting.rank(r);
      const int order = repetition % 5;
      std::optional<PendingRows> rows;
      std::vector<char> got;
      if (order < 3) {
        const float pin = rank.lookup_begin(slice(batch.ids, spec, r));
        if (order == 0) rows = rank.lookup_done_later(pin);
        rank.lookup_lease();
        if (order == 1) std::this_thread::sleep_for(pause);
        if (order == 2) rank.settle();
        if (!rows) rows = rank.lookup_done_later(pin);
        got = rows->wait();
      } else {
        rank.lend(order == 3 || r == 0 ? Lending::kAfterTheDone : Lending::kAtAnyTime);
        const float pin = rank.lookup_start(slice(batch.ids, spec, r));
        if (r == 1) std::this_thread::sleep_for(pause);
        got = rank.lookup_done(pin);
      }
      const std::vector<unsigned char> mine = slice(expected, spec, r);
      EXPECT_EQ(0, std::memcmp(got.data(), mine.data(), mine.size()));
      rank.settle();
    });
    if (HasFailure()) return;
  }
}

// Every buffer is freed by its own completion: whoever still uses it then is found by the sanitizers.
TEST(PipelineStress, FreesNoBufferUnderWorkThatIsAbortedAtAnyTime) {
  Executor executor(2);
  std::mt19937 random(41);
  ContextSpec spec = small_spec(2, 512, 32);
  spec.id_policy = core::IdPolicy::kDrop;
  for (int repetition = 0; repetition < 60; ++repetition) {
    const auto pipeline = std::make_shared<Pipeline>(spec, spec.devices, executor, map_processes(spec));
    const auto pause = std::chrono::microseconds(random() % 3000);
    std::thread killer([&] {
      std::this_thread::sleep_for(pause);
      pipeline->fail({FailureKind::kAborted, "why"});
    });
    run_ranks(2, [&](int rank) {
      const auto shard = std::make_shared<Shard>(spec, kRows);
      std::memset(shard->table.as<char>(), 0, shard->table.bytes());
      const DLTensor table = shard->table.view();
      const DLTensor state = shard->row_state.view();
      // After a failure the table is gone, else it is lent on.
      const auto lease = [shard](Answer& answer) -> Completion {
        return [shard, answered = answer.completion()](const Failure* failure) {
          if (failure != nullptr) shard->table.release(), shard->row_state.release();
          answered(failure);
        };
      };
      std::vector<std::int32_t> ids(512);
      for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i % kRows);
      for (;;) {  // until the abort
        Tensor tensor(kInt32, {512}, ids.data());
        const float pin = pipeline->lookup_begin(rank, tensor.view(), kRows);
        const auto rows = std::make_shared<Tensor>(kFloat32, std::vector<std::int64_t>{512, 64});
        Answer looked_up, lent, updated, lent_again;
        pipeline->lookup_lease(rank, table, lease(lent));
        pipeline->lookup_done(rank, pin, nullptr, rows->view(),
                              [rows, answered = looked_up.completion()](const Failure* failure) {
                                rows->release();
                                answered(failure);
                              });
        looked_up.wait_or_throw();
        lent.wait_or_throw();
        Tensor grads(kFloat32, {512, 64});
        std::memset(grads.as<char>(), 0, grads.bytes());
        pipeline->stage_update(rank, grads.view(), nullptr, nullptr, true);
        pipeline->update_begin(rank, plain_rule());
        pipeline->update_lease(rank, table, state, nullptr, lease(lent_again));
        const auto outcome = std::make_shared<UpdateOutcome>();
        pipeline->update_done(rank, {&outcome->norm, &outcome->valid, &outcome->pending},
                              [answered = updated.completion()](const Failure* failure) { answered(failure); });
        updated.wait_or_throw();
        lent_again.wait_or_throw();
      }
    });
    killer.join();
    pipeline->drain();
  }
}

TEST(PipelineStress, EndsEveryProgramThatIsAbortedAtAnyTime) {
  Executor executor(2);
  std::mt19937 random(43);
  for (int repetition = 0; repetition < 300; ++repetition) {
    Setting setting(small_spec(3), static_cast<unsigned>(repetition), 2, &executor);
    for (RankCalls& rank : setting.group.ranks) rank.stagger();
    const std::vector<Call> program = staleness_one(4);
    const auto expected = expect(setting.model, program, setting.batches, plain_rule());
    const auto pause = std::chrono::microseconds(random() % 2000);
    std::thread killer([&] {
      std::this_thread::sleep_for(pause);
      setting.group.pipeline->fail({FailureKind::kAborted, "why"});
    });
    const auto failures = run_ranks(3, [&](int r) {
      try {
        run_program(setting.rank(r), setting.spec, r, program, setting.batches, expected, plain_rule(),
                    setting.pins[static_cast<std::size_t>(r)]);
      } catch (...) {
        setting.rank(r).take_back();
        throw;
      }
    });
    killer.join();
    for (const auto& failure : failures) {
      EXPECT_EQ(failure.value_or(Failure{FailureKind::kAborted, "why"}).message, "why");
    }
    setting.group.pipeline->drain();
  }
}

TEST(PipelineStress, SharesOneWorkerBetweenTablesWithManyRanks) {
  Executor executor(1);
  ContextSpec users = small_spec(8);
  users.id_policy = core::IdPolicy::kDrop;
  ContextSpec items = users;
  items.name = "items";
  Setting first(users, 1, 1, &executor), second(items, 2, 1, &executor);
  for (Setting* setting : {&first, &second}) {
    for (RankCalls& rank : setting->group.ranks) rank.stagger();
  }
  std::thread other([&] { second.run(staleness_one(12)); });
  first.run(staleness_one(12));
  other.join();
}

}  // namespace
}  // namespace async_emb::context
