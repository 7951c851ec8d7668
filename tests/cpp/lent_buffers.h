// Completions that must come once, and buffers as XLA owns them: lent for as long as a lease lasts, and gone or
// rewritten right after.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "context/failure.h"
#include "context/round.h"
#include "context/spec.h"
#include "context/tensor_view.h"

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
  Answer() = default;
  Answer(const Answer&) = default;  // and no moves, after which an answer could not be asked
  Answer& operator=(const Answer&) = default;

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

  void lend() {
    ASAN_UNPOISON_MEMORY_REGION(memory_.get(), bytes_);
    lent_ = true;
  }

  // The buffer is the owner's again: rewriting it shows the thread sanitizer whoever still uses it, and poison shows
  // the address sanitizer whoever does so later.
  void rest() {
    if (!lent_) return;
    lent_ = false;
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
  bool lent_ = true;
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

}  // namespace async_emb::context
