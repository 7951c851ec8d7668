// Tensors come as DLPack capsules and are borrowed: they must live until the stream has passed the call. No call waits
// for a device; a done may wait for other ranks' threads, without the Python lock.
#include "faces/device_calls.h"

#include <memory>
#include <optional>
#include <string>

#include "context/registry.h"
#include "context/tensor_view.h"

namespace py = pybind11;

namespace async_emb::faces {
namespace {

using Tensor = py::capsule;
using MaybeTensor = std::optional<py::capsule>;

// A capsule that nobody has taken still owns its tensor, and keeps it.
const DLTensor& borrowed(const Tensor& capsule) {
  if (std::string(capsule.name() == nullptr ? "" : capsule.name()) != "dltensor") {
    throw py::value_error("async_emb: a tensor is wanted as a DLPack capsule, as tensor.__dlpack__() gives it");
  }
  return static_cast<DLManagedTensor*>(capsule.get_pointer())->dl_tensor;
}

const DLTensor* borrowed(const MaybeTensor& capsule) { return capsule ? &borrowed(*capsule) : nullptr; }

template <typename T>
T* pointer(const Tensor& capsule) {
  return static_cast<T*>(context::data_of(borrowed(capsule)));
}

// Where a rank's calls go: its pipeline, and the caller's stream (a cudaStream_t as a number).
struct Place {
  std::shared_ptr<context::DevicePipeline> pipeline;
  int rank = 0;
  cuda::Stream stream = nullptr;
};

Place place(std::int64_t context_id, int group, int rank, std::uintptr_t stream) {
  const auto context = context::find_context(context_id);
  auto pipeline =
      std::dynamic_pointer_cast<context::DevicePipeline>(context->groups().at(static_cast<std::size_t>(group)));
  if (!pipeline) {
    throw context::Error(context::FailureKind::kInvalidArgument, "async_emb context '" + context->spec().name +
                                                                     "' is on CPU devices: these calls are for GPUs");
  }
  if (rank < 0 || rank >= context->spec().group_size) {
    throw context::Error(context::FailureKind::kInvalidArgument,
                         "async_emb context '" + context->spec().name + "' has ranks 0 to " +
                             std::to_string(context->spec().group_size - 1) + ", not " + std::to_string(rank));
  }
  return {std::move(pipeline), rank, reinterpret_cast<cuda::Stream>(stream)};
}

void lookup_begin(const Place& at, const Tensor& ids, const Tensor& table, const Tensor& pin) {
  const DLTensor& id_view = borrowed(ids);
  const DLTensor& table_view = borrowed(table);
  auto* const pin_out = pointer<float>(pin);
  py::gil_scoped_release unlocked;
  at.pipeline->lookup_begin(at.rank, id_view, table_view, pin_out, at.stream);
}

void lookup_done(const Place& at, const Tensor& pin, const Tensor& rows, const MaybeTensor& ids) {
  const auto* const pin_in = pointer<const float>(pin);
  const DLTensor& row_view = borrowed(rows);
  const DLTensor* const id_view = borrowed(ids);
  py::gil_scoped_release unlocked;
  at.pipeline->lookup_done(at.rank, pin_in, id_view, row_view, at.stream);
}

void stage_update(const Place& at, const Tensor& grads, const Tensor& pending, const Tensor& pin,
                  const MaybeTensor& segment_ids, const MaybeTensor& unique_tokens) {
  const DLTensor& grad_view = borrowed(grads);
  const DLTensor& pending_view = borrowed(pending);
  auto* const pin_out = pointer<float>(pin);
  const DLTensor* const segments = borrowed(segment_ids);
  const DLTensor* const unique = borrowed(unique_tokens);
  py::gil_scoped_release unlocked;
  at.pipeline->stage_update(at.rank, grad_view, segments, unique, pending_view, pin_out, at.stream);
}

// `floats`: learning_rate, eps, decay, weight_decay, max_grad_norm. `integers`: step, seed, rounding_step, as int32.
void update_begin(const Place& at, const Tensor& table, const Tensor& row_state, const MaybeTensor& last_step,
                  const Tensor& floats, const Tensor& integers, const Tensor& pin, bool clips,
                  bool stochastic_rounding) {
  const std::int64_t five[] = {5};
  const std::int64_t three[] = {3};
  context::require(borrowed(floats), "floats", context::kFloat32, five);
  context::require(borrowed(integers), "integers", context::kInt32, three);
  const auto* const f = pointer<const float>(floats);
  const auto* const i = pointer<const std::int32_t>(integers);
  cuda::TakeNumbers operands{.learning_rate = f,
                             .eps = f + 1,
                             .decay = f + 2,
                             .weight_decay = f + 3,
                             .max_grad_norm = f + 4,
                             .step = i,
                             .seed = reinterpret_cast<const std::uint32_t*>(i + 1),
                             .rounding_step = reinterpret_cast<const std::uint32_t*>(i + 2)};
  const DLTensor& table_view = borrowed(table);
  const DLTensor& state_view = borrowed(row_state);
  const DLTensor* const last_view = borrowed(last_step);
  auto* const pin_out = pointer<float>(pin);
  py::gil_scoped_release unlocked;
  at.pipeline->update_begin(at.rank, {last_view != nullptr, clips, stochastic_rounding}, operands, table_view,
                            state_view, last_view, pin_out, at.stream);
}

void update_done(const Place& at, const Tensor& norm, const Tensor& valid, const Tensor& pending, const Tensor& pin) {
  const context::DevicePipeline::Results results{pointer<float>(norm), pointer<std::int32_t>(valid),
                                                 pointer<std::int32_t>(pending)};
  auto* const pin_out = pointer<float>(pin);
  py::gil_scoped_release unlocked;
  at.pipeline->update_done(at.rank, results, pin_out, at.stream);
}

void settle(const Place& at) {
  py::gil_scoped_release unlocked;
  at.pipeline->settle(at.rank, at.stream);
}

}  // namespace

void define_device_calls(py::module_& module) {
  using namespace py::literals;
  py::class_<Place>(module, "DeviceRank")
      .def(py::init(&place), "context_id"_a, "group"_a, "rank"_a, "stream"_a)
      .def("lookup_begin", &lookup_begin, "ids"_a, "table"_a, "pin"_a)
      .def("lookup_done", &lookup_done, "pin"_a, "rows"_a, "ids"_a = py::none())
      .def("stage_update", &stage_update, "grads"_a, "pending"_a, "pin"_a, "segment_ids"_a = py::none(),
           "unique_tokens"_a = py::none())
      .def("update_begin", &update_begin, "table"_a, "row_state"_a, "last_step"_a, "floats"_a, "integers"_a, "pin"_a,
           "clips"_a = false, "stochastic_rounding"_a = false)
      .def("update_done", &update_done, "norm"_a, "valid"_a, "pending"_a, "pin"_a)
      .def("settle", &settle);
}

}  // namespace async_emb::faces
