#include "comm/arrivals.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace async_emb::comm {

Arrivals::Arrivals(std::vector<int> ranks) : ranks_(std::move(ranks)) {
  if (ranks_.empty()) throw std::invalid_argument("a group needs at least one rank in this process");
  for (auto& steps : arrived_) steps.assign(ranks_.size(), 0);
}

std::size_t Arrivals::place(int rank) const {
  return static_cast<std::size_t>(std::find(ranks_.begin(), ranks_.end(), rank) - ranks_.begin());
}

void Arrivals::arrive(Channel channel, std::int64_t step, int rank, Continuation continuation) {
  const int c = static_cast<int>(channel);
  {
    std::lock_guard lock(mutex_);
    std::vector<std::int64_t>& arrived = arrived_[c];
    std::int64_t& mine = arrived.at(place(rank));
    if (step <= mine) {
      throw std::logic_error("rank " + std::to_string(rank) + " arrives at step " + std::to_string(step) +
                             " after it has arrived at step " + std::to_string(mine));
    }
    mine = step;
    const bool complete = std::all_of(arrived.begin(), arrived.end(), [&](std::int64_t s) { return s >= step; });
    if (!complete || completed_[c] >= step) return;
    completed_[c] = step;
  }
  continuation();
}

std::vector<int> Arrivals::missing(Channel channel, std::int64_t step) const {
  std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (arrived_[static_cast<int>(channel)][i] < step) ranks.push_back(ranks_[i]);
  }
  return ranks;
}

}  // namespace async_emb::comm
