// The floating-point mode of the kernels: round to nearest even, denormals kept.
//
// XLA calls handlers with denormals flushed to zero, and threads that are started there inherit that. So every kernel
// entry and every worker sets the mode, and puts back what it found.
#pragma once

#include <cstdint>

#include "core/platform.h"

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#endif

namespace async_emb::cpu {
inline namespace ASYNC_EMB_ISA {

class ScopedFloatMode {
 public:
#if defined(__x86_64__) || defined(__i386__)
  ScopedFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80u); }  // all exceptions masked, none pending
  ~ScopedFloatMode() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
  ScopedFloatMode() {
    std::uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    saved_ = mode;
    asm volatile("msr fpcr, %0" ::"r"(std::uint64_t{0}));
  }
  ~ScopedFloatMode() { asm volatile("msr fpcr, %0" ::"r"(static_cast<std::uint64_t>(saved_))); }
#else
#error "async_emb: the floating-point mode of this architecture is not known; add it to csrc/cpu/float_mode.h"
#endif

  ScopedFloatMode(const ScopedFloatMode&) = delete;
  ScopedFloatMode& operator=(const ScopedFloatMode&) = delete;

 private:
#if defined(__aarch64__)
  std::uint64_t saved_;
#else
  unsigned int saved_;
#endif
};

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::cpu
