#include "context/registry.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "context/runs.h"
#include "context/watchdog.h"

namespace async_emb::context {
namespace {

struct Entry {
  std::shared_ptr<Context> context;
  std::unordered_map<std::int64_t, Member> members;  // by device
  std::unique_ptr<Runs> runs = std::make_unique<Runs>();
  std::vector<std::int64_t> earlier_runs;  // of the same context before it was closed
};

struct Closed {
  std::string name;
  std::vector<std::int64_t> runs;
};

struct Registry {
  // One opening at a time. Never held by a call of a step: opening on a GPU may wait for it, and what it waits for may
  // need a handler to go on.
  std::mutex opening;
  std::shared_mutex mutex;
  std::unordered_map<std::int64_t, Entry> open;
  std::unordered_map<std::int64_t, Closed> closed;
  GpuSource gpus;
};

Registry& registry() {
  static Registry* instance = new Registry;  // XLA's threads may outlive static destructors
  return *instance;
}

// With the registry's lock held.
Entry& entry_of(std::int64_t id) {
  Registry& all = registry();
  const auto found = all.open.find(id);
  if (found != all.open.end()) return found->second;
  const auto closed = all.closed.find(id);
  if (closed != all.closed.end()) {
    throw Error(FailureKind::kUnknownContext,
                "async_emb context '" + closed->second.name +
                    "' is closed: open it again with open_context(handle) before the step");
  }
  throw Error(FailureKind::kUnknownContext,
              "async_emb context " + std::to_string(id) +
                  " is not open in this process: call open_context(handle) before the step");
}

}  // namespace

void set_gpu_source(GpuSource source) {
  std::unique_lock lock(registry().mutex);
  registry().gpus = std::move(source);
}

std::shared_ptr<GroupPipeline> Context::make_group(const ContextSpec& spec, Executor& executor, std::size_t first,
                                                   const Transports& transports, const GroupLinks& links) const {
  const std::size_t size = static_cast<std::size_t>(spec.group_size);
  std::vector<std::int64_t> devices(spec.devices.begin() + first, spec.devices.begin() + first + size);
  ProcessMap map = map_processes(spec, first);
  if (map.self < 0) return nullptr;
  const std::size_t group = first / size;
  if (spec.gpus.empty()) {
    std::shared_ptr<comm::Transport> transport = group < transports.size() ? transports[group] : nullptr;
    if (map.size() > 1 && !transport) {
      throw Error(FailureKind::kInvalidArgument, "async_emb context '" + spec.name + "' spans " +
                                                     std::to_string(map.size()) +
                                                     " processes, but no transport leads to the others");
    }
    return std::make_shared<Pipeline>(spec, std::move(devices), executor, std::move(map), std::move(transport));
  }
  GpuSource source;
  {
    std::shared_lock lock(registry().mutex);
    source = registry().gpus;
  }
  if (!source) {
    throw Error(FailureKind::kInvalidArgument,
                "async_emb context '" + spec.name + "' is on GPUs, but the native module was built without CUDA");
  }
  std::vector<cuda::Device*> gpus(size, nullptr);
  for (const int rank : map.local()) {
    const auto r = static_cast<std::size_t>(rank);
    gpus[r] = &source(spec.gpus[first + r]);
  }
  if (map.size() == 1) return std::make_shared<DevicePipeline>(spec, std::move(devices), std::move(gpus));
  DeviceLinks own = group < links.size() ? links[group] : DeviceLinks();
  if (!own.notices || !own.pulse || !own.bytes) {
    throw Error(FailureKind::kInvalidArgument, "async_emb context '" + spec.name + "' spans " +
                                                   std::to_string(map.size()) +
                                                   " processes with GPUs, but no transport leads to the others");
  }
  return std::make_shared<DevicePipeline>(spec, std::move(devices), std::move(gpus), std::move(map), std::move(own));
}

Context::Context(const ContextSpec& spec, Executor& executor, const Transports& transports, const GroupLinks& links) {
  for (std::size_t first = 0; first < spec.devices.size(); first += static_cast<std::size_t>(spec.group_size)) {
    all_.push_back(make_group(spec, executor, first, transports, links));
    if (all_.back()) groups_.push_back(all_.back());
  }
  if (groups_.empty()) {
    throw Error(FailureKind::kInvalidArgument,
                "async_emb context '" + spec.name + "' has no device in process " + std::to_string(spec.process));
  }
}

void open_context(const ContextSpec& spec, const Transports& transports, const GroupLinks& links) {
  Registry& all = registry();
  std::lock_guard opening(all.opening);
  {
    std::shared_lock lock(all.mutex);
    const auto found = all.open.find(spec.id);
    if (found != all.open.end()) {
      const ContextSpec& other = found->second.context->spec();
      if (other.key == spec.key) return;
      throw Error(FailureKind::kInvalidArgument, "async_emb context id " + std::to_string(spec.id) + " of '" +
                                                     spec.name + "' is taken by another context, '" + other.name +
                                                     "': give one of the tables another name. Keys: " + spec.key +
                                                     " and " + other.key);
    }
  }
  if (spec.devices.empty() || spec.devices.size() % spec.group_size != 0) {
    throw Error(FailureKind::kInvalidArgument, "async_emb context '" + spec.name + "' has " +
                                                   std::to_string(spec.devices.size()) + " devices for groups of " +
                                                   std::to_string(spec.group_size));
  }
  Entry entry;
  entry.context = std::make_shared<Context>(spec, Executor::shared(), transports, links);
  for (std::size_t i = 0; i < spec.devices.size(); ++i) {
    if (!spec.processes.empty() && spec.processes[i] != spec.process) continue;
    const std::shared_ptr<GroupPipeline>& group = entry.context->group_of(i);
    entry.members[spec.gpus.empty() ? spec.devices[i] : spec.gpus[i]] = {
        std::dynamic_pointer_cast<Pipeline>(group), std::dynamic_pointer_cast<DevicePipeline>(group),
        static_cast<int>(i % spec.group_size)};
  }
  for (const auto& group : entry.context->groups()) watch(group);
  std::unique_lock lock(all.mutex);
  if (auto closed = all.closed.extract(spec.id)) entry.earlier_runs = std::move(closed.mapped().runs);
  all.open.emplace(spec.id, std::move(entry));
}

bool is_open(std::int64_t id) {
  Registry& all = registry();
  std::shared_lock lock(all.mutex);
  return all.open.contains(id);
}

std::shared_ptr<Context> find_context(std::int64_t id) {
  std::shared_lock lock(registry().mutex);
  return entry_of(id).context;
}

Member find_member(std::int64_t id, std::int64_t device, std::int64_t run) {
  std::shared_lock lock(registry().mutex);
  const Entry& entry = entry_of(id);
  if (std::find(entry.earlier_runs.begin(), entry.earlier_runs.end(), run) != entry.earlier_runs.end()) {
    throw Error(FailureKind::kUnknownContext, "async_emb context '" + entry.context->spec().name +
                                                  "' was closed while this step ran, and opened again since: finish "
                                                  "the steps before close");
  }
  entry.runs->note(run);
  const auto found = entry.members.find(device);
  if (found != entry.members.end()) return found->second;
  throw Error(FailureKind::kInvalidArgument, "async_emb context '" + entry.context->spec().name +
                                                 "' has no rank on device " + std::to_string(device) +
                                                 ": run the step on the mesh that the handle was made for");
}

void abort_context(std::int64_t id, const std::string& reason) {
  const std::shared_ptr<Context> context = find_context(id);
  for (const auto& group : context->groups()) {
    group->fail({FailureKind::kAborted, "async_emb context '" + context->spec().name + "' was aborted: " + reason});
  }
}

void set_absent(std::int64_t id, std::int64_t device, const std::string& why) {
  const std::shared_ptr<Context> context = find_context(id);
  const ContextSpec& spec = context->spec();
  const auto place = std::find(spec.devices.begin(), spec.devices.end(), device) - spec.devices.begin();
  const auto& group = context->group_of(static_cast<std::size_t>(place));
  if (group) group->set_absent(static_cast<int>(place % spec.group_size), why);
}

void close_context(std::int64_t id) {
  Registry& all = registry();
  std::shared_ptr<Context> context;
  {
    std::unique_lock lock(all.mutex);
    const auto found = all.open.find(id);
    if (found == all.open.end()) return;
    context = found->second.context;
    std::vector<std::int64_t> runs = found->second.runs->noted();
    runs.insert(runs.end(), found->second.earlier_runs.begin(), found->second.earlier_runs.end());
    if (runs.size() > Runs::kRemembered) runs.resize(Runs::kRemembered);  // those of earlier openings go first
    all.closed[id] = {context->spec().name, std::move(runs)};
    all.open.erase(found);
  }
  for (const auto& group : context->groups()) {
    group->drain();
    group->fail(
        {FailureKind::kUnknownContext, "async_emb context '" + context->spec().name +
                                           "' was closed while a call waited: finish the steps before close, and "
                                           "open it again with open_context(handle)"});
    group->drain();
  }
}

std::vector<std::int64_t> open_contexts() {
  Registry& all = registry();
  std::shared_lock lock(all.mutex);
  std::vector<std::int64_t> ids;
  for (const auto& [id, entry] : all.open) ids.push_back(id);
  return ids;
}

}  // namespace async_emb::context
