// Ranks as threads: the calls that a compiled step makes, in the orders in which XLA may make them.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "context/executor.h"
#include "context/pipeline.h"
#include "context/process_map.h"
#include "lent_buffers.h"
#include "thread_network.h"

namespace async_emb::context {

// Rows that a lookup_done will write.
struct PendingRows {
  Tensor rows;
  Answer answer;

  std::vector<char> wait() {
    answer.wait_or_throw();
    return rows.content();
  }
};

struct UpdateOutcome {
  float norm = 0;
  std::int32_t valid = 0;
  std::int32_t pending = 0;
  bool operator==(const UpdateOutcome&) const = default;
};

struct PendingUpdate {
  std::unique_ptr<UpdateOutcome> outcome = std::make_unique<UpdateOutcome>(UpdateOutcome{-1, -1, -1});
  Answer answer;

  UpdateOutcome wait() {
    answer.wait_or_throw();
    return *outcome;
  }
};

// When a start that has offered its table lends it: with a compiled program that runs one call after the other, the
// lease may come when the step is done.
enum class Lending { kAtOnce, kAfterTheDone, kAtAnyTime };

// The calls of one rank, in the orders in which a compiled step makes them. The table is threaded: a start begins only
// when the last lease has ended. A done may come before the lease of its step, which may then come only after it.
class RankCalls {
 public:
  RankCalls(Pipeline& pipeline, int rank, Shard& shard, std::int64_t rows, unsigned seed = 0)
      : pipeline_(pipeline),
        rank_(rank),
        shard_(shard),
        rows_(rows),
        random_(seed * 1000 + static_cast<unsigned>(rank)) {}
  RankCalls(const RankCalls&) = default;
  // No buffer goes before its lease has ended, also where a program ends early.
  ~RankCalls() {
    if (lease_) lease_->wait();
  }

  void lend(Lending lending) { lending_ = lending; }
  // From here on calls come after random pauses, and leases before, during or after the dones.
  void stagger() {
    staggers_ = true;
    lending_ = Lending::kAtAnyTime;
  }

  template <typename Id>
  float lookup_begin(const std::vector<Id>& ids) {
    settle();
    pause();
    Tensor tensor(sizeof(Id) == 8 ? kInt64 : kInt32, {static_cast<std::int64_t>(ids.size())}, ids.data());
    return pipeline_.lookup_begin(rank_, tensor.view(), rows_);
  }

  void lookup_lease() {
    take_lease(
        [&](Completion completion) { pipeline_.lookup_lease(rank_, shard_.table.view(), std::move(completion)); });
  }

  // Begins, offers the table, and lends it: now, or when the step is done.
  template <typename Id>
  float lookup_start(const std::vector<Id>& ids) {
    const float pin = lookup_begin(ids);
    offer([&] { pipeline_.lookup_offer(rank_, shard_.table.view()); });
    due_ = &RankCalls::lookup_lease;
    if (!defers()) lend_due();
    return pin;
  }

  // The table comes from the update and goes to the lookup, at any time before the step ends.
  template <typename Id>
  float lookup_start_beside_update(const std::vector<Id>& ids) {
    pause();
    Tensor tensor(sizeof(Id) == 8 ? kInt64 : kInt32, {static_cast<std::int64_t>(ids.size())}, ids.data());
    const float pin = pipeline_.lookup_begin_beside_update(rank_, tensor.view());
    is_beside_ = true;
    if (!defers()) lend_after_update();
    return pin;
  }

  PendingRows lookup_done_later(float pin, const std::vector<std::int32_t>* ids = nullptr) {
    pause();
    const ContextSpec& spec = pipeline_.spec();
    PendingRows pending{Tensor(dlpack_type(spec.dtype), {spec.tokens_per_rank, spec.emb_width}), {}};
    ask(pending.answer, [&](Completion completion) {
      if (ids == nullptr) return pipeline_.lookup_done(rank_, pin, nullptr, pending.rows.view(), std::move(completion));
      Tensor tensor(kInt32, {static_cast<std::int64_t>(ids->size())}, ids->data());
      const DLTensor view = tensor.view();
      pipeline_.lookup_done(rank_, pin, &view, pending.rows.view(), std::move(completion));
    });
    return pending;
  }
  std::vector<char> lookup_done(float pin, const std::vector<std::int32_t>* ids = nullptr) {
    lend_after_update();  // which the pin has waited for
    return finish(lookup_done_later(pin, ids));
  }

  float stage(const void* grads, bool pending = true) {
    pause();
    const ContextSpec& spec = pipeline_.spec();
    Tensor tensor(dlpack_type(spec.dtype), {spec.tokens_per_rank, spec.emb_width}, grads);
    return pipeline_.stage_update(rank_, tensor.view(), nullptr, nullptr, pending);
  }

  float stage_segments(const void* grads, const std::vector<std::int32_t>& segments,
                       const std::vector<std::int32_t>& unique) {
    pause();
    const ContextSpec& spec = pipeline_.spec();
    Tensor tensor(dlpack_type(spec.dtype), {spec.tokens_per_rank, spec.emb_width}, grads);
    Tensor of_tokens(kInt32, {static_cast<std::int64_t>(segments.size())}, segments.data());
    Tensor distinct(kInt32, {static_cast<std::int64_t>(unique.size())}, unique.data());
    const DLTensor segment_view = of_tokens.view();
    const DLTensor unique_view = distinct.view();
    return pipeline_.stage_update(rank_, tensor.view(), &segment_view, &unique_view, true);
  }

  float update_begin(const UpdateRule& rule) {
    settle();
    pause();
    lazy_ = rule.lazy;
    return pipeline_.update_begin(rank_, rule);
  }

  void update_lease() {
    take_lease([&](Completion completion) {
      const DLTensor last_step = shard_.last_step.view();
      pipeline_.update_lease(rank_, shard_.table.view(), shard_.row_state.view(), lazy_ ? &last_step : nullptr,
                             std::move(completion));
    });
  }

  float update_start(const UpdateRule& rule) {
    const float pin = update_begin(rule);
    offer([&] {
      const DLTensor last_step = shard_.last_step.view();
      pipeline_.update_offer(rank_, shard_.table.view(), shard_.row_state.view(), lazy_ ? &last_step : nullptr);
    });
    due_ = &RankCalls::update_lease;
    if (!defers()) lend_due();
    return pin;
  }

  PendingUpdate update_done_later() {
    pause();
    PendingUpdate pending;
    UpdateOutcome& out = *pending.outcome;
    ask(pending.answer, [&](Completion completion) {
      pipeline_.update_done(rank_, {&out.norm, &out.valid, &out.pending}, std::move(completion));
    });
    return pending;
  }
  UpdateOutcome update_done() { return finish(update_done_later()); }

  // Waits until the table has come back, and says with what.
  std::optional<Failure> take_back() {
    if (!lease_) return std::nullopt;
    const Answer lease = *std::exchange(lease_, std::nullopt);
    auto failure = lease.wait();
    shard_.rest();
    return failure;
  }
  void settle() {
    lend_after_update();
    lend_due();
    if (const auto failure = take_back()) throw Error(*failure);
  }
  bool table_is_back() const { return !lease_ || lease_->ready(); }

 private:
  template <typename Call>
  void take_lease(Call call) {
    pause();
    shard_.lend();
    Answer lease;
    try {
      ask(lease, call);
    } catch (...) {
      shard_.rest();
      throw;
    }
    lease_ = std::move(lease);
  }

  template <typename Call>
  void offer(Call call) {
    shard_.lend();
    try {
      call();
    } catch (...) {
      shard_.rest();
      throw;
    }
  }

  bool defers() {
    return lending_ == Lending::kAfterTheDone || (lending_ == Lending::kAtAnyTime && random_() % 2 == 0);
  }

  void lend_due() {
    if (const auto due = std::exchange(due_, nullptr)) (this->*due)();
  }

  void lend_after_update() {
    if (!std::exchange(is_beside_, false)) return;
    settle();
    lookup_lease();
  }

  // Waits for a done. Where it came before the lease, nobody may use the table any more when it has ended.
  template <typename Pending>
  auto finish(Pending pending) -> decltype(pending.wait()) {
    if (!defers()) lend_due();
    pending.answer.wait();
    if (due_ != nullptr) shard_.rest();
    lend_due();
    lend_after_update();
    return pending.wait();
  }

  void pause() {
    if (!staggers_) return;
    const unsigned draw = random_() % 16;
    if (draw < 4) std::this_thread::yield();
    if (draw == 15) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 200));
  }

  Pipeline& pipeline_;
  const int rank_;
  Shard& shard_;
  const std::int64_t rows_;
  std::mt19937 random_;
  Lending lending_ = Lending::kAtOnce;
  bool staggers_ = false;
  bool lazy_ = false;
  bool is_beside_ = false;  // the lease of a lookup comes after that of the update
  std::optional<Answer> lease_;
  void (RankCalls::*due_)() = nullptr;  // the lease that comes with or after the done
};

// Runs `body(rank)` on a thread for each rank and returns what each one threw.
inline std::vector<std::optional<Failure>> run_ranks(int count, const std::function<void(int)>& body) {
  std::vector<std::optional<Failure>> failures(static_cast<std::size_t>(count));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < count; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const Error& error) {
        failures[static_cast<std::size_t>(rank)] = Failure{error.kind(), error.what()};
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return failures;
}

// Occupies the workers of an executor until it is destroyed.
class Blockade {
 public:
  explicit Blockade(Executor& executor) {
    for (int i = 0; i < executor.limit(); ++i) {
      executor.submit([released = released_] { released.wait(); });
    }
  }
  ~Blockade() { release(); }
  void release() {
    if (!std::exchange(open_, true)) promise_.set_value();
  }

 private:
  std::promise<void> promise_;
  std::shared_future<void> released_ = promise_.get_future().share();
  bool open_ = false;
};

inline ContextSpec small_spec(int group_size, std::int64_t tokens_per_rank = 4, std::int64_t shard_width = 2) {
  ContextSpec spec;
  spec.id = 1;
  spec.key = "key";
  spec.name = "users";
  spec.group_size = group_size;
  spec.tokens_per_rank = tokens_per_rank;
  spec.emb_width = shard_width * group_size;
  spec.logical_width = spec.emb_width;
  spec.num_unique = tokens_per_rank * group_size + 1;
  spec.dtype = core::DType::kFloat32;
  for (int rank = 0; rank < group_size; ++rank) {
    spec.devices.push_back(10 + rank);
    spec.token_blocks.push_back(rank);
  }
  return spec;
}

// The pipelines of a group, one for each of its processes (spec.processes; all in this one where it is empty), with the
// shards of all ranks.
struct Group {
  std::shared_ptr<comm::ThreadNetwork> network;
  std::vector<std::shared_ptr<Pipeline>> pipelines;
  std::shared_ptr<Pipeline> pipeline;  // the first one
  std::vector<std::unique_ptr<Shard>> shards;
  std::vector<RankCalls> ranks;
  ProcessMap map;

  Group(const ContextSpec& spec, std::int64_t rows, Executor& executor, unsigned seed = 0) : map(map_processes(spec)) {
    network = std::make_shared<comm::ThreadNetwork>(map.size());
    for (int process = 0; process < map.size(); ++process) {
      ContextSpec own = spec;
      own.process = map.names[static_cast<std::size_t>(process)];
      pipelines.push_back(std::make_shared<Pipeline>(own, spec.devices, executor, map_processes(own),
                                                     map.size() > 1 ? network->transport(process) : nullptr));
    }
    pipeline = pipelines.front();
    for (int rank = 0; rank < spec.group_size; ++rank) {
      shards.push_back(std::make_unique<Shard>(spec, rows));
      Pipeline& own = *pipelines[static_cast<std::size_t>(map.process_of(rank))];
      ranks.emplace_back(own, rank, *shards.back(), rows, seed);
    }
  }
};

}  // namespace async_emb::context
