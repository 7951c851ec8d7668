// The choice among the kernel tables of this build.
#include "cpu/kernels.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "core/unique.h"
#include "cpu/cpu_features.h"
#include "cpu/kernel_tables.h"

namespace async_emb::cpu {
namespace {

struct Available {
  const Kernels* tables[3];
  int count = 0;
};

Available find_available() {
  Available available;
  available.tables[available.count++] = &kBaselineKernels;
#if defined(__x86_64__)
  if (has_avx2_f16c()) available.tables[available.count++] = &kAvx2Kernels;
  if (has_avx512()) available.tables[available.count++] = &kAvx512Kernels;
#endif
  return available;
}

const Available& available() {
  static const Available found = find_available();
  return found;
}

const Kernels& choose() {
  const Available& found = available();
  const char* const wanted = std::getenv("ASYNC_EMB_CPU");
  if (wanted == nullptr || *wanted == '\0') return *found.tables[found.count - 1];
  std::string names;
  for (int i = 0; i < found.count; ++i) {
    if (std::string(wanted) == found.tables[i]->name) return *found.tables[i];
    names += (i == 0 ? "" : ", ") + std::string(found.tables[i]->name);
  }
  throw std::runtime_error("async_emb: ASYNC_EMB_CPU=" + std::string(wanted) +
                           " names no kernels that this machine can run; it can run: " + names +
                           ". Unset the variable to get the last of these.");
}

}  // namespace

std::int64_t unique_ids_scratch(std::int64_t count) { return core::unique_scratch(count); }

const Kernels& kernels() {
  // A throw leaves the static unset, so a caller that corrects the variable gets another try.
  static const Kernels& chosen = choose();
  return chosen;
}

int available_kernels(const Kernels* const** tables) {
  *tables = available().tables;
  return available().count;
}

}  // namespace async_emb::cpu
