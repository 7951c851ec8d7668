// Work that a calling thread does together with the executor's workers, for calls that may not leave before it is done.
#pragma once

#include <atomic>
#include <memory>

#include "context/executor.h"

namespace async_emb::context {

// Runs body(0) .. body(count - 1), each once, on this thread and on as many workers as come in time, `helpers` at most.
// Returns when all have ended. Whoever is free takes the next job, this thread too: so it never waits for a worker that
// has not begun, and where all workers are busy it does everything by itself. Bodies do not throw.
template <typename Body>
void run_together(Executor& executor, int count, int helpers, const Body& body) {
  struct Jobs {
    const int count;
    const Body* const body;  // the caller's: only who has got a job may look at it
    std::atomic<int> next = 0;
    std::atomic<int> ended = 0;

    void work() {
      for (int job = next.fetch_add(1); job < count; job = next.fetch_add(1)) {
        (*body)(job);
        if (ended.fetch_add(1) + 1 == count) ended.notify_one();
      }
    }
  };
  const auto jobs = std::make_shared<Jobs>(count, &body);
  for (int i = 0; i < helpers; ++i) executor.submit([jobs] { jobs->work(); });
  jobs->work();
  for (int ended = jobs->ended.load(); ended < count; ended = jobs->ended.load()) jobs->ended.wait(ended);
}

}  // namespace async_emb::context
