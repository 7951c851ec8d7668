#include "cpu/cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace async_emb::cpu {

#if defined(__x86_64__)

// __builtin_cpu_supports also asks whether the operating system saves the registers; F16C needs no more than AVX does.
bool has_avx2_f16c() {
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned int kF16c = 1u << 29;
  return __builtin_cpu_supports("avx2") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & kF16c) != 0;
}

bool has_avx512() {
  return has_avx2_f16c() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

#else

bool has_avx2_f16c() { return false; }
bool has_avx512() { return false; }

#endif

}  // namespace async_emb::cpu
