// The runs of programs whose calls a context has seen: the most recent ones, which are all that can still be under way.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace async_emb::context {

class Runs {
 public:
  // More than the host can be ahead of the devices, and than the ranks can be apart.
  static constexpr std::size_t kRemembered = 64;

  // Called at every call of every rank: mostly the run is the one that was noted last.
  void note(std::int64_t run) {
    if (latest_.load(std::memory_order_relaxed) == run) return;
    std::lock_guard lock(mutex_);
    const auto end = runs_.begin() + size();
    if (std::find(runs_.begin(), end, run) == end) runs_[noted_++ % kRemembered] = run;
    latest_.store(run, std::memory_order_relaxed);
  }

  std::vector<std::int64_t> noted() const {
    std::lock_guard lock(mutex_);
    return {runs_.begin(), runs_.begin() + size()};
  }

 private:
  std::ptrdiff_t size() const { return static_cast<std::ptrdiff_t>(std::min(noted_, kRemembered)); }

  std::atomic<std::int64_t> latest_ = -1;
  mutable std::mutex mutex_;
  std::array<std::int64_t, kRemembered> runs_{};
  std::size_t noted_ = 0;
};

}  // namespace async_emb::context
