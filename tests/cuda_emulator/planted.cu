// Kernels with one mistake each, and beside some the same without it. `x` has 64 floats unless it
// says otherwise; blocks have 64 threads.

extern "C" __global__ void missing_barrier(float* x) {
  __shared__ float s[64];
  s[threadIdx.x] = x[threadIdx.x];
  x[threadIdx.x] = s[63 - threadIdx.x];
}
extern "C" __global__ void with_barrier(float* x) {
  __shared__ float s[64];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = s[63 - threadIdx.x];
}

extern "C" __global__ void missing_second_barrier(float* x) {
  __shared__ float s[64];
  for (int i = 0; i < 3; i++) {
    s[threadIdx.x] = x[threadIdx.x] + i;
    __syncthreads();
    x[threadIdx.x] = s[63 - threadIdx.x];
  }
}
extern "C" __global__ void with_second_barrier(float* x) {
  __shared__ float s[64];
  for (int i = 0; i < 3; i++) {
    s[threadIdx.x] = x[threadIdx.x] + i;
    __syncthreads();
    x[threadIdx.x] = s[63 - threadIdx.x];
    __syncthreads();
  }
}

extern "C" __global__ void missing_syncwarp(float* x) {
  __shared__ float s[64];
  s[threadIdx.x] = x[threadIdx.x];
  x[threadIdx.x] = s[threadIdx.x ^ 1];
}
extern "C" __global__ void with_syncwarp(float* x) {
  __shared__ float s[64];
  s[threadIdx.x] = x[threadIdx.x];
  __syncwarp();
  x[threadIdx.x] = s[threadIdx.x ^ 1];
}

extern "C" __global__ void divergent_barrier(float* x) {
  if (threadIdx.x < 32) {
    x[threadIdx.x] = 1;
    __syncthreads();
  } else {
    x[threadIdx.x] = 2;
    __syncthreads();
  }
}
extern "C" __global__ void deadlock(float* x) {
  if (threadIdx.x == 5) {
    __syncthreads();
  } else {
    x[threadIdx.x] += __shfl_sync(0xffffffffu, x[threadIdx.x], 0);
  }
}
extern "C" __global__ void shuffle_from_absent_lane(float* x) {
  if (threadIdx.x < 16) x[threadIdx.x] = __shfl_sync(0x0000ffffu, x[threadIdx.x], 20);
}
extern "C" __global__ void mask_of_exited_lanes(float* x) {
  if (threadIdx.x < 16) x[threadIdx.x] = __shfl_xor_sync(0xffffffffu, x[threadIdx.x], 1);
}
extern "C" __global__ void outside_its_own_mask(float* x) {
  x[threadIdx.x] = __shfl_sync(0x0000ffffu, x[threadIdx.x], 0);
}

extern "C" __global__ void write_at(float* x, int offset) { x[threadIdx.x + offset] = 1.0f; }
extern "C" __global__ void read_at(float* x, int offset) { x[0] += x[threadIdx.x + offset]; }
extern "C" __global__ void write_constant(float* x, const float* y) {
  const_cast<float*>(y)[threadIdx.x] = x[threadIdx.x];
}

extern "C" __global__ void past_dynamic_shared(float* x, int offset) {
  extern __shared__ float s[];
  s[threadIdx.x + offset] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = s[threadIdx.x];
}
extern "C" __global__ void past_static_shared(float* x, int offset) {
  __shared__ float s[64];
  s[threadIdx.x + offset] = x[0];
  __syncthreads();
  x[threadIdx.x] = s[threadIdx.x];
}
extern "C" __global__ void unset_dynamic_shared(float* x) {
  extern __shared__ float s[];
  if (threadIdx.x) s[threadIdx.x] = 1;
  __syncthreads();
  x[threadIdx.x] = s[threadIdx.x];
}
// Static shared memory keeps nothing from one block to the next.
extern "C" __global__ void unset_static_shared(float* x) {
  __shared__ float s[64];
  if (threadIdx.x > 1 || blockIdx.x == 0) s[threadIdx.x] = 1;
  __syncthreads();
  x[threadIdx.x] = s[threadIdx.x];
}

extern "C" __global__ void misaligned(float* x) {
  const float4 four = *reinterpret_cast<const float4*>(x + 1 + threadIdx.x);
  x[0] = four.x;
}
extern "C" __global__ void deep_stack(float* x, int n) {
  volatile float large[1 << 17];
  for (int i = 0; i < (1 << 17); i++) large[i] = x[0];
  x[1] = large[n];
}
extern "C" __global__ void __launch_bounds__(32) few_threads(float* x) { x[threadIdx.x] = 1.0f; }
extern "C" __global__ void race_in_global(float* x) { x[0] = threadIdx.x; }
extern "C" __global__ void add_in_global(float* x) { atomicAdd(x, 1.0f); }
