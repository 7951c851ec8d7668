// Transports in Python: made of process groups of torch.distributed, handed to contexts.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <pybind11/pybind11.h>

#include <chrono>
#include <string>

namespace async_emb::faces {

// torch's classes, whatever the smart pointer that its own module keeps them by.
template <typename T>
c10::intrusive_ptr<T> shared(const pybind11::handle& object, const char* expected) {
  try {
    return c10::intrusive_ptr<T>::reclaim_copy(&pybind11::cast<T&>(object));
  } catch (const pybind11::cast_error&) {
    throw pybind11::type_error("a transport needs a " + std::string(expected) + " of torch.distributed, got " +
                               pybind11::str(pybind11::type::of(object)).cast<std::string>());
  }
}

// Throws a ValueError where it is negative; at most a century.
std::chrono::nanoseconds nanoseconds(double timeout_seconds);

void define_transports(pybind11::module_& module);
// Those between GPUs; defined where the module is built with CUDA.
void define_cuda_transports(pybind11::module_& module);

}  // namespace async_emb::faces
