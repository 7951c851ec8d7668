// The threads of one group that may wait for other processes: one for the work with them, and one that listens whether
// somebody has given up, and tells them where this process does.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "comm/transport.h"

namespace async_emb::context {

class PeerThreads {
 public:
  // What comes before this process leaves without a failure, and when the connections end; both on the second thread,
  // perhaps after the PeerThreads have gone.
  struct Hooks {
    std::function<void()> before_leaving = [] {};
    std::function<void()> at_end = [] {};
  };

  PeerThreads(std::shared_ptr<comm::Transport> transport, double timeout_seconds, Hooks hooks);
  PeerThreads(std::shared_ptr<comm::Transport> transport, double timeout_seconds);
  ~PeerThreads();
  PeerThreads(const PeerThreads&) = delete;
  PeerThreads& operator=(const PeerThreads&) = delete;

  // How often one asks whether another process has given up.
  static std::chrono::duration<double> pause_of(double timeout_seconds);

  // Runs `task` on the communication thread, after those that were posted before. It must not throw.
  void post(std::function<void()> task);
  // The same for the first exchange of a start: not before the step that holds the thread has made its last one. So all
  // processes make their exchanges in the order of their starts, whenever a start comes.
  void post_start(std::function<void()> task);
  void hold();
  void release();
  // Lets the other processes know why, unless `why` is empty, and ends every exchange. Returns at once.
  void give_up(const std::string& why) noexcept;
  // Why another process has given up, if one has.
  std::optional<std::string> told() const;
  // The same after a moment's patience: whoever breaks a connection may still be saying why.
  std::optional<std::string> wait_until_told() const;

 private:
  struct State;
  const std::chrono::duration<double> pause_;
  std::shared_ptr<State> state_;  // shared with the threads
};

}  // namespace async_emb::context
