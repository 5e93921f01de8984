// Causal attention of rows with several query tokens (prefill, chunks of it, verification) over the
// whole context, cached or of the step.
//
//   o[i, h, :] = sum over keys t <= position of i of softmax(cap(q[i, h, :] . k[t, :] * scale))[t] * v[t, :]
//
// A block attends a tile of rows, pairs of token and head of one KV head's group, over all keys that the
// tile sees, a unit of 64 keys at a time: while a unit's values are multiplied, the next one's keys come.
// A warp has 16 rows; of heads of more than 128 numbers it has half of the columns, and another warp, which
// makes the same scores, the other half: a thread's registers hold no more.
//
// Launch contract:
//   grid    (max_tiles, num_kv_heads, num_rows)   max_tiles >= ceil(most tokens of a row / (ROWS / group));
//           65,535 rows at most
//   block   (2 * ROWS * PARTS, 1, 1)  PARTS = 2 if HEAD_DIM > 128 else 1
//   smem    (ROWS + 128) * ROW * sizeof(SCALAR) + ROWS * HEAD_DIM * 4 B dynamic, where
//           ROW = HEAD_DIM + 16 / sizeof(SCALAR), ROWS = 64, or 32 if SCALAR is float
//   macros  SCALAR in {float, __half, __nv_bfloat16}; HEAD_DIM, a multiple of 16; BLOCK_SIZE
//   arch    sm_80 and up; HEAD_DIM 256 takes 163 KiB, more than sm_86, sm_89 and sm_120 have, and of
//           float 195 KiB, which sm_80 lacks too
//
// Arguments, in order:
//   out           SCALAR [num_tokens, num_kv_heads * group, HEAD_DIM]
//   q             SCALAR [num_tokens, num_kv_heads * group, HEAD_DIM]
//   k_cache       SCALAR [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]   the step's own keys stored
//   v_cache       SCALAR [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
//   block_tables  i32 [num_slots, max_blocks]
//   row_slots     i32 [num_rows]
//   query_indptr  i32 [num_rows + 1]     rows of less than 2 tokens are left alone
//   seq_lens      i32 [num_rows]         keys there are, those of the queries included; 0: a padding row
//   max_blocks    i32
//   group         i32                    1 to 16: query heads of a KV head
//   window        i32                    at least 0: keys a query sees, its own included; 0: all
//   scale         f32
//   soft_cap      f32                    at least 0: scores become soft_cap * tanh(score / soft_cap); 0: they stay
//
// Tensors are contiguous, their bases 16-byte aligned. `out` overlaps nothing.
//
// Numerics: see attention.cuh. The bits are those of paged_decode.cu for the same query and keys, and do
// not depend on the launch, on other rows, or on how a prompt is cut into chunks.

#include "attention.cuh"

#if !defined(SCALAR) || !defined(HEAD_DIM) || !defined(BLOCK_SIZE)
#error "define SCALAR, HEAD_DIM and BLOCK_SIZE"
#endif

namespace fastserve {

using Heads = Product<SCALAR, HEAD_DIM>;

constexpr int kRowWarps = sizeof(SCALAR) == 4 ? 2 : 4;
constexpr int kParts = HEAD_DIM > 128 ? 2 : 1;
constexpr int kColumns = HEAD_DIM / kParts;  // of a warp
constexpr int kNumThreads = kRowWarps * kParts * kWarpSize;
constexpr int kRows = kRowWarps * kRowsOfWarp;
constexpr int kVector = Vec<SCALAR>::kSize;
constexpr int kVectorsOfRow = HEAD_DIM / kVector;

// Ask for a unit of keys or values; zeros before `first` and from `end` on.
__device__ __forceinline__ void ask(SCALAR* unit, const SCALAR* cache,
                                    const Paged<SCALAR, HEAD_DIM, BLOCK_SIZE>& pages, int first_key,
                                    int first, int end) {
  for (int i = threadIdx.x; i < kUnitKeys * kVectorsOfRow; i += kNumThreads) {
    const int row = i / kVectorsOfRow, column = i % kVectorsOfRow * kVector;
    const int key = first_key + row;
    const bool is_there = key >= first && key < end;
    cp_async_16(unit + row * Heads::kRow + column, cache + (is_there ? pages.at(key) + column : 0),
                is_there);
  }
  cp_async_commit();
}

// A partial of the lane's two rows, in registers.
struct Partial {
  float most[2], sum[2];
  float out[kColumns / 8][4];

  __device__ __forceinline__ void clear() {
    most[0] = most[1] = minus_infinity();
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
#pragma unroll
      for (int part = 0; part < 4; ++part) out[i][part] = 0.0f;
    }
  }
};

}  // namespace fastserve

extern "C" __global__ void __launch_bounds__(fastserve::kNumThreads, 1)
    paged_chunk(SCALAR* out, const SCALAR* q, const SCALAR* k_cache, const SCALAR* v_cache,
                const int* block_tables, const int* row_slots, const int* query_indptr,
                const int* seq_lens, int max_blocks, int group, int window, float scale,
                float soft_cap) {
  using namespace fastserve;
  extern __shared__ __align__(16) unsigned char shared[];

  const int kv_head = blockIdx.y, row = blockIdx.z;
  const int first_token = query_indptr[row], num_tokens = query_indptr[row + 1] - first_token;
  const int seq_len = seq_lens[row];
  const int tokens_of_tile = kRows / group, tile_token = blockIdx.x * tokens_of_tile;
  if (num_tokens < 2 || seq_len == 0 || tile_token >= num_tokens) return;

  const int start = seq_len - num_tokens;  // position of the row's first token
  const int end_token = min(tile_token + tokens_of_tile, num_tokens);
  const int end = start + end_token;  // keys from here on are seen by no row of the tile
  const int first = window > 0 ? max(0, start + tile_token + 1 - window) : 0;
  const int num_heads = gridDim.y * group;
  const int lane = threadIdx.x % kWarpSize;
  const int warp_row = threadIdx.x / kWarpSize % kRowWarps * kRowsOfWarp;
  const int warp_column = threadIdx.x / kWarpSize / kRowWarps * kColumns;

  SCALAR* queries = reinterpret_cast<SCALAR*>(shared);
  SCALAR* keys = queries + kRows * Heads::kRow;
  SCALAR* values = keys + kUnitKeys * Heads::kRow;
  // Folded ranges: each thread's numbers, side by side with the other threads'.
  float* total = reinterpret_cast<float*>(values + kUnitKeys * Heads::kRow) + threadIdx.x;
  float total_most[2] = {minus_infinity(), minus_infinity()}, total_sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) total[i * kNumThreads] = 0.0f;

  // Row r of the tile: token r / group, head r % group.
  auto query_at = [&](int tile_row) {
    const long long token = first_token + tile_token + tile_row / group;
    return (token * num_heads + kv_head * group + tile_row % group) * HEAD_DIM;
  };
  const int num_rows = (end_token - tile_token) * group;
  for (int i = threadIdx.x; i < kRows * kVectorsOfRow; i += kNumThreads) {
    const int tile_row = i / kVectorsOfRow, column = i % kVectorsOfRow * kVector;
    const bool is_there = tile_row < num_rows;
    cp_async_16(queries + tile_row * Heads::kRow + column,
                q + (is_there ? query_at(tile_row) + column : 0), is_there);
  }
  Visible visible;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const int tile_row = warp_row + lane / 4 + 8 * which;
    const int position = start + tile_token + tile_row / group;
    visible.first[which] = window > 0 ? max(0, position + 1 - window) : 0;
    visible.last[which] = tile_row < num_rows ? position : -1;
  }

  const int* table = block_tables + static_cast<long long>(row_slots[row]) * max_blocks;
  const Paged<SCALAR, HEAD_DIM, BLOCK_SIZE> pages{table, static_cast<int>(gridDim.y), kv_head};
  const SCALAR* own_queries = queries + warp_row * Heads::kRow;
  const int first_unit = first / kUnitKeys, end_unit = (end + kUnitKeys - 1) / kUnitKeys;
  Partial range;
  range.clear();

  ask(keys, k_cache, pages, first_unit * kUnitKeys, first, end);
  for (int unit = first_unit; unit < end_unit; ++unit) {
    const int unit_key = unit * kUnitKeys;
    ask(values, v_cache, pages, unit_key, first, end);
    cp_async_wait<1>();
    __syncthreads();  // The keys are there.
    float scores[2 * kTilesOfUnit][4] = {};
#pragma unroll
    for (int tile = 0; tile < kTilesOfUnit; ++tile) {
      Heads::scores(own_queries, keys + tile * kTileKeys * Heads::kRow, scores[2 * tile],
                    scores[2 * tile + 1]);
    }
    __syncthreads();  // All are done with the keys.
    if (unit + 1 < end_unit) {
      ask(keys, k_cache, pages, unit_key + kUnitKeys, first, end);
    } else {
      cp_async_commit();
    }
    float most[2], sum[2];
    weigh<SCALAR>(scores, unit_key, visible, Scores{scale, soft_cap}, most, sum);
    typename Heads::Weights weights;
    Heads::pack(scores, weights);
    const Fold folds[2] = {Fold(range.most[0], most[0]), Fold(range.most[1], most[1])};
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      range.most[which] = folds[which].most;
      range.sum[which] = folds[which](range.sum[which], sum[which]);
    }
    cp_async_wait<1>();
    __syncthreads();  // The values are there.
#pragma unroll
    for (int column = 0; column < kColumns; column += 16) {
      float products[2][4] = {};
#pragma unroll
      for (int tile = 0; tile < kTilesOfUnit; ++tile) {
        Heads::values(weights, tile, values + tile * kTileKeys * Heads::kRow, warp_column + column,
                      products[0], products[1]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int part = 0; part < 4; ++part) {
          float& kept = range.out[column / 8 + half][part];
          kept = folds[part / 2](kept, products[half][part]);
        }
      }
    }
    __syncthreads();  // All are done with the values.

    if (unit % kUnitsOfRange == kUnitsOfRange - 1 || unit + 1 == end_unit) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        const Fold fold(total_most[which], range.most[which]);
        total_most[which] = fold.most;
        total_sum[which] = fold(total_sum[which], range.sum[which]);
#pragma unroll
        for (int i = 0; i < kColumns / 4; ++i) {
          const int part = 2 * which + i % 2;
          float& kept = total[(4 * (i / 2) + part) * kNumThreads];
          kept = fold(kept, range.out[i / 2][part]);
        }
      }
      range.clear();
    }
  }
  cp_async_wait<0>();

#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const int tile_row = warp_row + lane / 4 + 8 * which;
    if (tile_row < num_rows) {
      SCALAR* to = out + query_at(tile_row) + warp_column + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) {
        const int part = 2 * which + i % 2;
        to[8 * (i / 2) + i % 2] =
            from_float<SCALAR>(__fdiv_rn(total[(4 * (i / 2) + part) * kNumThreads], total_sum[which]));
      }
    }
  }
}
