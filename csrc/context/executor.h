// The threads of the package: an elastic pool that separates work from continuations.
//
// Work is ours, finite, and runs on at most `limit` threads at a time. A continuation belongs to somebody else:
// completing a promise of XLA's runs the rest of its program on the completing thread, which may compute for long or
// wait for another device. So continuations do not count against the limit, and one never waits for a thread that
// another holds: where no thread is idle, a new one is started. Threads that stay idle end.
#pragma once

#include <functional>
#include <memory>

namespace async_emb::context {

class Executor {
 public:
  using Task = std::function<void()>;

  // The process's pool; its limit is ASYNC_EMB_THREADS, or the cores this process may use.
  static Executor& shared();

  explicit Executor(int limit);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Runs `task` on a worker, in the floating-point mode that the kernels need. It must neither block nor throw.
  void submit(Task task);

  // Runs `continuation` on a thread of its own. From inside a task it starts when the task has returned, and the last
  // one reuses the task's thread, which saves a wake-up.
  void resume(Task continuation);

  int limit() const;
  // Threads alive now. For tests.
  int threads() const;

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with the threads
};

}  // namespace async_emb::context
