// Ranks as threads, and buffers as XLA owns them: lent for as long as a lease lasts, and gone or rewritten right after.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/in_process.h"
#include "context/executor.h"
#include "context/pipeline.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) (static_cast<void>(address), static_cast<void>(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) (static_cast<void>(address), static_cast<void>(size))
#endif

namespace async_emb::context {

// What one completion was told. It must come exactly once, and never where the call threw.
class Answer {
 public:
  Completion completion() {
    return [state = state_](const Failure* failure) {
      std::lock_guard lock(state->mutex);
      EXPECT_FALSE(state->withdrawn) << "a completion was called after its call had thrown";
      EXPECT_EQ(++state->calls, 1) << "a completion was called more than once";
      if (failure != nullptr) state->failure = *failure;
      state->changed.notify_all();
    };
  }

  bool ready() const {
    std::lock_guard lock(state_->mutex);
    return state_->calls > 0;
  }

  std::optional<Failure> wait() const {
    std::unique_lock lock(state_->mutex);
    if (!state_->changed.wait_for(lock, std::chrono::seconds(60), [&] { return state_->calls > 0; })) {
      std::fprintf(stderr, "a completion was lost: nobody called it for 60 s\n");
      std::abort();
    }
    return state_->failure;
  }

  // As XLA does: whoever waited for a failed result gets the error.
  void wait_or_throw() const {
    if (const auto failure = wait()) throw Error(*failure);
  }

  void withdraw() {
    std::lock_guard lock(state_->mutex);
    EXPECT_EQ(state_->calls, 0) << "a call threw and its completion was called too";
    state_->withdrawn = true;
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    int calls = 0;
    bool withdrawn = false;
    std::optional<Failure> failure;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// Runs `call` with the answer's completion; where the call throws, nobody may answer any more.
template <typename Call>
void ask(Answer& answer, Call call) {
  try {
    call(answer.completion());
  } catch (...) {
    answer.withdraw();
    throw;
  }
}

// One array in an allocation of its own.
class Tensor {
 public:
  Tensor(DLDataType type, std::vector<std::int64_t> shape) : type_(type), shape_(std::move(shape)) {
    bytes_ = type.bits / 8;
    for (const std::int64_t extent : shape_) bytes_ *= static_cast<std::size_t>(extent);
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, bytes_) != 0) throw std::bad_alloc();
    memory_.reset(static_cast<char*>(memory));
    std::memset(memory, 0x5a, bytes_);
  }
  Tensor(DLDataType type, std::vector<std::int64_t> shape, const void* content) : Tensor(type, std::move(shape)) {
    std::memcpy(memory_.get(), content, bytes_);
  }

  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(memory_.get());
  }
  std::size_t bytes() const { return bytes_; }
  std::vector<char> content() const { return {as<char>(), as<char>() + bytes_}; }

  DLTensor view() {
    DLTensor tensor{};
    tensor.data = memory_.get();
    tensor.device = {kDLCPU, 0};
    tensor.ndim = static_cast<std::int32_t>(shape_.size());
    tensor.dtype = type_;
    tensor.shape = shape_.data();
    return tensor;
  }

  void lend() { ASAN_UNPOISON_MEMORY_REGION(memory_.get(), bytes_); }

  // The buffer is the owner's again: rewriting it shows the thread sanitizer whoever still uses it, and poison shows
  // the address sanitizer whoever does so later.
  void rest() {
    for (volatile char* p = memory_.get(); p != memory_.get() + bytes_; ++p) *p = *p;
    ASAN_POISON_MEMORY_REGION(memory_.get(), bytes_);
  }

  void release() { memory_.reset(); }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  DLDataType type_;
  std::vector<std::int64_t> shape_;
  std::size_t bytes_ = 0;
  std::unique_ptr<char, Free> memory_;
};

// A rank's part of a table, with the optimizer's state.
struct Shard {
  Tensor table;
  Tensor row_state;
  Tensor last_step;

  Shard(const ContextSpec& spec, std::int64_t rows)
      : table(dlpack_type(spec.dtype), {rows, spec.shard_width()}),
        row_state(kFloat32, {rows}),
        last_step(kInt32, {rows}) {
    std::memset(row_state.as<char>(), 0, row_state.bytes());
    std::memset(last_step.as<char>(), 0, last_step.bytes());
  }
  void lend() {
    for (Tensor* tensor : {&table, &row_state, &last_step}) tensor->lend();
  }
  void rest() {
    for (Tensor* tensor : {&table, &row_state, &last_step}) tensor->rest();
  }
};

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

// The calls of one rank, in the order in which a compiled step makes them. The table is threaded: it is lent again only
// when the last lease has ended.
class RankCalls {
 public:
  RankCalls(Pipeline& pipeline, int rank, Shard& shard, std::int64_t rows, unsigned seed = 0)
      : pipeline_(pipeline),
        rank_(rank),
        shard_(shard),
        rows_(rows),
        random_(seed * 1000 + static_cast<unsigned>(rank)) {}

  // From here on calls come after random pauses.
  void stagger() { staggers_ = true; }

  template <typename Id>
  float lookup_begin(const std::vector<Id>& ids) {
    pause();
    Tensor tensor(sizeof(Id) == 8 ? kInt64 : kInt32, {static_cast<std::int64_t>(ids.size())}, ids.data());
    return pipeline_.lookup_begin(rank_, tensor.view(), rows_);
  }

  void lookup_lease() {
    lend([&](Completion completion) { pipeline_.lookup_lease(rank_, shard_.table.view(), std::move(completion)); });
  }

  template <typename Id>
  float lookup_start(const std::vector<Id>& ids) {
    const float pin = lookup_begin(ids);
    lookup_lease();
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
    return lookup_done_later(pin, ids).wait();
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
    pause();
    lazy_ = rule.lazy;
    return pipeline_.update_begin(rank_, rule);
  }

  void update_lease() {
    lend([&](Completion completion) {
      const DLTensor last_step = shard_.last_step.view();
      pipeline_.update_lease(rank_, shard_.table.view(), shard_.row_state.view(), lazy_ ? &last_step : nullptr,
                             std::move(completion));
    });
  }

  float update_start(const UpdateRule& rule) {
    const float pin = update_begin(rule);
    update_lease();
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
  UpdateOutcome update_done() { return update_done_later().wait(); }

  // Waits until the table has come back, and says with what.
  std::optional<Failure> take_back() {
    if (!lease_) return std::nullopt;
    const Answer lease = *std::exchange(lease_, std::nullopt);
    auto failure = lease.wait();
    shard_.rest();
    return failure;
  }
  void settle() {
    if (const auto failure = take_back()) throw Error(*failure);
  }
  bool table_is_back() const { return !lease_ || lease_->ready(); }

 private:
  template <typename Call>
  void lend(Call call) {
    settle();
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
  bool staggers_ = false;
  bool lazy_ = false;
  std::optional<Answer> lease_;
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

// One pipeline with the shards of all its ranks.
struct Group {
  std::shared_ptr<Pipeline> pipeline;
  std::vector<std::unique_ptr<Shard>> shards;
  std::vector<RankCalls> ranks;

  Group(const ContextSpec& spec, std::int64_t rows, Executor& executor, unsigned seed = 0)
      : pipeline(std::make_shared<Pipeline>(spec, spec.devices, std::make_unique<comm::InProcess>(spec.group_size),
                                            executor)) {
    for (int rank = 0; rank < spec.group_size; ++rank) {
      shards.push_back(std::make_unique<Shard>(spec, rows));
      ranks.emplace_back(*pipeline, rank, *shards.back(), rows, seed);
    }
  }
};

}  // namespace async_emb::context
