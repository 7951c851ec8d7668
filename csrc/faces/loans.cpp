#include "faces/loans.h"

#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

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

using Memory = std::shared_ptr<c10::DataPtr>;

void let_go(void* memory) { delete static_cast<Memory*>(memory); }

// A storage of torch's whose memory somebody else reads, for as long as this lives. torch refuses to resize it. What
// else takes a storage's memory away (share_memory_ moves it to where other processes see it) leaves it to the reader.
// All of it with Python's lock held.
class Shared {
 public:
  explicit Shared(c10::StorageImpl* storage)
      : storage_(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage)), was_resizable_(storage->resizable()) {
    storage->set_resizable(false);
    c10::DataPtr& data = storage->mutable_data_ptr();
    if (!data.device().is_cpu()) return;  // GPUs' memory stays where it is, and its allocator wants to know it
    void* const address = data.get();
    memory_ = std::make_shared<c10::DataPtr>(std::move(data));
    data = c10::DataPtr(address, new Memory(memory_), &let_go, memory_->device());
  }

  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  ~Shared() {
    all().erase(storage_.get());
    if (memory_ != nullptr) {
      c10::DataPtr& data = storage_->_mutable_data_ptr_no_checks();
      if (data.get_deleter() != &let_go || data.get() != memory_->get()) return;  // it has other memory now
      c10::DataPtr original = std::move(*memory_);
      data = std::move(original);
    }
    storage_->set_resizable(was_resizable_);
  }

  // Of the storage at this address, as Python has it.
  static std::shared_ptr<Shared> of(std::uintptr_t address) {
    auto* const storage = reinterpret_cast<c10::StorageImpl*>(address);
    std::weak_ptr<Shared>& known = all()[storage];
    std::shared_ptr<Shared> shared = known.lock();
    if (shared == nullptr) known = shared = std::make_shared<Shared>(storage);
    return shared;
  }

 private:
  static std::unordered_map<c10::StorageImpl*, std::weak_ptr<Shared>>& all() {
    static auto* const every = new std::unordered_map<c10::StorageImpl*, std::weak_ptr<Shared>>;
    return *every;
  }

  c10::intrusive_ptr<c10::StorageImpl> storage_;
  const bool was_resizable_;
  Memory memory_;
};

}  // namespace

void define_loans(pybind11::module_& module) {
  module.def("end_loan", &end_loan, pybind11::arg("storage"), pybind11::arg("why"));
  pybind11::class_<Shared, std::shared_ptr<Shared>>(module, "Shared")
      .def(pybind11::init(&Shared::of), pybind11::arg("storage"));
}

}  // namespace async_emb::faces
