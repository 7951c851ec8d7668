#include "faces/transports.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/c10d/process_group.h"
#include "comm/device_transport.h"
#include "comm/transport.h"

namespace py = pybind11;

namespace async_emb::faces {
namespace {

using comm::Transport;
using comm::TransportError;

const char* name_of(TransportError::Kind kind) {
  switch (kind) {
    case TransportError::Kind::kTimeout:
      return "timeout";
    case TransportError::Kind::kLost:
      return "lost";
    case TransportError::Kind::kEnded:
      return "ended";
  }
  return "unknown";
}

std::shared_ptr<Transport> connect(const py::object& backend, const py::object& store) {
  auto group = shared<::c10d::Backend>(backend, "Backend");
  if (group->getBackendName() != "gloo") {
    throw py::value_error("a transport moves bytes between CPUs, over the backend gloo, not over " +
                          group->getBackendName());
  }
  return std::make_shared<comm::ProcessGroupTransport>(std::move(group), shared<::c10d::Store>(store, "Store"));
}

// Sends and fills bytes of the caller's where they lie, one buffer a process; None for no bytes.
void exchange_into(Transport& transport, const std::vector<py::object>& sent, const std::vector<py::object>& received,
                   double timeout_seconds) {
  const auto timeout = nanoseconds(timeout_seconds);
  std::vector<py::buffer_info> held;
  std::vector<comm::Block> blocks;
  std::vector<comm::Inbox> inboxes;
  const auto view = [&](const py::object& object, bool writable) -> const py::buffer_info* {
    if (object.is_none()) return nullptr;
    return &held.emplace_back(object.cast<py::buffer>().request(writable));
  };
  held.reserve(sent.size() + received.size());
  for (const py::object& object : sent) {
    const py::buffer_info* info = view(object, false);
    blocks.push_back(info ? comm::Block{info->ptr, info->size * info->itemsize} : comm::Block{});
  }
  for (const py::object& object : received) {
    const py::buffer_info* info = view(object, true);
    inboxes.push_back(info ? comm::Inbox{info->ptr, info->size * info->itemsize} : comm::Inbox{});
  }
  py::gil_scoped_release unlocked;
  transport.exchange(blocks, inboxes, timeout);
}

py::list exchange(Transport& transport, const std::vector<std::string>& sent, const std::vector<std::int64_t>& sizes,
                  double timeout_seconds) {
  const auto timeout = nanoseconds(timeout_seconds);
  std::vector<std::string> results;
  {
    py::gil_scoped_release unlocked;
    std::vector<comm::Block> blocks;
    std::vector<comm::Inbox> inboxes;
    results.resize(sizes.size());
    for (const std::string& block : sent) blocks.push_back({block.data(), static_cast<std::int64_t>(block.size())});
    for (std::size_t peer = 0; peer < sizes.size(); ++peer) {
      results[peer].resize(static_cast<std::size_t>(sizes[peer]));
      inboxes.push_back({results[peer].data(), sizes[peer]});
    }
    transport.exchange(blocks, inboxes, timeout);
  }
  py::list bytes;
  for (const std::string& block : results) bytes.append(py::bytes(block));
  return bytes;
}

}  // namespace

std::chrono::nanoseconds nanoseconds(double seconds) {
  constexpr double kCentury = 3.2e9;
  if (!(seconds >= 0)) throw py::value_error("timeout_seconds=" + std::to_string(seconds) + " is negative");
  return std::chrono::nanoseconds(static_cast<std::int64_t>(std::min(seconds, kCentury) * 1e9));
}

void define_transports(py::module_& m) {
  // An OSError with two attributes more: `kind` ("timeout", "lost" or "ended") and `peers`.
  // Kept for good: it may be raised while the interpreter ends.
  static PyObject* const transport_error = PyErr_NewException("torch_ext._C.TransportError", PyExc_OSError, nullptr);
  m.attr("TransportError") = py::reinterpret_borrow<py::object>(transport_error);
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const TransportError& error) {
      const py::object raised = py::reinterpret_borrow<py::object>(transport_error)(error.what());
      raised.attr("kind") = name_of(error.kind());
      raised.attr("peers") = py::cast(error.peers());
      PyErr_SetObject(transport_error, raised.ptr());
    }
  });

  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<Transport, std::shared_ptr<Transport>>(m, "Transport")
      .def_property_readonly("size", &Transport::size)
      .def_property_readonly("self", &Transport::self)
      .def("exchange", &exchange, py::arg("sent"), py::arg("sizes"), py::arg("timeout_seconds"))
      .def("exchange_into", &exchange_into, py::arg("sent"), py::arg("received"), py::arg("timeout_seconds"))
      .def("end", &Transport::end, unlocked)
      .def("announce", &Transport::announce, py::arg("failure"), unlocked)
      .def("announced", &Transport::announced, unlocked);
  py::class_<comm::DeviceTransport, std::shared_ptr<comm::DeviceTransport>>(m, "DeviceTransport")
      .def_property_readonly("size", &comm::DeviceTransport::size)
      .def_property_readonly("self", &comm::DeviceTransport::self)
      .def("abort", &comm::DeviceTransport::abort, unlocked);
  m.def("connect_transport", &connect, py::arg("backend"), py::arg("store"));
}

}  // namespace async_emb::faces
