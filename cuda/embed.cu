// The embedding of each token of a step.
//
//   out[t, :] = table[id, :],   id = token_ids[t], or last_samples[-1 - token_ids[t]] where that is below 0
//
// Launch contract:
//   grid    (num_tokens, 1, 1)        one block a token
//   block   (128, 1, 1)
//   smem    0 B dynamic
//   macros  SCALAR in {float, __half, __nv_bfloat16}
//   arch    sm_80 and up
//
// Arguments, in order:
//   out           SCALAR [num_tokens, hidden_size]
//   table         SCALAR [vocab_size, hidden_size]
//   token_ids     i32 [num_tokens]         a token, or -1 - slot: that slot's last sample
//   last_samples  i32 [num_slots]
//   hidden_size   i32                      a multiple of 16 / sizeof(SCALAR)
//
// Tensors are contiguous, their bases 16-byte aligned. `out` overlaps nothing. Ids are not checked.
//
// Numerics: a copy.

#include "common.cuh"

#ifndef SCALAR
#error "define SCALAR as float, __half or __nv_bfloat16"
#endif

extern "C" __global__ void __launch_bounds__(128)
    embed(SCALAR* out, const SCALAR* table, const int* token_ids, const int* last_samples,
          int hidden_size) {
  using Pack = fastserve::Vec<SCALAR>;
  int id = token_ids[blockIdx.x];
  if (id < 0) id = last_samples[-1 - id];
  const Pack* from = reinterpret_cast<const Pack*>(table + static_cast<long long>(id) * hidden_size);
  Pack* to = reinterpret_cast<Pack*>(out + static_cast<long long>(blockIdx.x) * hidden_size);
  for (int i = threadIdx.x; i < hidden_size / Pack::kSize; i += blockDim.x) to[i] = from[i];
}
