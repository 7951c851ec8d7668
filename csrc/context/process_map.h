// Which ranks of a group live in which process.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "context/spec.h"

namespace async_emb::context {

// Processes are numbered by their place among those of the group, in the order of their first ranks.
struct ProcessMap {
  std::vector<std::vector<int>> ranks;  // of each process, ascending
  std::vector<int> names;               // the number that each process has in the whole program
  int self = 0;

  const std::vector<int>& local() const { return ranks[static_cast<std::size_t>(self)]; }
  int size() const { return static_cast<int>(ranks.size()); }
  int process_of(int rank) const {
    for (int process = 0; process < size(); ++process) {
      const auto& mine = ranks[static_cast<std::size_t>(process)];
      if (std::find(mine.begin(), mine.end(), rank) != mine.end()) return process;
    }
    return -1;
  }
};

// The group whose devices are spec.devices[first], ... . `self` is -1 where no rank of it is in this process.
inline ProcessMap map_processes(const ContextSpec& spec, std::size_t first = 0) {
  ProcessMap map;
  map.self = -1;
  for (int rank = 0; rank < spec.group_size; ++rank) {
    const std::size_t device = first + static_cast<std::size_t>(rank);
    const int name = spec.processes.empty() ? spec.process : spec.processes[device];
    const auto found = std::find(map.names.begin(), map.names.end(), name);
    const auto place = static_cast<std::size_t>(found - map.names.begin());
    if (found == map.names.end()) {
      if (name == spec.process) map.self = map.size();
      map.names.push_back(name);
      map.ranks.emplace_back();
    }
    map.ranks[place].push_back(rank);
  }
  return map;
}

}  // namespace async_emb::context
