// The communicator of a group whose ranks all live in this process. Nothing is packed or sent.
#pragma once

#include <mutex>
#include <vector>

#include "comm/communicator.h"

namespace async_emb::comm {

class InProcess final : public Communicator {
 public:
  explicit InProcess(int size);

  int size() const override { return static_cast<int>(ranks_.size()); }
  const std::vector<int>& local_ranks() const override { return ranks_; }
  bool shares_memory(int) const override { return true; }
  void arrive(Channel channel, std::int64_t step, int rank, Continuation continuation) override;
  std::vector<int> missing(Channel channel, std::int64_t step) const override;

 private:
  std::vector<int> ranks_;
  mutable std::mutex mutex_;
  // Last step each rank has arrived at. A rank is at most one step ahead of its slowest peer: a step completes only
  // when all have arrived, and nobody starts the next one before.
  std::vector<std::int64_t> arrived_[kChannels];
  std::int64_t completed_[kChannels] = {};
};

}  // namespace async_emb::comm
