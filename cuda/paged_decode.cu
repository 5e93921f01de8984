// Attention of rows with one query token: a partial for each range of 256 keys.
//
//   o[h, :] = sum over keys t of softmax(cap(q[h, :] . k[t, :] * scale))[t] * v[t, :]
//
// A block attends one range of one row for one KV head, all query heads of its group at once; each of
// its 4 warps has one unit of 64 keys. A row of a single range is finished here, others by
// paged_merge.cu.
//
// Launch contract:
//   grid    (max_ranges, num_kv_heads, num_rows)   max_ranges >= ceil(longest sequence / 256);
//           65,535 rows at most
//   block   (128, 1, 1)               4 warps, a unit of keys each
//   smem    (16 + 4 * STAGES * 16) * ROW * sizeof(SCALAR) + 512 B dynamic, where
//           ROW = HEAD_DIM + 16 / sizeof(SCALAR), STAGES = 4 if HEAD_DIM * sizeof(SCALAR) <= 256 else 2
//   macros  SCALAR in {float, __half, __nv_bfloat16}; HEAD_DIM, a multiple of 16; BLOCK_SIZE
//   arch    sm_80 and up; HEAD_DIM 256 of float takes 147 KiB, more than sm_86, sm_89 and sm_120 have
//
// Arguments, in order:
//   out              SCALAR [num_tokens, num_kv_heads * group, HEAD_DIM]   rows of a single range
//   partial_out      f32 [num_rows, num_kv_heads * group, max_ranges, HEAD_DIM]      other rows
//   partial_weights  f32 [num_rows, num_kv_heads * group, max_ranges, 2]    largest exponent, sum
//   q                SCALAR [num_tokens, num_kv_heads * group, HEAD_DIM]
//   k_cache          SCALAR [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
//   v_cache          SCALAR [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
//   block_tables     i32 [num_slots, max_blocks]
//   row_slots        i32 [num_rows]
//   query_indptr     i32 [num_rows + 1]     rows with another number of tokens than 1 are left alone
//   seq_lens         i32 [num_rows]         keys there are, the query's own included; 0: a padding row
//   max_blocks       i32
//   group            i32                    1 to 16: query heads of a KV head
//   window           i32                    at least 0: keys a query sees, its own included; 0: all
//   scale            f32
//   soft_cap         f32                    at least 0: scores become soft_cap * tanh(score / soft_cap); 0: they stay
//
// Tensors are contiguous, their bases 16-byte aligned. `out` overlaps nothing.
//
// Numerics: see attention.cuh. The bits are those of paged_chunk.cu for the same query and keys, and do
// not depend on the launch.

#include "attention.cuh"

#if !defined(SCALAR) || !defined(HEAD_DIM) || !defined(BLOCK_SIZE)
#error "define SCALAR, HEAD_DIM and BLOCK_SIZE"
#endif

namespace fastserve {

using Heads = Product<SCALAR, HEAD_DIM>;

constexpr int kNumWarps = kUnitsOfRange;
constexpr int kVector = Vec<SCALAR>::kSize;
constexpr int kVectorsOfRow = HEAD_DIM / kVector;
constexpr int kTileNumbers = kTileKeys * Heads::kRow;
constexpr int kStages = HEAD_DIM * static_cast<int>(sizeof(SCALAR)) <= 256 ? 4 : 2;
static_assert(kStages * Heads::kRow * sizeof(SCALAR) >= HEAD_DIM * sizeof(float),
              "a warp's result goes where its tiles were");

// The tiles of a warp's unit, keys first, then values, on their way through kStages places.
struct Ring {
  SCALAR* tiles;
  const SCALAR* k_cache;
  const SCALAR* v_cache;
  Paged<SCALAR, HEAD_DIM, BLOCK_SIZE> pages;
  int first_key, end_key;
  int first_visible;  // keys before it are zeros
  int num_tiles;  // of keys, and as many of values
  int num_asked = 0, num_taken = 0;

  __device__ __forceinline__ void ask() {
    if (num_asked < 2 * num_tiles) {
      const bool is_key = num_asked < num_tiles;
      const SCALAR* cache = is_key ? k_cache : v_cache;
      const int tile_key = first_key + (is_key ? num_asked : num_asked - num_tiles) * kTileKeys;
      SCALAR* tile = tiles + num_asked % kStages * kTileNumbers;
      for (int i = threadIdx.x % kWarpSize; i < kTileKeys * kVectorsOfRow; i += kWarpSize) {
        const int row = i / kVectorsOfRow, column = i % kVectorsOfRow * kVector;
        const int key = tile_key + row;
        const bool is_there = key >= first_visible && key < end_key;
        cp_async_16(tile + row * Heads::kRow + column,
                    cache + (is_there ? pages.at(key) + column : 0), is_there);
      }
    }
    ++num_asked;
    cp_async_commit();
  }

  // The next tile. Every lane is done with the one before, whose place is asked for again.
  __device__ __forceinline__ const SCALAR* take() {
    cp_async_wait<kStages - 2>();
    __syncwarp();
    ask();
    return tiles + num_taken++ % kStages * kTileNumbers;
  }
};

}  // namespace fastserve

extern "C" __global__ void __launch_bounds__(128, 1)
    paged_decode(SCALAR* out, float* partial_out, float* partial_weights, const SCALAR* q,
                 const SCALAR* k_cache, const SCALAR* v_cache, const int* block_tables,
                 const int* row_slots, const int* query_indptr, const int* seq_lens, int max_blocks,
                 int group, int window, float scale, float soft_cap) {
  using namespace fastserve;
  extern __shared__ __align__(16) unsigned char shared[];

  const int range = blockIdx.x, kv_head = blockIdx.y, row = blockIdx.z;
  const int token = query_indptr[row], seq_len = seq_lens[row];
  if (query_indptr[row + 1] - token != 1 || seq_len == 0) return;
  const int first_visible = window > 0 ? max(0, seq_len - window) : 0;
  const int begin = range * kRangeKeys, end = min(begin + kRangeKeys, seq_len);
  if (begin >= end || end <= first_visible) return;

  const int num_heads = gridDim.y * group;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  SCALAR* queries = reinterpret_cast<SCALAR*>(shared);
  SCALAR* tiles = queries + kRowsOfWarp * Heads::kRow;
  float* weights_of_units = reinterpret_cast<float*>(tiles + kNumWarps * kStages * kTileNumbers);

  const long long first_head = static_cast<long long>(token) * num_heads + kv_head * group;
  for (int i = threadIdx.x; i < kRowsOfWarp * kVectorsOfRow; i += blockDim.x) {
    const int head = i / kVectorsOfRow, column = i % kVectorsOfRow * kVector;
    const bool is_there = head < group;
    cp_async_16(queries + head * Heads::kRow + column,
                q + (is_there ? (first_head + head) * HEAD_DIM + column : 0), is_there);
  }
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();

  // A warp's unit: 16 rows by 64 keys.
  const int unit_begin = begin + warp * kUnitKeys, unit_end = min(unit_begin + kUnitKeys, end);
  const bool has_unit = unit_begin < unit_end && unit_end > first_visible;
  SCALAR* own_tiles = tiles + warp * kStages * kTileNumbers;
  if (has_unit) {
    const int* table = block_tables + static_cast<long long>(row_slots[row]) * max_blocks;
    Ring ring{own_tiles,
              k_cache,
              v_cache,
              {table, static_cast<int>(gridDim.y), kv_head},
              unit_begin,
              unit_end,
              first_visible,
              (unit_end - unit_begin + kTileKeys - 1) / kTileKeys};
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) ring.ask();

    float scores[2 * kTilesOfUnit][4] = {};
#pragma unroll
    for (int tile = 0; tile < kTilesOfUnit; ++tile) {
      if (tile < ring.num_tiles) {
        Heads::scores(queries, ring.take(), scores[2 * tile], scores[2 * tile + 1]);
      }
    }
    Visible visible;
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const bool is_there = lane / 4 + 8 * which < group;
      visible.first[which] = first_visible;
      visible.last[which] = is_there ? seq_len - 1 : -1;
    }
    float most[2], sum[2];
    weigh<SCALAR>(scores, unit_begin, visible, Scores{scale, soft_cap}, most, sum);
    typename Heads::Weights weights;
    Heads::pack(scores, weights);

    float unit[HEAD_DIM / 8][4] = {};
#pragma unroll
    for (int tile = 0; tile < kTilesOfUnit; ++tile) {
      if (tile < ring.num_tiles) {
        const SCALAR* values = ring.take();
#pragma unroll
        for (int column = 0; column < HEAD_DIM; column += 16) {
          Heads::values(weights, tile, values, column, unit[column / 8], unit[column / 8 + 1]);
        }
      }
    }
    cp_async_wait<0>();
    __syncwarp();  // Every lane is done with the tiles.
    float* result = reinterpret_cast<float*>(own_tiles);
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const int head = lane / 4 + 8 * which;
      if (head < group) {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; ++i) {
          float* at = result + head * HEAD_DIM + 8 * i + lane % 4 * 2;
          at[0] = unit[i][2 * which];
          at[1] = unit[i][2 * which + 1];
        }
        if (lane % 4 == 0) {
          weights_of_units[(warp * kRowsOfWarp + head) * 2] = most[which];
          weights_of_units[(warp * kRowsOfWarp + head) * 2 + 1] = sum[which];
        }
      }
    }
  } else if (lane < kRowsOfWarp) {
    weights_of_units[(warp * kRowsOfWarp + lane) * 2] = minus_infinity();
  }
  __syncthreads();

  const bool is_single = first_visible / kRangeKeys == (seq_len - 1) / kRangeKeys;
  for (int i = threadIdx.x; i < group * HEAD_DIM; i += blockDim.x) {
    const int head = i / HEAD_DIM, column = i % HEAD_DIM;
    float most = minus_infinity(), sum = 0.0f, value = 0.0f;
#pragma unroll
    for (int unit = 0; unit < kUnitsOfRange; ++unit) {
      const float* weight = weights_of_units + (unit * kRowsOfWarp + head) * 2;
      if (weight[0] == minus_infinity()) continue;
      const float* result = reinterpret_cast<const float*>(tiles + unit * kStages * kTileNumbers);
      const Fold fold(most, weight[0]);
      most = fold.most;
      sum = fold(sum, weight[1]);
      value = fold(value, result[head * HEAD_DIM + column]);
    }
    if (is_single) {
      const Fold fold(minus_infinity(), most);
      out[(first_head + head) * HEAD_DIM + column] =
          from_float<SCALAR>(__fdiv_rn(fold(0.0f, value), fold(0.0f, sum)));
    } else {
      const long long at =
          (static_cast<long long>(row) * num_heads + kv_head * group + head) * gridDim.x + range;
      partial_out[at * HEAD_DIM + column] = value;
      if (column == 0) {
        partial_weights[at * 2] = most;
        partial_weights[at * 2 + 1] = sum;
      }
    }
  }
}
