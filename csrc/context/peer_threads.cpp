#include "context/peer_threads.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace async_emb::context {

// What the two threads of this side need. They hold it, so it outlives the PeerThreads.
struct PeerThreads::State {
  State(std::shared_ptr<comm::Transport> t, Hooks h) : transport(std::move(t)), hooks(std::move(h)) {}

  const std::shared_ptr<comm::Transport> transport;
  const Hooks hooks;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  std::deque<std::function<void()>> starts;
  bool held = false;
  bool gave_up = false;
  bool stops = false;
  std::optional<std::string> farewell;  // to be announced, unless it is empty, before everything ends
  std::optional<std::string> told;

  void work() {
    std::unique_lock lock(mutex);
    for (;;) {
      const auto next = [&] { return !tasks.empty() ? &tasks : !held && !starts.empty() ? &starts : nullptr; };
      changed.wait(lock, [&] { return stops || next() != nullptr; });
      auto* const queue = next();
      if (queue == nullptr) return;
      std::function<void()> task = std::move(queue->front());
      queue->pop_front();
      lock.unlock();
      task();
      task = nullptr;  // it may hold the last reference to the pipeline
      lock.lock();
    }
  }

  void end() {
    transport->end();
    hooks.at_end();
  }

  // Apart from the work, which may be waiting for a process that will not come.
  void listen(std::chrono::duration<double> pause) {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait_for(lock, pause, [&] { return stops || farewell; });
      if (farewell) {
        const std::string why = *std::exchange(farewell, std::nullopt);
        lock.unlock();
        if (why.empty()) {
          hooks.before_leaving();
        } else {
          transport->announce(why);
        }
        end();  // and no earlier: its connections close, and the others must know why
        lock.lock();
      } else if (stops) {
        lock.unlock();
        end();
        return;
      } else if (!told) {
        lock.unlock();
        std::optional<std::string> heard = transport->announced();
        lock.lock();
        told = std::move(heard);
        if (told) changed.notify_all();
      }
    }
  }
};

PeerThreads::PeerThreads(std::shared_ptr<comm::Transport> transport, double timeout_seconds, Hooks hooks)
    : pause_(pause_of(timeout_seconds)), state_(std::make_shared<State>(std::move(transport), std::move(hooks))) {
  std::thread([state = state_] { state->work(); }).detach();
  std::thread([state = state_, pause = pause_] { state->listen(pause); }).detach();
}

PeerThreads::PeerThreads(std::shared_ptr<comm::Transport> transport, double timeout_seconds)
    : PeerThreads(std::move(transport), timeout_seconds, Hooks()) {}

std::chrono::duration<double> PeerThreads::pause_of(double timeout_seconds) {
  return std::chrono::duration<double>(std::clamp(timeout_seconds / 20, 0.01, 1.0));
}

PeerThreads::~PeerThreads() {
  {
    std::lock_guard lock(state_->mutex);
    state_->stops = true;
  }
  state_->changed.notify_all();
}

void PeerThreads::post(std::function<void()> task) {
  {
    std::lock_guard lock(state_->mutex);
    state_->tasks.push_back(std::move(task));
  }
  state_->changed.notify_all();
}

void PeerThreads::post_start(std::function<void()> task) {
  {
    std::lock_guard lock(state_->mutex);
    state_->starts.push_back(std::move(task));
  }
  state_->changed.notify_all();
}

void PeerThreads::hold() {
  std::lock_guard lock(state_->mutex);
  state_->held = !state_->gave_up;
}

void PeerThreads::release() {
  {
    std::lock_guard lock(state_->mutex);
    state_->held = false;
  }
  state_->changed.notify_all();
}

void PeerThreads::give_up(const std::string& why) noexcept {
  {
    std::lock_guard lock(state_->mutex);
    if (!state_->farewell) state_->farewell = why;
    state_->gave_up = true;
    state_->held = false;  // starts that wait have to let go of the pipeline
  }
  state_->changed.notify_all();
}

std::optional<std::string> PeerThreads::told() const {
  std::lock_guard lock(state_->mutex);
  return state_->told;
}

std::optional<std::string> PeerThreads::wait_until_told() const {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait_for(lock, 2 * pause_, [&] { return state_->told || state_->farewell; });
  return state_->told;
}

}  // namespace async_emb::context
