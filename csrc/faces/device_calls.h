// The calls of a device pipeline from Python, rank by rank, on a stream of the caller's: for programs without XLA, and
// for several ranks on one GPU.
#pragma once

#include <pybind11/pybind11.h>

namespace async_emb::faces {

void define_device_calls(pybind11::module_& module);

}  // namespace async_emb::faces
