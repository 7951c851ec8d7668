#include <pybind11/pybind11.h>

#include <memory>

#include "comm/c10d/cuda_process_group.h"
#include "faces/transports.h"

namespace py = pybind11;

namespace async_emb::faces {
namespace {

// None where the processes are not connected in time.
std::shared_ptr<comm::DeviceTransport> connect(const py::object& backend, int gpu, double timeout_seconds) {
  auto group = shared<::c10d::Backend>(backend, "Backend");
  if (group->getBackendName() != "nccl") {
    throw py::value_error("a transport between GPUs moves bytes over the backend nccl, not over " +
                          group->getBackendName());
  }
  const auto timeout = nanoseconds(timeout_seconds);
  py::gil_scoped_release unlocked;
  auto transport = std::make_shared<comm::CudaProcessGroupTransport>(std::move(group), gpu);
  if (!transport->connect(timeout)) return nullptr;
  return transport;
}

}  // namespace

void define_cuda_transports(py::module_& m) {
  m.def("connect_device_transport", &connect, py::arg("backend"), py::arg("gpu"), py::arg("timeout_seconds"));
}

}  // namespace async_emb::faces
