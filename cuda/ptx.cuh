// Every instruction that CUDA C++ has no name for, one wrapper each. No other file has `asm`.
//
// The emulator in `tests/cuda_emulator` has the same names with bodies of its own.
#pragma once

#include "common.cuh"

#ifdef FASTSERVE_EMULATOR
#include "ptx_emulated.h"
#else

namespace fastserve {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Copy 16 bytes from global to shared memory; store zeros, and do not read, where there are none.
__device__ __forceinline__ void cp_async_16(void* into, const void* from, bool is_there) {
  const int num_bytes = is_there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(into)),
               "l"(from), "r"(num_bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Wait until at most kPending of this thread's groups are on their way.
template <int kPending> __device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit numbers. Lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
}

// d += a b, of 16x16 and 16x8 numbers of type T, accumulated in fp32.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1);
#define FASTSERVE_MMA(TYPE, NAME)                                                                \
  template <>                                                                                    \
  __device__ __forceinline__ void mma_m16n8k16<TYPE>(float (&d)[4], const unsigned (&a)[4],      \
                                                     unsigned b0, unsigned b1) {                 \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME                          \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"                  \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                \
  }
FASTSERVE_MMA(__half, "f16")
FASTSERVE_MMA(__nv_bfloat16, "bf16")
#undef FASTSERVE_MMA

}  // namespace fastserve

#endif
