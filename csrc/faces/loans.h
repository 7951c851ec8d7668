// Loans in Python: memory that torch was lent for a while, and how it is taken back.
#pragma once

#include <pybind11/pybind11.h>

namespace async_emb::faces {

void define_loans(pybind11::module_& module);

}  // namespace async_emb::faces
