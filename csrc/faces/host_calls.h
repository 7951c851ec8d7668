#pragma once

#include <pybind11/pybind11.h>

namespace async_emb::faces {

// Adds `Rank`, `Work` and `CallError` to the module: the calls of a step as a program on the host makes them.
void define_host_calls(pybind11::module_& m);

}  // namespace async_emb::faces
