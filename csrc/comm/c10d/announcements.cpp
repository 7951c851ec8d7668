#include "comm/c10d/announcements.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace async_emb::comm {
namespace {

constexpr const char* kKey = "failure";
// For one operation, which otherwise takes less than a millisecond.
constexpr std::chrono::seconds kPatience{2};

}  // namespace

struct Announcements::State {
  explicit State(c10::intrusive_ptr<::c10d::Store> s) : store(std::move(s)) {}

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return closed || !tasks.empty(); });
      if (tasks.empty()) return;
      const auto task = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      try {
        task();
      } catch (const std::exception&) {
        // Nobody can be reached any more, and there is nobody to tell.
      }
      lock.lock();
      ++done;
      stuck = false;
      changed.notify_all();
    }
  }

  // Whether the task has run in time.
  bool call(std::function<void()> task) {
    std::unique_lock lock(mutex);
    if (stuck) return false;
    tasks.push_back(std::move(task));
    const std::int64_t number = ++called;
    changed.notify_all();
    if (changed.wait_for(lock, kPatience, [&] { return done >= number; })) return true;
    stuck = true;
    return false;
  }

  const c10::intrusive_ptr<::c10d::Store> store;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  std::int64_t called = 0;
  std::int64_t done = 0;
  bool stuck = false;
  bool closed = false;
  std::optional<std::string> found;
};

Announcements::Announcements(c10::intrusive_ptr<::c10d::Store> store)
    : state_(std::make_shared<State>(std::move(store))) {
  std::thread([state = state_] { state->run(); }).detach();
}

Announcements::~Announcements() {
  std::lock_guard lock(state_->mutex);
  state_->closed = true;
  state_->changed.notify_all();
}

void Announcements::announce(const std::string& failure) noexcept try {
  // The thread may outlive this object.
  state_->call([state = state_.get(), failure] { state->store->compareSet(kKey, std::string(), failure); });
} catch (const std::exception&) {
}

std::optional<std::string> Announcements::first() noexcept try {
  {
    std::lock_guard lock(state_->mutex);
    if (state_->found) return state_->found;
  }
  state_->call([state = state_.get()] {
    if (!state->store->check({kKey})) return;
    std::string text = state->store->get_to_str(kKey);
    std::lock_guard lock(state->mutex);
    state->found = std::move(text);
  });
  std::lock_guard lock(state_->mutex);
  return state_->found;
} catch (const std::exception&) {
  return std::nullopt;
}

}  // namespace async_emb::comm
