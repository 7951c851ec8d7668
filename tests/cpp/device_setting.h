// Programs of calls on emulated GPUs, beside the plain table that they must agree with.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "device_ranks.h"
#include "plain_model.h"

namespace async_emb::context {

// `Group` has the shards and the calls of all ranks.
template <class Group>
struct SettingOn {
  ContextSpec spec;
  Group group;
  PlainModel model;
  std::vector<Batch> batches;

  template <typename... Arguments>
  SettingOn(const ContextSpec& spec, unsigned seed, int number_of_batches, Arguments&&... arguments)
      : spec(spec), group(spec, kRows, std::forward<Arguments>(arguments)...), model(spec, kRows, seed) {
    model.write_shards(group.shards);
    std::mt19937 random(seed);
    for (int i = 0; i < number_of_batches; ++i) batches.push_back(random_batch(spec, kRows, random));
  }

  DeviceRankCalls& rank(int rank) { return *group.ranks[static_cast<std::size_t>(rank)]; }

  void run(const std::vector<Call>& program, const UpdateRule& rule = plain_rule()) {
    const std::vector<Expected> expected = expect(model, program, batches, rule);
    const auto failures = run_ranks(spec.group_size, [&](int r) {
      float pin = 0;
      run_program(rank(r), spec, r, program, batches, expected, rule, pin);
    });
    for (const auto& failure : failures) EXPECT_FALSE(failure) << failure->message;
    model.expect_shards(group.shards);
  }

  // The same without a wait before the end: the host is as far ahead as it gets.
  void run_ahead(const std::vector<Call>& program, const UpdateRule& rule = plain_rule()) {
    const std::vector<Expected> expected = expect(model, program, batches, rule);
    const auto failures = run_ranks(spec.group_size, [&](int r) {
      DeviceRankCalls& calls = rank(r);
      std::vector<Tensor*> results(program.size());
      for (std::size_t i = 0; i < program.size(); ++i) {
        const Batch& batch = batches[static_cast<std::size_t>(program[i].batch)];
        if (program[i].op == Op::kLookupStart) calls.lookup_start(slice(batch.ids, spec, r));
        if (program[i].op == Op::kLookupBeside) calls.lookup_start_beside_update(slice(batch.ids, spec, r));
        if (program[i].op == Op::kLookupDone) results[i] = &calls.lookup_done_later();
        if (program[i].op == Op::kStage) calls.stage(slice(batch.grads, spec, r).data(), batch.pending);
        if (program[i].op == Op::kUpdateStart) calls.update_start(rule);
        if (program[i].op == Op::kUpdateDone) results[i] = &calls.update_done_later();
      }
      calls.settle();
      for (std::size_t i = 0; i < program.size(); ++i) {
        if (program[i].op == Op::kLookupDone) {
          const std::vector<unsigned char> mine = slice(expected[i].rows, spec, r);
          EXPECT_EQ(0, std::memcmp(results[i]->as<char>(), mine.data(), mine.size())) << "rank " << r << " call " << i;
        }
        if (program[i].op == Op::kUpdateDone) {
          const UpdateOutcome outcome = DeviceRankCalls::outcome_of(*results[i]);
          EXPECT_EQ(core::bits_of(outcome.norm), core::bits_of(expected[i].update.norm))
              << "rank " << r << " call " << i;
          EXPECT_EQ(outcome.valid, expected[i].update.valid) << "rank " << r << " call " << i;
          EXPECT_EQ(outcome.pending, expected[i].update.pending) << "rank " << r << " call " << i;
        }
      }
    });
    for (const auto& failure : failures) EXPECT_FALSE(failure) << failure->message;
    model.expect_shards(group.shards);
  }
};

}  // namespace async_emb::context
