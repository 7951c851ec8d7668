#include "faces/loans.h"

#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <string>

namespace async_emb::faces {
namespace {

// Takes memory back that torch was lent. Whoever still holds a tensor on the storage, a slice or a saved one, gets an
// error that says `why` from whatever reads or writes it. `storage` is the address of the StorageImpl, as Python has
// it.
void end_loan(std::uintptr_t storage, const std::string& why) {
  auto& lent = *reinterpret_cast<c10::StorageImpl*>(storage);
  // In spite of its name this releases nothing in the versions of torch that are supported: it closes the storage.
  lent.release_data_and_set_meta_custom_data_ptr_error_msg_(why);
  // With the pointer goes the lender's hold on the memory, which may be freed or donated from here on.
  lent._mutable_data_ptr_no_checks() = c10::DataPtr(nullptr, lent.device());
}

}  // namespace

void define_loans(pybind11::module_& module) {
  module.def("end_loan", &end_loan, pybind11::arg("storage"), pybind11::arg("why"));
}

}  // namespace async_emb::faces
