#include "comm/in_process.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

namespace async_emb::comm {

InProcess::InProcess(int size) {
  if (size < 1) throw std::invalid_argument("a group needs at least one rank, got " + std::to_string(size));
  ranks_.resize(size);
  std::iota(ranks_.begin(), ranks_.end(), 0);
  for (auto& steps : arrived_) steps.assign(size, 0);
}

void InProcess::arrive(Channel channel, std::int64_t step, int rank, Continuation continuation) {
  const int c = static_cast<int>(channel);
  {
    std::lock_guard lock(mutex_);
    std::vector<std::int64_t>& arrived = arrived_[c];
    if (step <= arrived[rank]) {
      throw std::logic_error("rank " + std::to_string(rank) + " arrives at step " + std::to_string(step) +
                             " after it has arrived at step " + std::to_string(arrived[rank]));
    }
    arrived[rank] = step;
    const bool complete = std::all_of(arrived.begin(), arrived.end(), [&](std::int64_t s) { return s >= step; });
    if (!complete || completed_[c] >= step) return;
    completed_[c] = step;
  }
  continuation();
}

std::vector<int> InProcess::missing(Channel channel, std::int64_t step) const {
  std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  for (int rank : ranks_) {
    if (arrived_[static_cast<int>(channel)][rank] < step) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace async_emb::comm
