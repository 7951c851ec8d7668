// The Python module: opens and closes contexts, reads their counters, and hands out the FFI handlers. No call here
// waits for a step with the Python lock held.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "context/executor.h"
#include "context/registry.h"
#include "context/timeline.h"
#include "cpu/kernels.h"
#include "faces/device_calls.h"
#include "faces/ffi_handlers.h"
#include "faces/host_calls.h"
#include "faces/loans.h"
#include "faces/transports.h"
#include "xla/ffi/api/c_api.h"

#if !defined(ASYNC_EMB_TORCH_VERSION) || !defined(ASYNC_EMB_JAXLIB_VERSION)
#error "the build defines the versions that the module is built against"
#endif

namespace py = pybind11;

namespace async_emb::faces {
namespace {

py::dict build_info() {
  py::dict info;
  info["torch"] = ASYNC_EMB_TORCH_VERSION;
  info["jaxlib"] = ASYNC_EMB_JAXLIB_VERSION;
  info["ffi_api"] = std::to_string(XLA_FFI_API_MAJOR) + "." + std::to_string(XLA_FFI_API_MINOR);
  info["compiler"] = __VERSION__;
#if defined(ASYNC_EMB_WITH_CUDA)
  info["cuda"] = ASYNC_EMB_CUDA_VERSION;
#elif defined(ASYNC_EMB_CUDA_REASON)
  info["cuda_reason"] = ASYNC_EMB_CUDA_REASON;
#endif
  return info;
}

core::DType dtype_of(const std::string& name) {
  for (core::DType dtype : {core::DType::kFloat32, core::DType::kBFloat16, core::DType::kFloat16}) {
    if (name == core::name_of(dtype)) return dtype;
  }
  throw py::value_error("dtype '" + name + "' is not one of float32, bfloat16, float16");
}

core::IdPolicy policy_of(const std::string& name) {
  if (name == "error") return core::IdPolicy::kError;
  if (name == "drop") return core::IdPolicy::kDrop;
  if (name == "clamp") return core::IdPolicy::kClamp;
  throw py::value_error("id_policy '" + name + "' is not one of error, drop, clamp");
}

void open(const py::dict& fields) {
  context::ContextSpec spec;
  spec.id = fields["context_id"].cast<std::int64_t>();
  spec.key = fields["key"].cast<std::string>();
  spec.name = fields["name"].cast<std::string>();
  spec.group_size = fields["group_size"].cast<int>();
  spec.devices = fields["devices"].cast<std::vector<std::int64_t>>();
  spec.gpus = fields["gpus"].cast<std::vector<int>>();
  spec.processes = fields["processes"].cast<std::vector<int>>();
  spec.process = fields["process"].cast<int>();
  spec.token_blocks = fields["token_blocks"].cast<std::vector<int>>();
  spec.tokens_per_rank = fields["tokens_per_rank"].cast<std::int64_t>();
  spec.emb_width = fields["emb_width"].cast<std::int64_t>();
  spec.logical_width = fields["logical_width"].cast<std::int64_t>();
  spec.num_unique = fields["num_unique"].cast<std::int64_t>();
  spec.dtype = dtype_of(fields["dtype"].cast<std::string>());
  spec.id_policy = policy_of(fields["id_policy"].cast<std::string>());
  spec.has_padding_id = !fields["padding_id"].is_none();
  if (spec.has_padding_id) spec.padding_id = fields["padding_id"].cast<std::int64_t>();
  spec.lookup_only = fields["lookup_only"].cast<bool>();
  spec.timeout_seconds = fields["timeout_seconds"].cast<double>();
  const auto transports = fields["transports"].cast<context::Transports>();
  // Of groups on GPUs that span processes, and of no others.
  context::GroupLinks links;
  for (const py::handle link : fields.contains("device_links") ? py::object(fields["device_links"]) : py::list()) {
    context::DeviceLinks& own = links.emplace_back();
    if (link.is_none()) continue;
    const auto three = link.cast<py::tuple>();
    own.notices = three[0].cast<std::shared_ptr<comm::Transport>>();
    own.pulse = three[1].cast<std::shared_ptr<comm::Transport>>();
    own.bytes = three[2].cast<std::shared_ptr<comm::DeviceTransport>>();
  }
  py::gil_scoped_release unlocked;
#if defined(ASYNC_EMB_WITH_CUDA)
  context::set_gpu_source(cuda::device);
#endif
  context::open_context(spec, transports, links);
}

py::dict stats(std::int64_t id) {
  const auto context = context::find_context(id);
  py::dict result;
  const auto add = [&](const char* name, std::int64_t value) {
    const std::int64_t before = result.contains(name) ? result[name].cast<std::int64_t>() : 0;
    result[name] = before + value;
  };
  for (const auto& group : context->groups()) {
    const context::Stats s = group->stats();
    add("lookup_begin_calls", s.lookup_begin_calls);
    add("lookup_lease_calls", s.lookup_lease_calls);
    add("lookup_done_calls", s.lookup_done_calls);
    add("stage_calls", s.stage_calls);
    add("update_begin_calls", s.update_begin_calls);
    add("update_lease_calls", s.update_lease_calls);
    add("update_done_calls", s.update_done_calls);
    add("refused_calls", s.refused_calls);
    add("lookups", s.lookups);
    add("updates", s.updates);
    add("skipped_updates", s.skipped_updates);
    add("tokens", s.tokens);
    add("trained_tokens", s.trained_tokens);
    add("unique_tokens", s.unique_tokens);
    add("bad_ids", s.bad_ids);
    add("padding_ids", s.padding_ids);
    add("bytes_moved", s.bytes_moved);
    add("bytes_sent", s.bytes_sent);
    add("saturated", s.saturated);
    add("exposed_wait_ns", s.exposed_wait_ns);
    add("arena_bytes", group->arena_bytes());
  }
  return result;
}

// What ended the context, or None while it works.
py::object failure(std::int64_t id) {
  for (const auto& group : context::find_context(id)->groups()) {
    if (const auto ended = group->failure()) return py::str(ended->message);
  }
  return py::none();
}

// The first refusal of any group, cleared everywhere; None where there is none.
py::object take_refusal(std::int64_t id) {
  py::object first = py::none();
  for (const auto& group : context::find_context(id)->groups()) {
    const auto refusal = group->take_refusal();
    if (refusal && first.is_none()) first = py::str(*refusal);
  }
  return first;
}

py::object take_id_problem(std::int64_t id) {
  py::object first = py::none();
  for (const auto& group : context::find_context(id)->groups()) {
    const auto problem = group->take_id_problem();
    if (!problem || !first.is_none()) continue;
    py::dict fields;
    fields["step"] = problem->step;
    fields["position"] = problem->position;
    fields["id"] = problem->id;
    fields["rows"] = problem->rows;
    fields["too_many_unique"] = problem->too_many_unique;
    fields["unique"] = problem->unique;
    first = fields;
  }
  return first;
}

// For each group that has a rank in this process: (ids bytes, gradient bytes, pending) of the tokens of those ranks, or
// None.
py::list staged(std::int64_t id) {
  py::list all;
  for (const auto& group : context::find_context(id)->groups()) {
    const auto result = group->staged();
    if (!result) {
      all.append(py::none());
      continue;
    }
    const char* ids = reinterpret_cast<const char*>(result->ids.data());
    all.append(py::make_tuple(py::bytes(ids, result->ids.size() * sizeof(std::int32_t)),
                              py::bytes(result->grads.data(), result->grads.size()), result->pending));
  }
  return all;
}

void restore_staged(std::int64_t id, const std::string& ids, const std::string& grads, bool pending) {
  context::StagedGradients staged;
  const auto* values = reinterpret_cast<const std::int32_t*>(ids.data());
  staged.ids.assign(values, values + ids.size() / sizeof(std::int32_t));
  staged.grads.assign(grads.begin(), grads.end());
  staged.pending = pending;
  for (const auto& group : context::find_context(id)->groups()) group->restore_staged(staged);
}

py::list stop_timeline() {
  py::list events;
  for (const context::TimelineEvent& event : context::Timeline::shared().stop()) {
    events.append(py::make_tuple(event.name, event.table, event.device, event.step, event.nanoseconds));
  }
  return events;
}

// Handlers by name, for one of XLA's platforms: "cpu", or "CUDA".
py::dict ffi_targets(const std::string& platform) {
  const bool on_cpu = platform == "cpu";
  if (!on_cpu && platform != "CUDA") throw py::value_error("platform '" + platform + "' is not one of cpu, CUDA");
  py::dict targets;
  for (const Target& target : kTargets) {
    targets[target.name] = py::capsule(reinterpret_cast<void*>(on_cpu ? target.cpu : target.cuda));
  }
  return targets;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Native part of async-emb. Private: use torch_ext and jax_bridge.";
  m.def("build_info", &build_info);
  m.def("ffi_targets", &ffi_targets);
  m.def("instruction_set", [] { return std::string(cpu::kernels().name); });

  m.def("open_context", &open);
  m.def("is_open", &context::is_open);
  m.def("open_contexts", &context::open_contexts);
  m.def("close_context", &context::close_context, py::call_guard<py::gil_scoped_release>());
  m.def(
      "drain",
      [](std::int64_t id) {
        for (const auto& group : context::find_context(id)->groups()) group->drain();
      },
      py::call_guard<py::gil_scoped_release>());
  m.def("abort_context", &context::abort_context, py::call_guard<py::gil_scoped_release>());
  m.def("set_absent", &context::set_absent, py::arg("context_id"), py::arg("device"), py::arg("why"),
        py::call_guard<py::gil_scoped_release>());

  m.def("stats", &stats);
  m.def("failure", &failure);
  m.def("take_refusal", &take_refusal);
  m.def("take_id_problem", &take_id_problem);
  m.def("return_to_first_step", [](std::int64_t id) {
    for (const auto& group : context::find_context(id)->groups()) group->return_to_first_step();
  });
  m.def("staged", &staged);
  m.def("restore_staged", &restore_staged);

  define_host_calls(m);
  define_device_calls(m);
  define_loans(m);
  define_transports(m);
#if defined(ASYNC_EMB_WITH_CUDA)
  define_cuda_transports(m);
#endif

  m.def("start_timeline", [] { context::Timeline::shared().start(); });
  m.def("stop_timeline", &stop_timeline);
  m.def("threads", [] { return context::Executor::shared().threads(); });
}

}  // namespace async_emb::faces
