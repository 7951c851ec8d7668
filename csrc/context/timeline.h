// The order of events, for tests and for people who want to see the overlap. Off unless asked for; one process-wide
// list.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace async_emb::context {

struct TimelineEvent {
  std::string name;   // "lookup_begin", "update_ready", or a label of the user's
  std::string table;  // the context's name, empty for a label
  std::int64_t device = 0;
  std::int64_t step = 0;
  std::int64_t nanoseconds = 0;  // steady clock
};

class Timeline {
 public:
  static Timeline& shared();

  void start();                       // clears and records from now on
  std::vector<TimelineEvent> stop();  // events in the order in which they happened

  bool recording() const { return recording_.load(std::memory_order_relaxed); }
  void record(const char* name, const std::string& table, std::int64_t device, std::int64_t step) {
    if (recording()) append(name, table, device, step);
  }

 private:
  void append(const char* name, const std::string& table, std::int64_t device, std::int64_t step);

  std::atomic<bool> recording_{false};
};

}  // namespace async_emb::context
