// CUDA C++ on the CPU, for tests: what a `.cu` file sees in place of NVIDIA's headers.
//
// One fiber stands for one CUDA thread, one block runs after the other, and fibers change only at
// barriers and warp collectives, so a run is deterministic. `../README.md` says what is noticed and
// what is not.
#pragma once

#define FASTSERVE_EMULATOR 1

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __global__
#define __device__
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
// `build.py` turns each declaration of shared memory into a reference to memory that is NaN when a
// block starts; it refuses a file in which one is left.

#include "vectors.h"

#include "fibers.h"

#include "warp.h"

#include "numbers.h"

#define threadIdx (::emulator::state.current->index)
#define blockIdx (::emulator::state.block)
#define blockDim (::emulator::state.block_size)
#define gridDim (::emulator::state.grid_size)
#define warpSize 32
