// Macros that let one source serve host code of several instruction sets and device code.
#pragma once

// Marks a function that host and device share.
#if defined(__CUDACC__)
#define ASYNC_EMB_FN __host__ __device__ inline
#define ASYNC_EMB_INLINE __host__ __device__ __forceinline__
#elif defined(ASYNC_EMB_ARRAY_PACKS)  // what stands for a GPU in tests need not be fast, but has hundreds of kernels
#define ASYNC_EMB_FN inline
#define ASYNC_EMB_INLINE inline
#else
#define ASYNC_EMB_FN inline
#define ASYNC_EMB_INLINE inline __attribute__((always_inline))
#endif

#define ASYNC_EMB_RESTRICT __restrict__

// Before a loop whose arrays must live in registers: on a GPU only an unrolled loop lets them.
#if defined(__CUDA_ARCH__)
#define ASYNC_EMB_UNROLL _Pragma("unroll")
#else
#define ASYNC_EMB_UNROLL
#endif

// Core's functions live in an inline namespace that is named after the instruction set of the file that includes them.
// Without it the linker would merge inline functions compiled for different instruction sets, and a plain machine could
// end up with the AVX-512 copy. A file that compiles kernels for another target defines the name before it includes
// anything of core.
#if !defined(ASYNC_EMB_ISA)
#if defined(__CUDACC__)
#define ASYNC_EMB_ISA isa_cuda
#else
#define ASYNC_EMB_ISA isa_baseline
#endif
#endif

// Asks for the cache line at `address`, which may be anywhere: a prefetch never faults.
#if defined(__CUDA_ARCH__)
#define ASYNC_EMB_PREFETCH_READ(address) static_cast<void>(address)
#define ASYNC_EMB_PREFETCH_WRITE(address) static_cast<void>(address)
#else
#define ASYNC_EMB_PREFETCH_READ(address) __builtin_prefetch((address), 0, 3)
#define ASYNC_EMB_PREFETCH_WRITE(address) __builtin_prefetch((address), 1, 3)
#endif
