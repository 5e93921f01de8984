// What the kernels of paged attention share: the order in which a row is attended, and so its bits.
//
// Keys are cut at absolute positions, whatever row, chunk or step they are attended in:
//
//   tile    16 keys    one step of a matrix product
//   unit    64 keys    scores, one maximum, weights, their product with the values
//   range  256 keys    units folded in ascending order: a partial
//   row                ranges folded in ascending order, then divided
//
// A row's result is a function of its query and its keys alone: decode and chunk kernels do the same
// operations in the same order, and how ranges are spread over blocks changes nothing. Keys of a unit
// that a row sees others of add exact zeros, if their values are finite; a unit that it sees nothing of is
// skipped. Keys that no row of a block sees are not read.
//
// Rows of a product are pairs (token, query head of the KV head's group), 16 to a warp. A lane has the
// elements of mma.m16n8k16: rows lane / 4 and lane / 4 + 8, columns 2 * (lane % 4) and the next.
//
// Scores and sums are fp32. Weights are rounded to SCALAR before anything is done with them, so that
// they and the sum that results are divided by still make one. fp32 queries use fp32 throughout.
#pragma once

#include "ptx.cuh"

namespace fastserve {

constexpr int kTileKeys = 16;
constexpr int kUnitKeys = 64;
constexpr int kRangeKeys = 256;
constexpr int kTilesOfUnit = kUnitKeys / kTileKeys;
constexpr int kUnitsOfRange = kRangeKeys / kUnitKeys;
constexpr int kRowsOfWarp = 16;
constexpr float kLog2E = 1.4426950408889634f;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// Keys and values of one layer: [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM] each.
template <typename T, int kHeadDim, int kBlockSize> struct Paged {
  const int* table;
  int num_kv_heads;
  int kv_head;

  // Offset of a key's numbers. The key must be the sequence's.
  __device__ __forceinline__ long long at(int key) const {
    const long long block = table[key / kBlockSize];
    return ((block * num_kv_heads + kv_head) * kBlockSize + key % kBlockSize) * kHeadDim;
  }
};

// What is visible to the two rows of a lane, inclusive. A padding row has last < first.
struct Visible {
  int first[2];
  int last[2];
};

// How a raw score becomes the exponent of two.
struct Scores {
  float scale;     // of the dot product
  float soft_cap;  // 0: none

  __device__ __forceinline__ float exponent(float score) const {
    if (soft_cap == 0.0f) return __fmul_rn(score, __fmul_rn(scale, kLog2E));
    return __fmul_rn(__fmul_rn(soft_cap, tanhf(__fdiv_rn(__fmul_rn(score, scale), soft_cap))), kLog2E);
  }
};

// The factors by which two partials of maxima `kept` and `taken` become one.
struct Fold {
  float most, keep, take;
  bool has_kept, has_taken;

  __device__ __forceinline__ Fold(float kept, float taken) {
    most = fmaxf(kept, taken);
    has_kept = kept != minus_infinity();
    has_taken = taken != minus_infinity();
    keep = exp2f(kept - most);
    take = exp2f(taken - most);
  }
  // A partial that saw nothing counts for nothing, whatever stands in it.
  __device__ __forceinline__ float operator()(float kept, float taken) const {
    const float rest = has_kept ? __fmul_rn(kept, keep) : 0.0f;
    return has_taken ? __fmaf_rn(taken, take, rest) : rest;
  }
};

// Products of 16 rows with a tile of keys or values in shared memory.
template <typename T, int kHeadDim> struct Product {
  static constexpr int kRow = kHeadDim + 8;  // numbers from one row to the next: no bank conflicts

  struct Weights {
    unsigned at[kTilesOfUnit][4];
  };

  // low[] and high[]: scores of the tile's first and last 8 keys.
  static __device__ __forceinline__ void scores(const T* queries, const T* keys, float (&low)[4],
                                                float (&high)[4]) {
    const int lane = threadIdx.x % kWarpSize, matrix = lane / 8, row = lane % 8;
    const T* a_row = queries + (matrix % 2 * 8 + row) * kRow + matrix / 2 * 8;
    const T* b_row = keys + (matrix / 2 * 8 + row) * kRow + matrix % 2 * 8;
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 16) {
      unsigned a[4], b[4];
      ldmatrix_x4(a, a_row + d);
      ldmatrix_x4(b, b_row + d);
      mma_m16n8k16<T>(low, a, b[0], b[1]);
      mma_m16n8k16<T>(high, a, b[2], b[3]);
    }
  }

  static __device__ __forceinline__ void pack(const float (&weights)[2 * kTilesOfUnit][4],
                                              Weights& packed) {
#pragma unroll
    for (int tile = 0; tile < kTilesOfUnit; ++tile) {
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const float(&four)[4] = weights[2 * tile + part / 2];
        packed.at[tile][part] = pair(four[part % 2 * 2], four[part % 2 * 2 + 1]);
      }
    }
  }

  // Add a tile's weights times 16 columns of its values.
  static __device__ __forceinline__ void values(const Weights& weights, int tile, const T* values,
                                                int column, float (&low)[4], float (&high)[4]) {
    const int lane = threadIdx.x % kWarpSize, matrix = lane / 8, row = lane % 8;
    unsigned b[4];
    ldmatrix_x4_trans(b, values + (matrix % 2 * 8 + row) * kRow + matrix / 2 * 8 + column);
    mma_m16n8k16<T>(low, weights.at[tile], b[0], b[1]);
    mma_m16n8k16<T>(high, weights.at[tile], b[2], b[3]);
  }

 private:
  static __device__ __forceinline__ unsigned pair(float first, float second) {
    union {
      T two[2];
      unsigned word;
    } both;
    both.two[0] = from_float<T>(first);
    both.two[1] = from_float<T>(second);
    return both.word;
  }
};

// fp32: chains of fused multiply-adds in ascending order, on the same elements.
template <int kHeadDim> struct Product<float, kHeadDim> {
  static constexpr int kRow = kHeadDim + 4;

  struct Weights {
    float at[2 * kTilesOfUnit][4];
  };

  static __device__ __forceinline__ void scores(const float* queries, const float* keys,
                                                float (&low)[4], float (&high)[4]) {
    const int lane = threadIdx.x % kWarpSize, row = lane / 4, column = lane % 4 * 2;
#pragma unroll 2
    for (int d = 0; d < kHeadDim; ++d) {
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const float query = queries[(row + part / 2 * 8) * kRow + d];
        const int key = column + part % 2;
        low[part] = __fmaf_rn(query, keys[key * kRow + d], low[part]);
        high[part] = __fmaf_rn(query, keys[(key + 8) * kRow + d], high[part]);
      }
    }
  }

  static __device__ __forceinline__ void pack(const float (&weights)[2 * kTilesOfUnit][4],
                                              Weights& packed) {
#pragma unroll
    for (int i = 0; i < 2 * kTilesOfUnit; ++i) {
#pragma unroll
      for (int part = 0; part < 4; ++part) packed.at[i][part] = weights[i][part];
    }
  }

  static __device__ __forceinline__ void values(const Weights& weights, int tile,
                                                const float* values, int column, float (&low)[4],
                                                float (&high)[4]) {
    const int lane = threadIdx.x % kWarpSize, first = column + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float(&four)[4] = weights.at[2 * tile + half];
#pragma unroll 1
      for (int owner = 0; owner < 4; ++owner) {
        // The lane of these rows that has the weights of the next two keys.
        const int from = lane / 4 * 4 + owner;
        float weight[4];
#pragma unroll
        for (int part = 0; part < 4; ++part) weight[part] = __shfl_sync(kWholeWarp, four[part], from);
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          const float* at = values + (8 * half + 2 * owner + which) * kRow + first;
#pragma unroll
          for (int part = 0; part < 4; ++part) {
            const float of_row = weight[part / 2 * 2 + which];
            low[part] = __fmaf_rn(of_row, at[part % 2], low[part]);
            high[part] = __fmaf_rn(of_row, at[8 + part % 2], high[part]);
          }
        }
      }
    }
  }
};

// Scores of a unit become weights; `most` and `sum` are those of the lane's two rows.
template <typename T>
__device__ __forceinline__ void weigh(float (&scores)[2 * kTilesOfUnit][4], int first_key,
                                      const Visible& visible, const Scores& how, float (&most)[2],
                                      float (&sum)[2]) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float largest = minus_infinity();
#pragma unroll
    for (int i = 0; i < 2 * kTilesOfUnit; ++i) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        const int key = first_key + 8 * i + column + which;
        float& score = scores[i][2 * row + which];
        const bool is_visible = key >= visible.first[row] && key <= visible.last[row];
        score = is_visible ? how.exponent(score) : minus_infinity();
        largest = fmaxf(largest, score);
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(kWholeWarp, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kWholeWarp, largest, 2));
    const float reference = largest == minus_infinity() ? 0.0f : largest;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * kTilesOfUnit; ++i) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        float& weight = scores[i][2 * row + which];
        weight = to_float(from_float<T>(exp2f(weight - reference)));
        total += weight;
      }
    }
    total += __shfl_xor_sync(kWholeWarp, total, 1);
    total += __shfl_xor_sync(kWholeWarp, total, 2);
    // Where every score is NaN, so is the maximum: nothing was seen if the sum is zero.
    most[row] = largest == minus_infinity() && total != 0.0f ? total : largest;
    sum[row] = total;
  }
}

}  // namespace fastserve
