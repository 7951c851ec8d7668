// Every open context of the process, by id. Contexts are found by (context id, device); nothing else owns one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "context/device_pipeline.h"
#include "context/pipeline.h"
#include "context/spec.h"

namespace async_emb::context {

// What leads each group of the mesh to its other processes, in the order of spec.devices: null where all its ranks are
// in this process. Empty where that holds for every group.
using Transports = std::vector<std::shared_ptr<comm::Transport>>;
// The same for groups on GPUs, whose links hold a transport between hosts too.
using GroupLinks = std::vector<DeviceLinks>;

// One table's pipelines, one for each group of the mesh that has a rank in this process.
class Context {
 public:
  Context(const ContextSpec& spec, Executor& executor, const Transports& transports, const GroupLinks& links);

  const ContextSpec& spec() const { return groups_.front()->spec(); }
  const std::vector<std::shared_ptr<GroupPipeline>>& groups() const { return groups_; }
  // The pipeline of spec.devices[device]; null where its group has no rank here.
  const std::shared_ptr<GroupPipeline>& group_of(std::size_t device) const {
    return all_[device / static_cast<std::size_t>(spec().group_size)];
  }

 private:
  std::shared_ptr<GroupPipeline> make_group(const ContextSpec& spec, Executor& executor, std::size_t first,
                                            const Transports& transports, const GroupLinks& links) const;

  std::vector<std::shared_ptr<GroupPipeline>> all_;  // by group of the mesh
  std::vector<std::shared_ptr<GroupPipeline>> groups_;
};

// What a call needs: its pipeline, one of the two, and its rank there.
struct Member {
  std::shared_ptr<Pipeline> pipeline;
  std::shared_ptr<DevicePipeline> device_pipeline;
  int rank = 0;
};

// Where contexts on GPUs get them from, by ordinal. A build with CUDA names its own source; without one such contexts
// are refused.
using GpuSource = std::function<cuda::Device&(int ordinal)>;
void set_gpu_source(GpuSource source);

// Opens a context, or does nothing where the same one is open. A different key under the same id is refused.
void open_context(const ContextSpec& spec, const Transports& transports = {}, const GroupLinks& links = {});
bool is_open(std::int64_t id);

// Throws Error(kUnknownContext) that says whether it was closed or never opened.
std::shared_ptr<Context> find_context(std::int64_t id);

// The member for a call of one run of a program. Where a program fails on one rank, its calls on other ranks may still
// come when the context was closed and opened again: calls of a run that the closed context has seen are refused.
//
// `device` is XLA's ordinal: a device id on CPU, the GPU's number in this process on CUDA.
Member find_member(std::int64_t id, std::int64_t device, std::int64_t run);

// Ends every wait with `reason`; the context stays known and refuses every call until it is closed.
void abort_context(std::int64_t id, const std::string& reason);
// One rank of this process will not come any more, or is back: see GroupPipeline::set_absent. `device` as in the spec.
void set_absent(std::int64_t id, std::int64_t device, const std::string& why);
// Lets work that runs end, answers whoever still waits with an error, and forgets the context. Closing twice is fine.
void close_context(std::int64_t id);
std::vector<std::int64_t> open_contexts();

}  // namespace async_emb::context
