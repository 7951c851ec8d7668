#include "context/watchdog.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "context/group_pipeline.h"

namespace async_emb::context {
namespace {

struct Watchdog {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::weak_ptr<GroupPipeline>> watched;
  bool started = false;

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      std::vector<std::shared_ptr<GroupPipeline>> alive;
      for (const auto& weak : watched) {
        if (auto pipeline = weak.lock()) alive.push_back(std::move(pipeline));
      }
      std::erase_if(watched, [](const auto& weak) { return weak.expired(); });
      if (alive.empty()) {
        changed.wait(lock);
        continue;
      }
      double shortest = 10;
      for (const auto& pipeline : alive) shortest = std::min(shortest, pipeline->spec().timeout_seconds);
      lock.unlock();
      for (const auto& pipeline : alive) pipeline->check_timeout(Clock::now());
      alive.clear();  // outside of the lock: the last reference may be ours
      lock.lock();
      const auto pause = std::chrono::duration<double>(std::clamp(shortest / 10, 0.01, 1.0));
      changed.wait_for(lock, pause);
    }
  }
};

Watchdog& watchdog() {
  static Watchdog* instance = new Watchdog;
  return *instance;
}

}  // namespace

void watch(const std::shared_ptr<GroupPipeline>& pipeline) {
  Watchdog& dog = watchdog();
  std::lock_guard lock(dog.mutex);
  dog.watched.push_back(pipeline);
  if (!dog.started) {
    dog.started = true;
    std::thread([&dog] { dog.run(); }).detach();
  }
  dog.changed.notify_all();
}

}  // namespace async_emb::context
