// RMSNorm of each token's hidden state, with the residual sum folded in.
//
//   with a residual     h[t, :] = round(residual[t, :] + x[t, :]);  residual[t, :] = h[t, :]
//   without             h[t, :] = x[t, :]
//   always              out[t, :] = h[t, :] / sqrt(mean(h[t, :]^2) + eps) * weight[:]
//
// Launch contract:
//   grid    (num_tokens, 1, 1)        one block a token; num_tokens >= 1
//   block   (256, 1, 1)               8 warps; fixed, because it fixes the order of the sum
//   smem    0 B dynamic               32 B static: one partial sum per warp
//   macros  SCALAR in {float, __half, __nv_bfloat16}: the type of all four tensors
//   arch    sm_80 and up
//
// Arguments, in order:
//   out          SCALAR [num_tokens, hidden_size]   may be x itself
//   residual     SCALAR [num_tokens, hidden_size]   null: there is none; updated in place
//   x            SCALAR [num_tokens, hidden_size]   read only
//   weight       SCALAR [hidden_size]
//   hidden_size  i32                                a multiple of 16 / sizeof(SCALAR)
//   eps          f32                                added to the mean square
//
// Tensors are row-major and contiguous, their bases 16-byte aligned. `residual` overlaps nothing.
//
// Numerics: fp32 from load to store, with one rounding at each store. The mean square is that of the
// *stored* h, so the result is the same whether the sum was made here or by an earlier kernel. The
// order of the sum depends on hidden_size alone: a token's bits do not depend on its company.
//
// Offsets are computed in int64: 300k tokens * 8192 passes 2^31.

#include "common.cuh"

#ifndef SCALAR
#error "define SCALAR as float, __half or __nv_bfloat16"
#endif

namespace fastserve {

constexpr int kNumWarps = 8;
using Pack = Vec<SCALAR>;

// The token's h: the residual sum, stored on the way, or x as it is.
__device__ __forceinline__ Pack hidden(Pack* residual, const Pack* x, int i) {
  Pack h = x[i];
  if (residual == nullptr) return h;
  const Pack before = residual[i];
#pragma unroll
  for (int k = 0; k < Pack::kSize; ++k) {
    h.at[k] = from_float<SCALAR>(to_float(before.at[k]) + to_float(h.at[k]));
  }
  residual[i] = h;
  return h;
}

__device__ __forceinline__ Pack scaled(const Pack& h, const Pack& weight, float scale) {
  Pack out;
#pragma unroll
  for (int k = 0; k < Pack::kSize; ++k) {
    out.at[k] = from_float<SCALAR>(to_float(h.at[k]) * scale * to_float(weight.at[k]));
  }
  return out;
}

}  // namespace fastserve

extern "C" __global__ void __launch_bounds__(fastserve::kNumWarps * fastserve::kWarpSize)
    rms_norm(SCALAR* out, SCALAR* residual, const SCALAR* x, const SCALAR* weight, int hidden_size,
             float eps) {
  using namespace fastserve;
  __shared__ float partial[kNumWarps];

  const long long offset = static_cast<long long>(blockIdx.x) * hidden_size;
  Pack* out_row = reinterpret_cast<Pack*>(out + offset);
  Pack* residual_row = residual == nullptr ? nullptr : reinterpret_cast<Pack*>(residual + offset);
  const Pack* x_row = reinterpret_cast<const Pack*>(x + offset);
  const Pack* weight_row = reinterpret_cast<const Pack*>(weight);
  const int num_packs = hidden_size / Pack::kSize;

  // Pass 1: make h, sum its squares.
  float squares = 0.0f;
  for (int i = threadIdx.x; i < num_packs; i += blockDim.x) {
    const Pack h = hidden(residual_row, x_row, i);
#pragma unroll
    for (int k = 0; k < Pack::kSize; ++k) squares += to_float(h.at[k]) * to_float(h.at[k]);
  }
  const float mean = block_sum<kNumWarps>(squares, partial) / static_cast<float>(hidden_size);
  const float scale = 1.0f / sqrtf(mean + eps);

  // Pass 2: read h again. Each thread reads only what it wrote itself, mostly from cache.
  const Pack* h_row = residual_row == nullptr ? x_row : residual_row;
  for (int i = threadIdx.x; i < num_packs; i += blockDim.x) {
    out_row[i] = scaled(h_row[i], weight_row[i], scale);
  }
}
