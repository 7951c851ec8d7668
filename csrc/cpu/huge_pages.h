// Huge pages behind large memory that is about to be written for the first time.
//
// The system clears and maps a page when it is first touched. For an output of 32 MiB in pages of 4 KiB that takes
// several times as long as filling it with table rows; in pages of 2 MiB it is hardly seen.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace async_emb::cpu {

// Asks for huge pages behind all of [data, data + bytes) that whole ones fit into. A wish: contents and size stay as
// they are, whoever the memory belongs to, and a system without huge pages goes on as before. Below a few of them it
// asks for nothing.
inline void prefer_huge_pages(void* data, std::int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr std::int64_t kHugePage = std::int64_t{2} << 20;
  constexpr std::int64_t kWorthACall = 2 * kHugePage;
  if (bytes < kWorthACall) return;
  const auto first = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t begin = (first + kHugePage - 1) / kHugePage * kHugePage;
  const std::uintptr_t end = (first + static_cast<std::uintptr_t>(bytes)) / kHugePage * kHugePage;
  if (begin < end) static_cast<void>(madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE));
#else
  static_cast<void>(data);
  static_cast<void>(bytes);
#endif
}

}  // namespace async_emb::cpu
