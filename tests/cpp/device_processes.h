// Groups on emulated GPUs whose ranks lie in several processes.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "context/process_map.h"
#include "context/watchdog.h"
#include "device_network.h"
#include "device_setting.h"
#include "several_processes.h"
#include "thread_network.h"

namespace async_emb::context {

// One pipeline for each process, watched as an open context is. A GPU for each rank.
struct DeviceProcesses {
  ProcessMap map;
  std::shared_ptr<comm::ThreadNetwork> notices, pulses;
  std::shared_ptr<comm::DeviceNetwork> network;
  std::vector<std::unique_ptr<cuda::EmulatedDevice>> gpus;
  std::vector<std::unique_ptr<Shard>> shards;
  std::vector<std::shared_ptr<DevicePipeline>> pipelines;  // by process
  std::vector<std::unique_ptr<DeviceRankCalls>> ranks;

  DeviceProcesses(const ContextSpec& spec, std::int64_t rows) : map(map_processes(spec)) {
    notices = std::make_shared<comm::ThreadNetwork>(map.size());
    pulses = std::make_shared<comm::ThreadNetwork>(map.size());
    network = std::make_shared<comm::DeviceNetwork>(map.size());
    for (int rank = 0; rank < spec.group_size; ++rank) {
      gpus.push_back(std::make_unique<cuda::EmulatedDevice>(map.process_of(rank)));
      shards.push_back(std::make_unique<Shard>(spec, rows));
    }
    for (int process = 0; process < map.size(); ++process) {
      ContextSpec own = spec;
      own.process = map.names[static_cast<std::size_t>(process)];
      std::vector<cuda::Device*> of_rank(static_cast<std::size_t>(spec.group_size), nullptr);
      for (const int rank : map.ranks[static_cast<std::size_t>(process)]) {
        of_rank[static_cast<std::size_t>(rank)] = gpus[static_cast<std::size_t>(rank)].get();
      }
      pipelines.push_back(std::make_shared<DevicePipeline>(
          own, spec.devices, of_rank, map_processes(own),
          DeviceLinks{notices->transport(process), pulses->transport(process), network->transport(process)}));
      watch(pipelines.back());
    }
    for (int rank = 0; rank < spec.group_size; ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      ranks.push_back(std::make_unique<DeviceRankCalls>(*pipelines[static_cast<std::size_t>(map.process_of(rank))],
                                                        *gpus[r], rank, *shards[r]));
    }
  }

  // All leave together, as where every process closes its context. A thread of a pipeline's, or the watchdog, may be
  // the last to let go of it.
  ~DeviceProcesses() {
    for (auto& rank : ranks) rank.reset();
    std::vector<std::thread> closing;
    for (auto& pipeline : pipelines) closing.emplace_back([own = std::move(pipeline)]() mutable { own.reset(); });
    for (std::thread& thread : closing) thread.join();
    for (const auto& gpu : gpus) {
      while (gpu->objects() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  DevicePipeline& pipeline_of(int rank) { return *pipelines[static_cast<std::size_t>(map.process_of(rank))]; }

  // The process ends: its hosts' connections break, and its GPU sends nothing any more.
  void kill(int process) {
    network->silence(process);
    notices->kill(process);
    pulses->kill(process);
  }
};

struct DeviceProcessesSetting : SettingOn<DeviceProcesses> {
  explicit DeviceProcessesSetting(const ContextSpec& spec, unsigned seed = 1, int number_of_batches = 22)
      : SettingOn(spec, seed, number_of_batches) {}
};

}  // namespace async_emb::context
