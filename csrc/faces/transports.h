// Transports in Python: made of process groups of torch.distributed, handed to contexts.
#pragma once

#include <pybind11/pybind11.h>

namespace async_emb::faces {

void define_transports(pybind11::module_& module);

}  // namespace async_emb::faces
