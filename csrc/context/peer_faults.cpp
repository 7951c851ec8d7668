#include "context/peer_faults.h"

#include <algorithm>
#include <vector>

namespace async_emb::context {

Failure failure_of(const comm::TransportError& error, const char* call, std::int64_t step, const CallChecks& check,
                   const ProcessMap& map, const PeerThreads& threads) {
  std::vector<int> ranks;
  for (const int peer : error.peers()) {
    const std::vector<int>& theirs = map.ranks[static_cast<std::size_t>(peer)];
    ranks.insert(ranks.end(), theirs.begin(), theirs.end());
  }
  std::sort(ranks.begin(), ranks.end());
  switch (error.kind()) {
    case comm::TransportError::Kind::kTimeout:
      // Some of several may only wait for another one, which their own exchange says better.
      if (error.peers().size() > 1) {
        if (const auto told = threads.wait_until_told()) return {FailureKind::kPeer, *told};
      }
      return {FailureKind::kTimeout, check.timed_out(call, step, ranks)};
    case comm::TransportError::Kind::kLost:
      // Who gives up says so before it closes its connections.
      if (const auto told = threads.wait_until_told()) return {FailureKind::kPeer, *told};
      return {FailureKind::kPeer, check.lost(call, step, ranks, error.what())};
    case comm::TransportError::Kind::kEnded:
      break;
  }
  return {FailureKind::kAborted, check.of_step(call, step) + " was ended"};
}

}  // namespace async_emb::context
