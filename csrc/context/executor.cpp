#include "context/executor.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu/float_mode.h"

namespace async_emb::context {
namespace {

constexpr auto kIdleLife = std::chrono::seconds(5);

int cores_of_this_process() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

int limit_from_environment() {
  if (const char* text = std::getenv("ASYNC_EMB_THREADS")) {
    const int value = std::atoi(text);
    if (value > 0) return value;
  }
  return cores_of_this_process();
}

// Continuations that a running task has asked for; they start when it has returned.
thread_local std::vector<Executor::Task>* deferred = nullptr;

}  // namespace

struct Executor::State {
  const int limit;
  std::mutex mutex;
  std::condition_variable wake;
  std::condition_variable ended;
  std::deque<Task> tasks;
  std::deque<Task> continuations;
  int working = 0;
  int idle = 0;
  int starting = 0;  // started, and has not looked for an item yet
  int alive = 0;
  bool stopping = false;

  explicit State(int limit) : limit(limit) {}

  // Items that a thread could take right now.
  int claimable() const {
    const int room = std::max(0, limit - working);
    return static_cast<int>(continuations.size()) + std::min(room, static_cast<int>(tasks.size()));
  }

  // Sees to it that every claimable item, but for `reserved` that the caller will take itself, finds a thread.
  void provide_threads(const std::shared_ptr<State>& self, int reserved) {
    const int wanted = claimable() - reserved;
    if (wanted <= 0) return;
    for (int i = 0; i < std::min(wanted, idle); ++i) wake.notify_one();
    for (int i = idle + starting; i < wanted; ++i) {
      try {
        std::thread([self] { self->run(self); }).detach();
      } catch (const std::system_error&) {
        if (alive == 0) throw;
        return;  // the system has no more threads to give; those that live take the items, one after the other
      }
      ++alive;
      ++starting;
    }
  }

  void run(const std::shared_ptr<State>& self) {
    std::vector<Task> asked;
    std::unique_lock lock(mutex);
    --starting;
    for (;;) {
      if (!continuations.empty()) {
        Task continuation = std::move(continuations.front());
        continuations.pop_front();
        provide_threads(self, 0);
        lock.unlock();
        continuation();
        continuation = nullptr;
        lock.lock();
      } else if (!tasks.empty() && working < limit) {
        Task task = std::move(tasks.front());
        tasks.pop_front();
        ++working;
        provide_threads(self, 0);
        lock.unlock();
        {
          cpu::ScopedFloatMode mode;
          deferred = &asked;
          task();
          deferred = nullptr;
        }
        task = nullptr;
        lock.lock();
        --working;
        for (Task& continuation : asked) continuations.push_back(std::move(continuation));
        asked.clear();
        provide_threads(self, 1);
      } else if (stopping) {
        break;
      } else {
        ++idle;
        const bool called = wake.wait_for(lock, kIdleLife, [&] { return stopping || claimable() > 0; });
        --idle;
        if (!called && alive > 1) break;
      }
    }
    --alive;
    ended.notify_all();
  }
};

Executor::Executor(int limit) : state_(std::make_shared<State>(std::max(1, limit))) {}

Executor::~Executor() {
  std::unique_lock lock(state_->mutex);
  state_->stopping = true;
  state_->wake.notify_all();
  state_->ended.wait(lock, [&] { return state_->alive == 0; });
}

void Executor::submit(Task task) {
  std::lock_guard lock(state_->mutex);
  state_->tasks.push_back(std::move(task));
  state_->provide_threads(state_, 0);
}

void Executor::resume(Task continuation) {
  if (deferred != nullptr) {
    deferred->push_back(std::move(continuation));
    return;
  }
  std::lock_guard lock(state_->mutex);
  state_->continuations.push_back(std::move(continuation));
  state_->provide_threads(state_, 0);
}

int Executor::limit() const { return state_->limit; }

int Executor::threads() const {
  std::lock_guard lock(state_->mutex);
  return state_->alive;
}

Executor& Executor::shared() {
  // Never destroyed: XLA's threads may still call in while the process ends.
  static Executor* pool = new Executor(limit_from_environment());
  return *pool;
}

}  // namespace async_emb::context
