// Copies of blocks within the pool, over all layers: what a plan lists under `copies`.
//
//   cache[l, into, :] = cache[l, from, :]   for each pair (from, into) and each layer's keys and values
//
// Launch contract:
//   grid    (num_copies, num_planes, 1)   a plane is one layer's keys or values
//   block   (256, 1, 1)
//   smem    0 B dynamic
//   macros  none
//   arch    sm_80 and up
//
// Arguments, in order:
//   cache        i32x4 [num_planes, num_blocks, block_vectors]   of any type
//   copies       i32 [num_copies, 2]      from, into; no block is in two pairs
//   num_blocks   i64
//   block_vectors  i32                    16-byte vectors of a block in a plane
//
// Numerics: a copy.

#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    copy_blocks(int4* cache, const int* copies, long long num_blocks, int block_vectors) {
  const long long plane = static_cast<long long>(blockIdx.y) * num_blocks;
  const int4* from = cache + (plane + copies[2 * blockIdx.x]) * block_vectors;
  int4* into = cache + (plane + copies[2 * blockIdx.x + 1]) * block_vectors;
  for (int i = threadIdx.x; i < block_vectors; i += blockDim.x) into[i] = from[i];
}
