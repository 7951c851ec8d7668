// Moving a group of ranks from one point of the pipeline to the next.
//
// The interface has two halves. `arrive` is the rendezvous: every rank of the group reports that its part of a step is
// in place, and when the last one has, the continuation runs, once in each process. What travels with it is the
// communicator's business: in one process nothing does, because `shares_memory` holds for every peer and the work reads
// shards and gradient rows where they lie; a process group sends its blocks between the last local arrival and the
// continuation, on a thread (or a stream) of its own. Either way nobody blocks.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace async_emb::comm {

// Independent sequences of steps. Steps of one channel complete in order.
enum class Channel : int { kLookup = 0, kUpdate = 1 };
inline constexpr int kChannels = 2;

class Communicator {
 public:
  using Continuation = std::function<void()>;

  virtual ~Communicator() = default;

  virtual int size() const = 0;
  // Ranks of this process, ascending.
  virtual const std::vector<int>& local_ranks() const = 0;
  // Whether work in this process may read the memory of `rank` where it lies.
  virtual bool shares_memory(int rank) const = 0;

  // Local `rank` has its part of `step` in place. Returns at once. The call that completes the group hands its
  // `continuation` on: it runs once, on that caller's thread or on the communicator's. Thread-safe.
  virtual void arrive(Channel channel, std::int64_t step, int rank, Continuation continuation) = 0;

  // Ranks that have not arrived at `step` yet, ascending: the names for a timeout's message.
  virtual std::vector<int> missing(Channel channel, std::int64_t step) const = 0;
};

}  // namespace async_emb::comm
