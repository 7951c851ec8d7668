// Whether the other processes of a group live, and how far everybody's GPU has come: what no stream can tell.
//
// An exchange between GPUs that waits for a process which has died waits for ever, and nobody is told. So the hosts
// exchange a few numbers in regular beats, on a thread and a transport of their own. A broken connection or a missing
// beat names the process; an exchange that is not over in time names those whose GPU has not got there.
//
// Whoever leaves says so in its beats, and all stop at the same one: when the GPUs of all have finished what was put on
// them. Only then may connections close.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "comm/arrivals.h"
#include "comm/transport.h"

namespace async_emb::context {

class Pulse {
 public:
  enum class Mark { kReady, kFinished };
  // Whether this GPU has come to a mark of the last round of a channel that was put on it. On the pulse's thread.
  using Reached = std::function<bool(comm::Channel, Mark)>;

  Pulse(std::shared_ptr<comm::Transport> transport, double timeout_seconds, Reached reached);
  ~Pulse();
  Pulse(const Pulse&) = delete;
  Pulse& operator=(const Pulse&) = delete;

  // A round of `step` is on the streams, its marks recorded.
  void put(comm::Channel channel, std::int64_t step);

  struct Fault {
    std::optional<comm::TransportError> error = {};  // of the hosts' exchange; otherwise a GPU is late
    comm::Channel channel = comm::Channel::kLookup;
    std::int64_t step = 0;
    std::vector<int> late = {};  // processes whose GPU has not come to the exchange; empty where all have
  };
  std::optional<Fault> fault() const;

  // Says that this process leaves, and returns when all have stopped or the timeout has passed.
  void leave();
  // From any thread, any number of times.
  void end() noexcept;
  // The same, and returns when nothing asks `reached` any more. For one thread.
  void stop() noexcept;

 private:
  struct Count {
    std::int64_t put = 0;
    std::int64_t ready = 0;
    std::int64_t finished = 0;
  };
  // Sent as it lies in memory.
  struct Beat {
    std::array<Count, comm::kChannels> counts{};
    std::int64_t leaving = 0;
  };
  struct Progress {
    std::int64_t step = 0;
    std::chrono::steady_clock::time_point since{};  // that nothing has come of it
  };

  void run();
  Beat look();
  bool is_over(const std::vector<Beat>& beats) const;
  void look_for_late(const std::vector<Beat>& beats);

  const std::shared_ptr<comm::Transport> transport_;
  const double timeout_seconds_;
  const std::chrono::duration<double> pause_;
  const Reached reached_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Beat mine_;
  std::array<Progress, comm::kChannels> progress_{};
  std::optional<Fault> fault_;
  bool ended_ = false;
  bool stopped_ = false;  // the thread makes no more beats
  std::thread thread_;
};

}  // namespace async_emb::context
