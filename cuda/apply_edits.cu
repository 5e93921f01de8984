// A plan's edits of the block tables, applied to the device's copy of them, in order.
//
//   block_tables[slot, index] = block   for each edit; the last of several for one place holds
//
// Launch contract:
//   grid    (1, 1, 1)
//   block   (256, 1, 1)               a thread has the slots that leave its number when divided by 256
//   smem    0 B dynamic
//   macros  none
//   arch    sm_80 and up
//
// Arguments, in order:
//   block_tables  i32 [num_slots, max_blocks]
//   edits         i32 [num_edits, 3]       slot, index, block
//   num_edits     i32
//   max_blocks    i32
//
// Numerics: a copy.

#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    apply_edits(int* block_tables, const int* edits, int num_edits, int max_blocks) {
  for (int i = 0; i < num_edits; ++i) {
    const int slot = edits[3 * i];
    if (slot % 256 != threadIdx.x) continue;
    block_tables[static_cast<long long>(slot) * max_blocks + edits[3 * i + 1]] = edits[3 * i + 2];
  }
}
