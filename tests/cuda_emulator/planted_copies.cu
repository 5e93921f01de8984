// cp.async with the right wait and with one that is too weak. `x` has 256 floats, a thread copies 16
// bytes into each of two stages.

#include "ptx.cuh"

extern "C" __global__ void wait_for(float* x, int is_weak) {
  using namespace fastserve;
  extern __shared__ float s[];
  cp_async_16(s + 4 * threadIdx.x, x + 4 * threadIdx.x, true);
  cp_async_commit();
  cp_async_16(s + 128 + 4 * threadIdx.x, x + 128 + 4 * threadIdx.x, true);
  cp_async_commit();
  if (is_weak) {
    cp_async_wait<1>();
  } else {
    cp_async_wait<0>();
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 256; i += 32) x[i] = s[i] + 1.0f;
  __syncthreads();
  cp_async_wait<0>();
}

extern "C" __global__ void never_waits(float* x) {
  using namespace fastserve;
  extern __shared__ float s[];
  cp_async_16(s + 4 * threadIdx.x, x + 4 * threadIdx.x, true);
  cp_async_commit();
}

extern "C" __global__ void misaligned_copy(float* x) {
  using namespace fastserve;
  extern __shared__ float s[];
  cp_async_16(s + 4 * threadIdx.x, x + 1 + 4 * threadIdx.x, true);
  cp_async_commit();
  cp_async_wait<0>();
}
