// The activation of the gate times the other half: SiLU or GELU (tanh).
//
//   out[t, i] = activation(x[t, i]) * x[t, size + i]
//   SILU  a / (1 + exp(-a))          GELU  a / 2 * (1 + tanh(sqrt(2 / pi) * (a + 0.044715 a^3)))
//
// Launch contract:
//   grid    (num_tokens, 1, 1)        one block a token
//   block   (256, 1, 1)
//   smem    0 B dynamic
//   macros  SCALAR in {float, __half, __nv_bfloat16}; ACTIVATION in {SILU, GELU}
//   arch    sm_80 and up
//
// Arguments, in order:
//   out   SCALAR [num_tokens, size]
//   x     SCALAR [num_tokens, 2 * size]    gate, then up
//   size  i32                              a multiple of 16 / sizeof(SCALAR)
//
// Tensors are contiguous, their bases 16-byte aligned. `out` overlaps nothing.
//
// Numerics: fp32 from load to store, one rounding.

#include "common.cuh"

#if !defined(SCALAR) || !defined(ACTIVATION)
#error "define SCALAR and ACTIVATION"
#endif

namespace fastserve {

enum Activation { SILU, GELU };
using Pack = Vec<SCALAR>;

__device__ __forceinline__ float activated(float a) {
  if (ACTIVATION == SILU) return a / (1.0f + expf(-a));
  const float inner = 0.7978845608028654f * (a + 0.044715f * a * a * a);
  return 0.5f * a * (1.0f + tanhf(inner));
}

}  // namespace fastserve

extern "C" __global__ void __launch_bounds__(256) gated(SCALAR* out, const SCALAR* x, int size) {
  using namespace fastserve;
  const long long offset = static_cast<long long>(blockIdx.x) * size;
  const Pack* gate = reinterpret_cast<const Pack*>(x + 2 * offset);
  const Pack* up = reinterpret_cast<const Pack*>(x + 2 * offset + size);
  Pack* to = reinterpret_cast<Pack*>(out + offset);
  for (int i = threadIdx.x; i < size / Pack::kSize; i += blockDim.x) {
    const Pack a = gate[i], b = up[i];
    Pack product;
#pragma unroll
    for (int k = 0; k < Pack::kSize; ++k) {
      product.at[k] = from_float<SCALAR>(activated(to_float(a.at[k])) * to_float(b.at[k]));
    }
    to[i] = product;
  }
}
