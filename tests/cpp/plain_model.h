// What a pipeline means, one call after another: a whole table, one state machine for all ranks, and an update written
// as the documentation words it (cpu_naive.h). Programs of calls run on both and must agree.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "context/pipeline.h"
#include "cpu_naive.h"
#include "ranks.h"

namespace async_emb::context {

// The token ids of a step of the whole group in token order, and the gradient rows [tokens, emb_width] of its loss.
struct Batch {
  std::vector<std::int32_t> ids;
  std::vector<unsigned char> grads;
  bool pending = true;
};

// Ids with repeats and some outside of the table.
inline Batch random_batch(const ContextSpec& spec, std::int64_t rows, std::mt19937& random) {
  Batch batch;
  std::vector<float> grads;
  for (std::int64_t i = 0; i < spec.tokens(); ++i) {
    const unsigned draw = random();
    const auto id = static_cast<std::int32_t>(draw % static_cast<unsigned>(rows));
    batch.ids.push_back(draw % 13 == 0   ? -5
                        : draw % 17 == 0 ? static_cast<std::int32_t>(rows)
                        : draw % 3 == 0  ? 1
                                         : id);
    for (std::int64_t column = 0; column < spec.emb_width; ++column) {
      grads.push_back(random() % 9 == 0 ? 0.0f : std::uniform_real_distribution<float>(-1, 1)(random));
    }
  }
  batch.grads = cpu::encode(spec.dtype, grads);
  batch.pending = random() % 8 != 0;
  return batch;
}

template <typename T>
std::vector<T> slice(const std::vector<T>& whole, const ContextSpec& spec, int rank) {
  const std::size_t size = whole.size() / static_cast<std::size_t>(spec.group_size);
  const auto begin =
      whole.begin() + static_cast<std::ptrdiff_t>(size) * spec.token_blocks[static_cast<std::size_t>(rank)];
  return {begin, begin + static_cast<std::ptrdiff_t>(size)};
}

// kLookupBeside: a lookup_start_beside_update.
enum class Op { kLookupStart, kLookupBeside, kLookupDone, kStage, kUpdateStart, kUpdateDone };

struct Call {
  Op op;
  int batch = 0;  // of the ids and gradients that the call is given
};

struct Expected {
  bool refused = false;
  bool or_refused = false;          // what a peer's refusal makes of it depends on who was faster
  int batch = -1;                   // whose rows a lookup_done gives
  std::vector<unsigned char> rows;  // of the whole group
  UpdateOutcome update;
};

class PlainModel {
 public:
  PlainModel(const ContextSpec& spec, std::int64_t rows, unsigned seed) : spec_(spec), rows_(rows) {
    std::mt19937 random(seed);
    std::vector<float> values(static_cast<std::size_t>(rows * spec.emb_width));
    for (float& value : values) value = std::uniform_real_distribution<float>(-1, 1)(random);
    table = cpu::encode(spec.dtype, values);
    state.assign(static_cast<std::size_t>(rows), 0.0f);
    last_step.assign(static_cast<std::size_t>(rows), 0);
  }

  std::vector<unsigned char> table;  // [rows, emb_width]
  std::vector<float> state;
  std::vector<std::int32_t> last_step;
  StateMachine machine;

  // The call's effect and what it gives. After a refusal everything is refused, until `forgive`.
  Expected apply(const Call& call, const std::vector<Batch>& batches, const UpdateRule& rule) {
    Expected expected;
    StateMachine::Refusal refusal;
    switch (call.op) {
      case Op::kLookupStart:
      case Op::kLookupBeside:
        refusal = call.op == Op::kLookupStart ? machine.check_lookup_start()
                                              : machine.check_lookup_start_beside_update(machine.lookup().armed > 0);
        if (refusal || refuses_) break;
        machine.lookup_start();
        armed_ = call.batch;
        armed_rows_ = lookup(batches[static_cast<std::size_t>(call.batch)].ids);
        break;
      case Op::kLookupDone:
        if ((refusal = machine.check_lookup_done(pin_of(machine.lookup().armed))) || refuses_) break;
        machine.lookup_done();
        expected.batch = consumed_ = armed_;
        expected.rows = armed_rows_;
        break;
      case Op::kStage:
        if ((refusal = machine.check_stage()) || refuses_) break;
        machine.stage();
        staged_ids_ = batches[static_cast<std::size_t>(consumed_)].ids;
        staged_ = call.batch;
        break;
      case Op::kUpdateStart:
        if ((refusal = machine.check_update_start()) || refuses_) break;
        running_ = machine.update_start() ? update(batches[static_cast<std::size_t>(staged_)], rule) : UpdateOutcome{};
        break;
      case Op::kUpdateDone:
        if ((refusal = machine.check_update_done()) || refuses_) break;
        machine.update_done();
        expected.update = running_;
        break;
    }
    refuses_ = refuses_ || refusal;
    expected.refused = refuses_;
    return expected;
  }

  bool refuses() const { return refuses_; }
  void refuse() { refuses_ = true; }
  void forgive() { refuses_ = false; }

  std::vector<unsigned char> lookup(const std::vector<std::int32_t>& ids) const {
    const std::size_t width = static_cast<std::size_t>(spec_.emb_width * core::size_of(spec_.dtype));
    std::vector<unsigned char> rows(ids.size() * width, 0);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (trains(ids[i]))
        std::memcpy(rows.data() + i * width, table.data() + static_cast<std::size_t>(ids[i]) * width, width);
    }
    return rows;
  }

  UpdateOutcome update(const Batch& batch, const UpdateRule& rule) {
    cpu::Problem problem;
    problem.dtype = spec_.dtype;
    problem.rows = rows_;
    problem.width = spec_.logical_width;
    problem.table = logical(table);
    problem.grads = logical(batch.grads);
    problem.state = state;
    problem.last_step = last_step;
    problem.learning_rate = rule.learning_rate;
    problem.eps = rule.eps;
    problem.decay = rule.decay;
    problem.weight_decay = rule.weight_decay;
    problem.lazy = rule.lazy;
    problem.step = rule.step;
    std::set<std::int32_t> distinct;
    for (const std::int32_t id : staged_ids_) {
      if (trains(id)) distinct.insert(id);
    }
    while (static_cast<std::int64_t>(distinct.size()) > spec_.num_unique) distinct.erase(std::prev(distinct.end()));
    for (const std::int32_t id : staged_ids_) problem.ids.push_back(distinct.contains(id) ? id : -1);

    cpu::Outcome outcome = cpu::run_naive(problem);
    UpdateOutcome result{std::sqrt(outcome.total), 0, 1};
    if (!std::isfinite(result.norm) || !batch.pending || is_unsound(rule)) return result;
    if (rule.clips && result.norm > rule.max_grad_norm) {
      problem.clip = rule.max_grad_norm / result.norm;
      outcome = cpu::run_naive(problem);
    }
    result.valid = 1;
    state = outcome.state;
    last_step = outcome.last_step;
    const std::size_t narrow = static_cast<std::size_t>(spec_.logical_width * core::size_of(spec_.dtype));
    const std::size_t wide = static_cast<std::size_t>(spec_.emb_width * core::size_of(spec_.dtype));
    for (std::size_t row = 0; row < static_cast<std::size_t>(rows_); ++row) {
      std::memcpy(table.data() + row * wide, outcome.table.data() + row * narrow, narrow);
    }
    return result;
  }

  // Every rank's columns of the table, and the same optimizer state for all, written to resting shards or compared with
  // them.
  using Shards = std::vector<std::unique_ptr<Shard>>;
  void write_shards(const Shards& shards) const {
    exchange(shards, [](void* shard, const void* mine, std::size_t bytes, int) { std::memcpy(shard, mine, bytes); });
  }
  void expect_shards(const Shards& shards) const {
    bool alike = true;
    exchange(shards, [&](void* shard, const void* mine, std::size_t bytes, int rank) {
      if (std::memcmp(shard, mine, bytes) == 0) return;
      if (std::exchange(alike, false))
        ADD_FAILURE() << "rank " << rank << ": the shard or its state differs from the model";
    });
  }

 private:
  // Written down once more, by numbers.
  static bool is_unsound(const UpdateRule& rule) {
    const auto unsound = [](float value) { return !std::isfinite(value) || value < 0; };
    const bool bad_decay = rule.lazy ? unsound(rule.weight_decay) : !std::isfinite(rule.weight_decay);
    return unsound(rule.learning_rate) || unsound(rule.eps) || unsound(rule.decay) || bad_decay ||
           (rule.clips && (std::isnan(rule.max_grad_norm) || rule.max_grad_norm < 0));
  }

  bool trains(std::int32_t id) const {
    return id >= 0 && id < rows_ && !(spec_.has_padding_id && id == spec_.padding_id);
  }

  std::vector<unsigned char> logical(const std::vector<unsigned char>& wide) const {
    const std::ptrdiff_t element = core::size_of(spec_.dtype);
    std::vector<unsigned char> narrow;
    for (auto row = wide.begin(); row != wide.end(); row += spec_.emb_width * element) {
      narrow.insert(narrow.end(), row, row + spec_.logical_width * element);
    }
    return narrow;
  }

  template <typename Copy>
  void exchange(const Shards& shards, Copy copy) const {
    const std::size_t shard = static_cast<std::size_t>(spec_.shard_width() * core::size_of(spec_.dtype));
    for (int rank = 0; rank < spec_.group_size; ++rank) {
      Shard& part = *shards[static_cast<std::size_t>(rank)];
      part.lend();
      for (std::size_t row = 0; row < static_cast<std::size_t>(rows_); ++row) {
        const std::size_t column =
            (row * static_cast<std::size_t>(spec_.group_size) + static_cast<std::size_t>(rank)) * shard;
        copy(part.table.as<char>() + row * shard, table.data() + column, shard, rank);
      }
      copy(part.row_state.as<char>(), state.data(), part.row_state.bytes(), rank);
      copy(part.last_step.as<char>(), last_step.data(), part.last_step.bytes(), rank);
      part.rest();
    }
  }

  const ContextSpec spec_;
  const std::int64_t rows_;
  bool refuses_ = false;
  int armed_ = -1;
  int consumed_ = -1;
  int staged_ = -1;
  std::vector<unsigned char> armed_rows_;
  std::vector<std::int32_t> staged_ids_;
  UpdateOutcome running_;
};

inline std::vector<Expected> expect(PlainModel& model, const std::vector<Call>& program,
                                    const std::vector<Batch>& batches, const UpdateRule& rule) {
  std::vector<Expected> expected;
  for (const Call& call : program) expected.push_back(model.apply(call, batches, rule));
  return expected;
}

// Runs the program on one rank and compares all it gives. `pin` is of the last lookup_start. At call `other_batch`, a
// lookup_done, the rank gives the ids of another batch.
template <typename Calls>
void run_program(Calls& calls, const ContextSpec& spec, int rank, const std::vector<Call>& program,
                 const std::vector<Batch>& batches, const std::vector<Expected>& expected, const UpdateRule& rule,
                 float& pin, std::size_t other_batch = SIZE_MAX) {
  for (std::size_t i = 0; i < program.size(); ++i) {
    Expected want = expected[i];
    const Batch& batch = batches[static_cast<std::size_t>(program[i].batch)];
    const std::string where = "rank " + std::to_string(rank) + ", call " + std::to_string(i);
    switch (program[i].op) {
      case Op::kLookupStart:
        pin = calls.lookup_start(slice(batch.ids, spec, rank));
        break;
      case Op::kLookupBeside:
        pin = calls.lookup_start_beside_update(slice(batch.ids, spec, rank));
        break;
      case Op::kLookupDone: {
        std::vector<std::int32_t> ids;
        if (!want.refused) ids = slice(batches[static_cast<std::size_t>(want.batch)].ids, spec, rank);
        if (i == other_batch) ids.back() = ids.back() == 3 ? 4 : 3;
        const std::vector<char> rows = calls.lookup_done(pin, want.refused ? nullptr : &ids);
        want.refused = want.refused || i == other_batch;
        if (want.refused) {
          float first = 0;
          if (spec.dtype == core::DType::kFloat32) std::memcpy(&first, rows.data(), sizeof(first));
          EXPECT_TRUE(spec.dtype != core::DType::kFloat32 || std::isnan(first))
              << where << ": a refused lookup gave rows";
        } else {
          const std::vector<unsigned char> mine = slice(want.rows, spec, rank);
          EXPECT_EQ(0, std::memcmp(rows.data(), mine.data(), mine.size())) << where << ": other rows than the model's";
        }
        break;
      }
      case Op::kStage:
        calls.stage(slice(batch.grads, spec, rank).data(), batch.pending);
        break;
      case Op::kUpdateStart:
        calls.update_start(rule);
        break;
      case Op::kUpdateDone: {
        const UpdateOutcome outcome = calls.update_done();
        if (want.or_refused && outcome == UpdateOutcome{}) break;
        EXPECT_EQ(core::bits_of(outcome.norm), core::bits_of(want.update.norm)) << where;
        EXPECT_EQ(outcome.valid, want.update.valid) << where;
        EXPECT_EQ(outcome.pending, want.update.pending) << where;
        break;
      }
    }
  }
  calls.settle();
}

inline constexpr std::int64_t kRows = 23;

inline UpdateRule plain_rule() {
  UpdateRule rule;
  rule.learning_rate = 0.05f;
  rule.eps = 1e-8f;
  rule.decay = 0.9f;
  rule.weight_decay = 0.99f;
  return rule;
}

// Rules that must not be applied, one for each number.
inline std::vector<UpdateRule> unsound_rules() {
  std::vector<UpdateRule> rules;
  const auto add = [&](bool lazy, float UpdateRule::* number, std::initializer_list<float> values) {
    for (const float value : values) {
      UpdateRule rule = plain_rule();
      rule.lazy = lazy;
      rule.clips = true;
      rule.max_grad_norm = 1;
      rule.*number = value;
      rules.push_back(rule);
    }
  };
  const float nan = std::nanf("");
  const float infinity = std::numeric_limits<float>::infinity();
  for (const bool lazy : {false, true}) {
    for (const auto number : {&UpdateRule::learning_rate, &UpdateRule::eps, &UpdateRule::decay}) {
      add(lazy, number, {nan, infinity, -infinity, -1e-30f});
    }
    add(lazy, &UpdateRule::weight_decay, {nan, infinity, -infinity});
    add(lazy, &UpdateRule::max_grad_norm, {nan, -1e-30f});
  }
  add(true, &UpdateRule::weight_decay, {-1e-30f});
  return rules;
}

// Numbers at the edge of what may be applied: a negative factor of weight decay, zeros, no bound.
inline std::vector<UpdateRule> extreme_rules() {
  UpdateRule flips = plain_rule();
  flips.weight_decay = -0.5f;
  UpdateRule zeros;
  zeros.learning_rate = zeros.eps = zeros.decay = zeros.weight_decay = -0.0f;
  UpdateRule unbounded = plain_rule();
  unbounded.clips = true;
  unbounded.max_grad_norm = std::numeric_limits<float>::infinity();
  return {flips, zeros, unbounded};
}

// A group, the model that it must agree with, and batches for its steps.
struct Setting {
  ContextSpec spec;
  std::unique_ptr<Executor> own_executor;
  Group group;
  PlainModel model;
  std::vector<Batch> batches;
  std::vector<float> pins;

  explicit Setting(const ContextSpec& spec, unsigned seed = 1, int threads = 2, Executor* executor = nullptr,
                   int number_of_batches = 12)
      : spec(spec),
        own_executor(executor == nullptr ? std::make_unique<Executor>(threads) : nullptr),
        group(spec, kRows, executor == nullptr ? *own_executor : *executor, seed),
        model(spec, kRows, seed),
        pins(static_cast<std::size_t>(spec.group_size), 0.0f) {
    model.write_shards(group.shards);
    std::mt19937 random(seed);
    for (int i = 0; i < number_of_batches; ++i) batches.push_back(random_batch(spec, kRows, random));
  }

  RankCalls& rank(int rank) { return group.ranks[static_cast<std::size_t>(rank)]; }

  void run(const std::vector<Call>& program, const UpdateRule& rule = plain_rule()) {
    const std::vector<Expected> expected = expect(model, program, batches, rule);
    const auto failures = run_ranks(spec.group_size, [&](int r) {
      run_program(rank(r), spec, r, program, batches, expected, rule, pins[static_cast<std::size_t>(r)]);
    });
    for (const auto& failure : failures) EXPECT_FALSE(failure) << failure->message;
    model.expect_shards(group.shards);
  }

  void return_to_first_step() {
    group.pipeline->return_to_first_step();
    model.machine.return_to_first_step();
  }
};

// Ranks are at most a step apart: armed, consumed, staged and running make few batches, however long a pipeline runs.
inline std::int64_t most_batch_bytes(const ContextSpec& spec) { return 6 * BatchIds(spec.tokens()).bytes(); }

// Staleness 1 over `steps` steps, from the first lookup to the flush: the schedule of a training step, and the others
// that are allowed.
inline std::vector<Call> staleness_one(int steps) {
  std::vector<Call> program{{Op::kLookupStart, 0}};
  for (int k = 0; k < steps; ++k) {
    program.push_back({Op::kLookupDone});
    program.push_back({Op::kUpdateStart});
    if (k % 4 == 1) program.push_back({Op::kUpdateDone});
    if (k + 1 < steps) program.push_back({k % 4 == 1 || k % 4 == 3 ? Op::kLookupStart : Op::kLookupBeside, k + 1});
    if (k % 4 != 1) program.push_back({Op::kUpdateDone});
    program.push_back({Op::kStage, k});
  }
  program.push_back({Op::kUpdateStart});
  program.push_back({Op::kUpdateDone});
  return program;
}

}  // namespace async_emb::context
