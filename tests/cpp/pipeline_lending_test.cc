// Who lends a table to the work: the lease, or a done that comes before it.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "plain_model.h"
#include "ranks.h"

namespace async_emb::context {
namespace {

const std::vector<std::int32_t> kIds{0, 1, 2, 3};

ContextSpec dropping_spec(int group_size) {
  ContextSpec spec = small_spec(group_size);
  spec.id_policy = core::IdPolicy::kDrop;
  return spec;
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(PipelineLending, AgreesWithThePlainTableHoweverTheRanksLend) {
  for (const Lending first : {Lending::kAtOnce, Lending::kAfterTheDone, Lending::kAtAnyTime}) {
    for (const Lending others : {Lending::kAtOnce, Lending::kAfterTheDone, Lending::kAtAnyTime}) {
      Setting setting(dropping_spec(3));
      for (RankCalls& rank : setting.group.ranks) rank.lend(others);
      setting.rank(0).lend(first);
      setting.run(staleness_one(10));
    }
  }
}

TEST(PipelineLending, EndsALeaseAtOnceThatComesAfterItsStep) {
  Setting setting(dropping_spec(2));
  Pipeline& pipeline = *setting.group.pipeline;
  std::vector<PendingRows> rows;
  for (int r : {0, 1}) {
    setting.rank(r).lend(Lending::kAfterTheDone);
    rows.push_back(setting.rank(r).lookup_done_later(setting.rank(r).lookup_start(kIds)));
  }
  for (PendingRows& pending : rows) pending.wait();
  for (int r : {0, 1}) {
    Answer lease;
    Shard& shard = *setting.group.shards[static_cast<std::size_t>(r)];
    ask(lease, [&](Completion completion) { pipeline.lookup_lease(r, shard.table.view(), std::move(completion)); });
    EXPECT_TRUE(lease.ready());
    EXPECT_FALSE(lease.wait());
  }
}

// No thread has to wake up for it, so it is there when the call returns.
TEST(PipelineLending, LooksUpAtOnceWhereOneRankHasLittleToDo) {
  for (const Lending lending : {Lending::kAtOnce, Lending::kAfterTheDone}) {
    Setting setting(dropping_spec(1));
    RankCalls& rank = setting.rank(0);
    const std::vector<unsigned char> expected = setting.model.lookup(kIds);
    rank.lend(lending);
    for (int step = 0; step < 3; ++step) {
      PendingRows rows = rank.lookup_done_later(rank.lookup_start(kIds));
      EXPECT_TRUE(rows.answer.ready());
      const std::vector<char> got = rows.wait();
      EXPECT_EQ(0, std::memcmp(got.data(), expected.data(), got.size()));
      rank.settle();
    }
    EXPECT_EQ(setting.group.pipeline->stats().lookups, 3);
  }
}

TEST(PipelineLending, SaysWhyToWhoeverLendsToAContextThatHasFailed) {
  Setting setting(dropping_spec(1));
  Pipeline& pipeline = *setting.group.pipeline;
  RankCalls& rank = setting.rank(0);
  rank.lookup_begin(kIds);
  pipeline.fail({FailureKind::kAborted, "aborted by a test"});
  Answer lease;
  Shard& shard = *setting.group.shards[0];
  EXPECT_EQ(message_of([&] {
              ask(lease, [&](Completion done) { pipeline.lookup_lease(0, shard.table.view(), std::move(done)); });
            }),
            "aborted by a test");
}

TEST(PipelineLending, WaitsForTheLeaseWhereNoTableWasOffered) {
  Setting setting(dropping_spec(1));
  RankCalls& rank = setting.rank(0);
  const float pin = rank.lookup_begin(kIds);
  PendingRows rows = rank.lookup_done_later(pin);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(rows.answer.ready());
  rank.lookup_lease();
  const std::vector<unsigned char> expected = setting.model.lookup(kIds);
  const std::vector<char> got = rows.wait();
  EXPECT_EQ(0, std::memcmp(got.data(), expected.data(), got.size()));
  rank.settle();
}

TEST(PipelineLending, LetsALookupThatComesBesideAnUpdateReadWhatTheUpdateHasWritten) {
  Executor executor(1);
  Setting setting(dropping_spec(2), 1, 1, &executor);
  setting.batches[0].pending = true;
  setting.run({{Op::kLookupStart, 0}, {Op::kLookupDone}, {Op::kStage, 0}});
  Pipeline& pipeline = *setting.group.pipeline;
  std::vector<Answer> leases(2);
  std::vector<float> pins;
  {
    const Blockade blockade(executor);
    for (int r : {0, 1}) {
      setting.rank(r).update_start(plain_rule());
      // Both kinds of starts, and leases that do not wait for the table to come back.
      const std::vector<std::int32_t> ids = slice(setting.batches[0].ids, setting.spec, r);
      Tensor tensor(kInt32, {4}, ids.data());
      pins.push_back(r == 0 ? pipeline.lookup_begin(r, tensor.view(), kRows)
                            : pipeline.lookup_begin_beside_update(r, tensor.view()));
      const DLTensor table = setting.group.shards[static_cast<std::size_t>(r)]->table.view();
      ask(leases[static_cast<std::size_t>(r)],
          [&](Completion completion) { pipeline.lookup_lease(r, table, std::move(completion)); });
      EXPECT_FALSE(leases[static_cast<std::size_t>(r)].ready());
    }
    EXPECT_EQ(pipeline.stats().lookups, 1) << "the second one has begun while the update had the tables";
  }
  std::vector<PendingRows> rows;
  for (int r : {0, 1}) rows.push_back(setting.rank(r).lookup_done_later(pins[static_cast<std::size_t>(r)]));
  std::vector<std::vector<char>> got;
  for (PendingRows& pending : rows) got.push_back(pending.wait());
  for (int r : {0, 1}) {
    EXPECT_EQ(setting.rank(r).update_done().valid, 1);
    EXPECT_FALSE(leases[static_cast<std::size_t>(r)].wait());
    setting.rank(r).settle();
  }
  expect(setting.model, {{Op::kUpdateStart}, {Op::kUpdateDone}}, setting.batches, plain_rule());
  const std::vector<unsigned char> expected = setting.model.lookup(setting.batches[0].ids);
  for (int r : {0, 1}) {
    const std::vector<unsigned char> mine = slice(expected, setting.spec, r);
    EXPECT_EQ(0, std::memcmp(got[static_cast<std::size_t>(r)].data(), mine.data(), mine.size())) << r;
  }
}

TEST(PipelineLending, FailsALookupThatWaitsForAnUpdate) {
  Executor executor(1);
  Setting setting(dropping_spec(1), 1, 1, &executor);
  setting.run({{Op::kLookupStart, 0}, {Op::kLookupDone}, {Op::kStage, 0}});
  Pipeline& pipeline = *setting.group.pipeline;
  Answer lease;
  {
    const Blockade blockade(executor);
    setting.rank(0).update_start(plain_rule());
    Tensor ids(kInt32, {4}, kIds.data());
    pipeline.lookup_begin_beside_update(0, ids.view());
    const DLTensor table = setting.group.shards[0]->table.view();
    ask(lease, [&](Completion completion) { pipeline.lookup_lease(0, table, std::move(completion)); });
    pipeline.fail({FailureKind::kAborted, "why"});
  }
  for (const auto& failure : {lease.wait(), setting.rank(0).take_back()}) {
    ASSERT_TRUE(failure);
    EXPECT_EQ(failure->message, "why");
  }
  pipeline.drain();
}

TEST(PipelineLending, RefusesAnotherTableThanTheOneOffered) {
  for (const bool update : {false, true}) {
    Setting setting(dropping_spec(1));
    RankCalls& rank = setting.rank(0);
    Shard copy(setting.spec, kRows);
    RankCalls other(*setting.group.pipeline, 0, copy, kRows);
    setting.rank(0).lend(Lending::kAfterTheDone);
    update ? rank.update_start(plain_rule()) : rank.lookup_start(kIds);
    if (update) rank.update_done_later().wait();
    const std::string message = message_of([&] { update ? other.update_lease() : other.lookup_lease(); });
    EXPECT_NE(message.find("of step 1: XLA has put a copy of the table between two calls"), std::string::npos)
        << message;
  }
}

TEST(PipelineLending, ChecksTheTableThatIsOffered) {
  Setting setting(dropping_spec(1));
  Shard longer(setting.spec, kRows + 1);
  setting.rank(0).lookup_begin(kIds);
  const std::string message = message_of([&] { setting.group.pipeline->lookup_offer(0, longer.table.view()); });
  EXPECT_NE(message.find("table is float32[24, 2], but the context needs float32[23, 2]"), std::string::npos)
      << message;
}

TEST(PipelineLending, StillLendsTheTableOfARankWhoseDoneWasRefused) {
  Setting setting(dropping_spec(2));
  for (RankCalls& rank : setting.group.ranks) rank.lend(Lending::kAfterTheDone);
  const float pin = setting.rank(0).lookup_start(kIds);
  PendingRows rows = setting.rank(0).lookup_done_later(pin);
  setting.rank(1).lookup_start(kIds);
  setting.rank(1).lookup_done(pin + 1);  // refused, so it lends nothing; the lease behind it does
  rows.wait();
  for (int r : {0, 1}) setting.rank(r).settle();
  EXPECT_TRUE(setting.group.pipeline->take_refusal());
  setting.model.machine.reset(1, 0, 0);
  setting.run(staleness_one(3));
}

TEST(PipelineLending, KeepsATableThatWorkUsesWhereTheLeaseComesAfterAFailure) {
  for (const bool update : {false, true}) {
    Setting setting(dropping_spec(2));
    Blockade blockade(*setting.own_executor);
    std::vector<PendingRows> rows;
    std::vector<PendingUpdate> updates;
    for (int r : {0, 1}) {
      RankCalls& rank = setting.rank(r);
      rank.lend(Lending::kAfterTheDone);
      if (update) {
        rank.update_start(plain_rule());
        updates.push_back(rank.update_done_later());
      } else {
        rows.push_back(rank.lookup_done_later(rank.lookup_start(kIds)));
      }
    }
    setting.group.pipeline->fail({FailureKind::kAborted, "why"});
    for (int r : {0, 1}) {
      update ? setting.rank(r).update_lease() : setting.rank(r).lookup_lease();
      EXPECT_FALSE(setting.rank(r).table_is_back());
    }
    blockade.release();
    for (int r : {0, 1}) EXPECT_EQ(setting.rank(r).take_back()->message, "why");
    for (PendingRows& pending : rows) EXPECT_EQ(pending.answer.wait()->message, "why");
    for (PendingUpdate& pending : updates) EXPECT_EQ(pending.answer.wait()->message, "why");
    setting.group.pipeline->drain();
    for (int r : {0, 1}) {
      EXPECT_EQ(message_of([&] { update ? setting.rank(r).update_lease() : setting.rank(r).lookup_lease(); }), "why");
    }
  }
}

}  // namespace
}  // namespace async_emb::context
