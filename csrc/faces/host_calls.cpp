// The calls of a step from a program's own threads, one rank a thread. Translation and checks of form only; the
// pipeline decides everything else.
//
// Tensors come as DLPack capsules. One that a call lends for the length of its work is consumed: whoever made it keeps
// its memory until the work is over, whatever becomes of the Python objects. Starts return at once, with a `Work` that
// can be waited for without Python's lock.
#include "faces/host_calls.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "context/pipeline.h"
#include "context/registry.h"

namespace py = pybind11;

namespace async_emb::faces {
namespace {

constexpr const char* kFresh = "dltensor";
constexpr const char* kConsumed = "used_dltensor";

DLManagedTensor& managed(const py::capsule& capsule) {
  if (std::string(capsule.name() == nullptr ? "" : capsule.name()) != kFresh) {
    throw py::value_error("a tensor is handed over as a DLPack capsule that nobody has consumed");
  }
  DLManagedTensor& tensor = *capsule.get_pointer<DLManagedTensor>();
  const DLTensor& view = tensor.dl_tensor;
  if (view.device.device_type != kDLCPU) throw py::value_error("a tensor of a context on CPUs must be on the CPU");
  std::int64_t stride = 1;
  for (int i = view.ndim - 1; i >= 0 && view.strides != nullptr; --i) {
    if (view.shape[i] != 1 && view.strides[i] != stride) {
      throw py::value_error("the tensor " + context::describe(view) + " must be contiguous");
    }
    stride *= view.shape[i];
  }
  return tensor;
}

// For the length of a call that keeps nothing.
const DLTensor& view(const py::capsule& capsule) { return managed(capsule).dl_tensor; }

// A tensor that stays where it is until the last copy of this goes away.
using Lent = std::shared_ptr<const DLTensor>;

Lent lend(const py::capsule& capsule) {
  DLManagedTensor* tensor = &managed(capsule);
  if (PyCapsule_SetName(capsule.ptr(), kConsumed) != 0) throw py::error_already_set();
  const std::shared_ptr<DLManagedTensor> owner(tensor, [](DLManagedTensor* t) {
    if (t->deleter != nullptr) t->deleter(t);
  });
  return {owner, &tensor->dl_tensor};
}

// What a start or a done has set going.
class Work {
 public:
  context::Completion completion(std::vector<Lent> held) {
    return [state = state_, held = std::move(held)](const context::Failure* failure) mutable {
      held.clear();  // before anybody hears that the tensors are free
      const std::lock_guard lock(state->mutex);
      if (failure != nullptr) state->failure = *failure;
      state->over = true;
      state->changed.notify_all();
    };
  }

  bool is_over() const {
    const std::lock_guard lock(state_->mutex);
    return state_->over;
  }

  // Whether it is over within that time. Ctrl-C ends the wait, not the work.
  bool wait_for(double seconds) const {
    constexpr std::chrono::milliseconds kBetweenSignals{100};
    const auto deadline = context::Clock::now() + std::chrono::duration<double>(seconds);
    for (bool over = false; !over;) {
      const auto now = context::Clock::now();
      {
        const py::gil_scoped_release unlocked;
        std::unique_lock lock(state_->mutex);
        const std::chrono::duration<double> pause =
            std::min<std::chrono::duration<double>>(deadline - now, kBetweenSignals);
        over = state_->changed.wait_for(lock, pause, [&] { return state_->over; });
      }
      if (over) break;
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      if (now >= deadline) return false;
    }
    if (state_->failure) throw context::Error(*state_->failure);
    return true;
  }

  void wait() const {
    constexpr double kLong = 3600;
    while (!wait_for(kLong)) {
    }
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool over = false;
    std::optional<context::Failure> failure;  // fixed once it is over
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

class UpdateWork : public Work {
 public:
  struct Numbers {
    float norm = 0;
    std::int32_t valid = 0;
    std::int32_t pending = 0;
  };

  context::UpdateResults results() const { return {&numbers_->norm, &numbers_->valid, &numbers_->pending}; }
  context::Completion completion() {
    return [numbers = numbers_, over = Work::completion({})](const context::Failure* failure) { over(failure); };
  }

  std::tuple<float, bool, bool> result() const {
    wait();
    return {numbers_->norm, numbers_->valid != 0, numbers_->pending != 0};
  }

 private:
  std::shared_ptr<Numbers> numbers_ = std::make_shared<Numbers>();
};

// One rank of an open context. It belongs to that opening: once the context is closed, every call says so.
class Rank {
 public:
  Rank(std::int64_t id, std::int64_t device) : context_(context::find_context(id)) {
    const context::ContextSpec& spec = context_->spec();
    const auto found = std::find(spec.devices.begin(), spec.devices.end(), device);
    const auto place = static_cast<std::size_t>(found - spec.devices.begin());
    if (found != spec.devices.end()) {
      pipeline_ = std::dynamic_pointer_cast<context::Pipeline>(context_->group_of(place));
    }
    if (!pipeline_) {
      throw context::Error(
          context::FailureKind::kInvalidArgument,
          "async_emb context '" + spec.name + "' has no rank " + std::to_string(device) + " on a CPU of this process");
    }
    rank_ = static_cast<int>(place % static_cast<std::size_t>(spec.group_size));
  }

  std::pair<float, Work> lookup_start(const py::capsule& ids, const py::capsule& table) {
    const DLTensor& token_ids = view(ids);
    const Lent shard = lend(table);
    const py::gil_scoped_release unlocked;
    const float pin = pipeline_->lookup_begin(rank_, token_ids, shard->ndim == 2 ? shard->shape[0] : 0);
    Work lease;
    pipeline_->lookup_lease(rank_, *shard, lease.completion({shard}));
    return {pin, lease};
  }

  Work lookup_done(float pin, const std::optional<py::capsule>& ids, const py::capsule& rows) {
    const DLTensor* token_ids = ids ? &view(*ids) : nullptr;
    const Lent out = lend(rows);
    const py::gil_scoped_release unlocked;
    Work done;
    pipeline_->lookup_done(rank_, pin, token_ids, *out, done.completion({out}));
    return done;
  }

  float stage_update(const py::capsule& grads, bool pending) {
    const DLTensor& rows = view(grads);
    const py::gil_scoped_release unlocked;
    return pipeline_->stage_update(rank_, rows, nullptr, nullptr, pending);
  }

  std::pair<float, Work> update_start(const context::UpdateRule& rule, const py::capsule& table,
                                      const py::capsule& row_state, const std::optional<py::capsule>& last_step) {
    std::vector<Lent> held{lend(table), lend(row_state)};
    if (last_step) held.push_back(lend(*last_step));
    const DLTensor* last = last_step ? held[2].get() : nullptr;
    const py::gil_scoped_release unlocked;
    const float pin = pipeline_->update_begin(rank_, rule);
    Work lease;
    const Lent shard = held[0];
    const Lent state = held[1];
    pipeline_->update_lease(rank_, *shard, *state, last, lease.completion(std::move(held)));
    return {pin, lease};
  }

  UpdateWork update_done() {
    const py::gil_scoped_release unlocked;
    UpdateWork done;
    pipeline_->update_done(rank_, done.results(), done.completion());
    return done;
  }

 private:
  std::shared_ptr<context::Context> context_;
  std::shared_ptr<context::Pipeline> pipeline_;
  int rank_ = 0;
};

const char* name_of(context::FailureKind kind) {
  switch (kind) {
    case context::FailureKind::kInvalidArgument:
      return "invalid_argument";
    case context::FailureKind::kUnmatchedBuffers:
      return "unmatched_buffers";
    case context::FailureKind::kUnknownContext:
      return "unknown_context";
    case context::FailureKind::kAborted:
      return "aborted";
    case context::FailureKind::kTimeout:
      return "timeout";
    case context::FailureKind::kPeer:
      return "peer";
    case context::FailureKind::kInternal:
      break;
  }
  return "internal";
}

context::UpdateRule rule_of(const py::dict& fields) {
  context::UpdateRule rule;
  rule.lazy = fields["lazy"].cast<bool>();
  rule.learning_rate = fields["learning_rate"].cast<float>();
  rule.eps = fields["eps"].cast<float>();
  rule.decay = fields["decay"].cast<float>();
  rule.weight_decay = fields["weight_decay"].cast<float>();
  rule.step = fields["step"].cast<std::int32_t>();
  rule.clips = !fields["max_grad_norm"].is_none();
  if (rule.clips) rule.max_grad_norm = fields["max_grad_norm"].cast<float>();
  rule.stochastic_rounding = fields["stochastic_rounding"].cast<bool>();
  rule.seed = fields["seed"].cast<std::uint32_t>();
  rule.rounding_step = fields["rounding_step"].cast<std::uint32_t>();
  return rule;
}

}  // namespace

void define_host_calls(py::module_& m) {
  // A RuntimeError with one attribute more: `kind`. Kept for good, as it may be raised while the interpreter ends.
  static PyObject* const call_error = PyErr_NewException("torch_ext._C.CallError", PyExc_RuntimeError, nullptr);
  m.attr("CallError") = py::reinterpret_borrow<py::object>(call_error);
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const context::Error& error) {
      const py::object raised = py::reinterpret_borrow<py::object>(call_error)(error.what());
      raised.attr("kind") = name_of(error.kind());
      PyErr_SetObject(call_error, raised.ptr());
    }
  });

  py::class_<Work>(m, "Work")
      .def("is_over", &Work::is_over)
      .def("wait", &Work::wait)
      .def("wait_for", &Work::wait_for, py::arg("seconds"));
  py::class_<UpdateWork, Work>(m, "UpdateWork").def("result", &UpdateWork::result);
  py::class_<Rank>(m, "Rank")
      .def(py::init<std::int64_t, std::int64_t>(), py::arg("context_id"), py::arg("device"))
      .def("lookup_start", &Rank::lookup_start, py::arg("ids"), py::arg("table"))
      .def("lookup_done", &Rank::lookup_done, py::arg("pin"), py::arg("ids"), py::arg("rows"))
      .def("stage_update", &Rank::stage_update, py::arg("grads"), py::arg("pending"))
      .def(
          "update_start",
          [](Rank& rank, const py::dict& rule, const py::capsule& table, const py::capsule& row_state,
             const std::optional<py::capsule>& last_step) {
            return rank.update_start(rule_of(rule), table, row_state, last_step);
          },
          py::arg("rule"), py::arg("table"), py::arg("row_state"), py::arg("last_step"))
      .def("update_done", &Rank::update_done);
}

}  // namespace async_emb::faces
