// Shared by all kernels: element types, 16-byte vectors, reductions in a fixed order.
//
// Compiles under NVRTC and nvcc. No standard headers: NVRTC has none.
//
// A kernel computes in fp32 whatever it stores. Conversions round to nearest even. A reduction adds
// in an order fixed by the block's shape alone, so that equal inputs give equal bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace fastserve {

constexpr int kWarpSize = 32;
constexpr unsigned kWholeWarp = 0xffffffffu;

template <typename T> __device__ __forceinline__ float to_float(T value);
template <> __device__ __forceinline__ float to_float(float value) { return value; }
template <> __device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
template <> __device__ __forceinline__ float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}

template <typename T> __device__ __forceinline__ T from_float(float value);
template <> __device__ __forceinline__ float from_float(float value) { return value; }
template <> __device__ __forceinline__ __half from_float(float value) {
  return __float2half_rn(value);
}
template <> __device__ __forceinline__ __nv_bfloat16 from_float(float value) {
  return __float2bfloat16_rn(value);
}

// As many elements as one 16-byte load brings: 4 of fp32, 8 of fp16 and bf16.
template <typename T> struct alignas(16) Vec {
  static constexpr int kSize = 16 / static_cast<int>(sizeof(T));
  T at[kSize];
};

// Sum over a warp, in every lane. The tree is fixed, and so are the bits.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kWholeWarp, value, offset);
  }
  return value;
}

// Sum over a block of NUM_WARPS full warps, in every thread.
//
// `partial` is shared memory of NUM_WARPS floats. Every thread of the block must arrive. The caller
// synchronises before it uses `partial` again.
template <int NUM_WARPS> __device__ __forceinline__ float block_sum(float value, float* partial) {
  value = warp_sum(value);
  if (threadIdx.x % kWarpSize == 0) partial[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < NUM_WARPS; ++warp) sum += partial[warp];
  return sum;
}

}  // namespace fastserve
