// The partials of paged_decode.cu become rows.
//
//   o[h, :] = fold over ranges, ascending, of partial_out[h, range, :], divided by the folded sum
//
// Launch contract:
//   grid    (num_heads, num_rows, 1)  65,535 rows at most
//   block   (HEAD_DIM, 1, 1)          a column each
//   smem    0 B dynamic
//   macros  SCALAR in {float, __half, __nv_bfloat16}; HEAD_DIM
//   arch    sm_80 and up
//
// Arguments, in order:
//   out              SCALAR [num_tokens, num_heads, HEAD_DIM]   rows of more than one range
//   partial_out      f32 [num_rows, num_heads, max_ranges, HEAD_DIM]
//   partial_weights  f32 [num_rows, num_heads, max_ranges, 2]
//   query_indptr     i32 [num_rows + 1]
//   seq_lens         i32 [num_rows]
//   max_ranges       i32                    at least 1: of the launch that made the partials
//   window           i32                    at least 0: as there
//
// Rows of one range, rows with another number of tokens than 1 and padding rows are left alone.
//
// Numerics: see attention.cuh.

#include "attention.cuh"

#if !defined(SCALAR) || !defined(HEAD_DIM)
#error "define SCALAR and HEAD_DIM"
#endif

extern "C" __global__ void __launch_bounds__(HEAD_DIM)
    paged_merge(SCALAR* out, const float* partial_out, const float* partial_weights,
                const int* query_indptr, const int* seq_lens, int max_ranges, int window) {
  using namespace fastserve;
  const int head = blockIdx.x, row = blockIdx.y, num_heads = gridDim.x;
  const int token = query_indptr[row], seq_len = seq_lens[row];
  if (query_indptr[row + 1] - token != 1 || seq_len == 0) return;
  const int first = (window > 0 ? max(0, seq_len - window) : 0) / kRangeKeys;
  const int last = (seq_len - 1) / kRangeKeys;
  if (first == last) return;

  const long long partials = (static_cast<long long>(row) * num_heads + head) * max_ranges;
  float most = minus_infinity(), sum = 0.0f, value = 0.0f;
  for (int range = first; range <= last; ++range) {
    const float* weight = partial_weights + (partials + range) * 2;
    const Fold fold(most, weight[0]);
    most = fold.most;
    sum = fold(sum, weight[1]);
    value = fold(value, partial_out[(partials + range) * HEAD_DIM + threadIdx.x]);
  }
  out[(static_cast<long long>(token) * num_heads + head) * HEAD_DIM + threadIdx.x] =
      from_float<SCALAR>(__fdiv_rn(value, sum));
}
