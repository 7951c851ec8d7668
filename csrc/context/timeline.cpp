#include "context/timeline.h"

#include <chrono>
#include <mutex>
#include <utility>

namespace async_emb::context {
namespace {

std::mutex mutex;
std::vector<TimelineEvent> events;

}  // namespace

Timeline& Timeline::shared() {
  static Timeline timeline;
  return timeline;
}

void Timeline::start() {
  std::lock_guard lock(mutex);
  events.clear();
  recording_ = true;
}

std::vector<TimelineEvent> Timeline::stop() {
  std::lock_guard lock(mutex);
  recording_ = false;
  return std::exchange(events, {});
}

void Timeline::append(const char* name, const std::string& table, std::int64_t device, std::int64_t step) {
  std::lock_guard lock(mutex);
  if (!recording()) return;
  const auto now = std::chrono::steady_clock::now().time_since_epoch();  // with the lock, so that times follow the list
  events.push_back({name, table, device, step, std::chrono::duration_cast<std::chrono::nanoseconds>(now).count()});
}

}  // namespace async_emb::context
