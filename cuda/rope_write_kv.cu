// Queries are rotated in place; keys are rotated, and they and the values stored in their slots. Where
// the model has norms of heads, those come first.
//
//   y = x, or x / sqrt(mean(x^2) + eps) * weight of q or k
//   rotated, for i < rotary_dim / 2 and j = i + rotary_dim / 2 (NeoX):
//     z[i] = y[i] * cos[i] - y[j] * sin[i];   z[j] = y[j] * cos[i] + y[i] * sin[i];   the rest stays
//
// Launch contract:
//   grid    (num_tokens, num_heads + 2 * num_kv_heads, 1)   one block a head: of q, of k, of v
//   block   (32, 1, 1)                one warp
//   smem    0 B dynamic               HEAD_DIM * 4 B static
//   macros  SCALAR in {float, __half, __nv_bfloat16}; HEAD_DIM; BLOCK_SIZE
//   arch    sm_80 and up
//
// Arguments, in order:
//   qkv           SCALAR [num_tokens, num_heads + 2 * num_kv_heads, HEAD_DIM]   q is updated
//   k_cache       SCALAR [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
//   v_cache       SCALAR [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
//   positions     i32 [num_tokens]         a row of cos_sin
//   slot_mapping  i32 [num_tokens]         block * BLOCK_SIZE + offset; -1: store nothing
//   cos_sin       f32 [max_positions, rotary_dim]   cosines, then sines
//   q_norm        SCALAR [HEAD_DIM]        null: queries are not normed
//   k_norm        SCALAR [HEAD_DIM]        null: keys are not normed
//   num_heads     i32
//   num_kv_heads  i32
//   rotary_dim    i32                      0 to HEAD_DIM, a multiple of 2
//   eps           f32
//
// Tensors are contiguous and overlap nothing.
//
// Numerics: fp32 from load to store, one rounding. The sum of squares is a warp's, in a fixed order.

#include "common.cuh"

#if !defined(SCALAR) || !defined(HEAD_DIM) || !defined(BLOCK_SIZE)
#error "define SCALAR, HEAD_DIM and BLOCK_SIZE"
#endif

extern "C" __global__ void __launch_bounds__(32)
    rope_write_kv(SCALAR* qkv, SCALAR* k_cache, SCALAR* v_cache, const int* positions,
                  const int* slot_mapping, const float* cos_sin, const SCALAR* q_norm,
                  const SCALAR* k_norm, int num_heads, int num_kv_heads, int rotary_dim, float eps) {
  using namespace fastserve;
  __shared__ float head[HEAD_DIM];
  const int token = blockIdx.x, index = blockIdx.y;
  const bool is_query = index < num_heads;
  const bool is_value = index >= num_heads + num_kv_heads;
  const int slot = slot_mapping[token];
  if (!is_query && slot < 0) return;

  SCALAR* x = qkv + (static_cast<long long>(token) * gridDim.y + index) * HEAD_DIM;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < HEAD_DIM; i += kWarpSize) {
    head[i] = to_float(x[i]);
    squares += head[i] * head[i];
  }
  const SCALAR* weight = is_value ? nullptr : is_query ? q_norm : k_norm;
  if (weight != nullptr) {
    const float scale = 1.0f / sqrtf(warp_sum(squares) / HEAD_DIM + eps);
    for (int i = threadIdx.x; i < HEAD_DIM; i += kWarpSize) head[i] *= scale * to_float(weight[i]);
  }
  __syncwarp();

  SCALAR* to = x;
  if (!is_query) {
    const int kv_head = index - num_heads - (is_value ? num_kv_heads : 0);
    const long long block = slot / BLOCK_SIZE;
    to = (is_value ? v_cache : k_cache) +
         ((block * num_kv_heads + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM;
  }
  const float* angles = cos_sin + static_cast<long long>(positions[token]) * rotary_dim;
  const int half = rotary_dim / 2;
  for (int i = threadIdx.x; i < HEAD_DIM; i += kWarpSize) {
    float z = head[i];
    if (!is_value && i < rotary_dim) {
      const bool is_first = i < half;
      const int pair = is_first ? i : i - half;
      const float other = head[is_first ? i + half : pair];
      z = z * angles[pair] + (is_first ? -other : other) * angles[half + pair];
    }
    to[i] = from_float<SCALAR>(z);
  }
}
