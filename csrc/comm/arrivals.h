// The rendezvous of the ranks of one process: every rank reports that its part of a step is in place, and when the last
// one has, the work goes on, once. Nobody blocks, and nothing is packed or sent: the ranks share memory.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

namespace async_emb::comm {

// Independent sequences of steps. Steps of one channel complete in order.
enum class Channel : int { kLookup = 0, kUpdate = 1 };
inline constexpr int kChannels = 2;

class Arrivals {
 public:
  using Continuation = std::function<void()>;

  // `ranks`: those of this process, of a larger group perhaps.
  explicit Arrivals(std::vector<int> ranks);

  const std::vector<int>& ranks() const { return ranks_; }

  // `rank` has its part of `step` in place. Returns at once. The call that completes the group runs its `continuation`,
  // on its own thread. Thread-safe.
  void arrive(Channel channel, std::int64_t step, int rank, Continuation continuation);

  // Ranks that have not arrived at `step` yet, in the order of ranks(): the names for a timeout's message.
  std::vector<int> missing(Channel channel, std::int64_t step) const;

 private:
  std::size_t place(int rank) const;

  const std::vector<int> ranks_;
  mutable std::mutex mutex_;
  // Last step each rank has arrived at. A rank is at most one step ahead of its slowest peer: a step completes only
  // when all have arrived, and nobody starts the next one before.
  std::vector<std::int64_t> arrived_[kChannels];
  std::int64_t completed_[kChannels] = {};
};

}  // namespace async_emb::comm
