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

#if defined(__x86_64__) || defined(__i386__)
using FloatMode = unsigned int;
inline constexpr FloatMode kKernelMode = 0x1f80u;  // all exceptions masked, none pending
inline FloatMode float_mode() { return _mm_getcsr(); }
inline void set_float_mode(FloatMode mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
using FloatMode = std::uint64_t;
inline constexpr FloatMode kKernelMode = 0;
inline FloatMode float_mode() {
  FloatMode mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
inline void set_float_mode(FloatMode mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }
#else
#error "async_emb: the floating-point mode of this architecture is not known; add it to csrc/cpu/float_mode.h"
#endif

// Sets a mode, the kernels' own unless told otherwise, for the length of a block.
class ScopedFloatMode {
 public:
  explicit ScopedFloatMode(FloatMode mode = kKernelMode) : saved_(float_mode()) { set_float_mode(mode); }
  ~ScopedFloatMode() { set_float_mode(saved_); }
  ScopedFloatMode(const ScopedFloatMode&) = delete;
  ScopedFloatMode& operator=(const ScopedFloatMode&) = delete;

 private:
  FloatMode saved_;
};

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::cpu
