//! Every public kernel at exact sizes, odd ones too: for guard pages and for memcheck to watch. What they
//! compute is checked elsewhere.

use std::sync::Arc;

use fastserve_cpu::{
    Attention, Bf16, DType, Decoder, Draws, KvCache, KvDType, KvLayout, KvView, KvViewMut, Layer,
    Matrix, MatrixMut, Model, Norm, Numbers, Packed, Pool, Rope, Step, Weight, WeightFormat,
    best_tokens, decode, draw_tokens, gather, kv_shape, linear, linear_silu_mul, paged_attention,
    rms_norm, rope_and_write_kv, row_logprobs, silu_mul,
};

use super::blocks::random_block;
use super::guards::{case, unguarded};
use super::{DTYPES, Noise};

/// Numbers of either type, as many as the memory has room for.
enum Data {
    F32(Box<[f32]>),
    Bf16(Box<[Bf16]>),
}

impl Data {
    fn new(dtype: DType, len: usize, noise: &mut Noise) -> Self {
        match dtype {
            DType::F32 => Self::F32((0..len).map(|_| noise.next()).collect()),
            DType::Bf16 => Self::Bf16((0..len).map(|_| Bf16::from_f32(noise.next())).collect()),
        }
    }

    fn start(&mut self) -> *mut u8 {
        match self {
            Self::F32(data) => data.as_mut_ptr().cast(),
            Self::Bf16(data) => data.as_mut_ptr().cast(),
        }
    }

    fn view(&self, num_cols: usize) -> Matrix<'_> {
        match self {
            Self::F32(data) => Matrix::f32(data, num_cols),
            Self::Bf16(data) => Matrix::bf16(data, num_cols),
        }
    }

    fn view_mut(&mut self, num_cols: usize) -> MatrixMut<'_> {
        match self {
            Self::F32(data) => MatrixMut::f32(data, num_cols),
            Self::Bf16(data) => MatrixMut::bf16(data, num_cols),
        }
    }
}

fn words(len: usize, word: impl Fn(usize) -> usize) -> Box<[i32]> {
    (0..len).map(|i| word(i) as i32).collect()
}

/// Rows of a weight in the format of a file.
fn file_rows(format: WeightFormat, rows: usize, cols: usize, noise: &mut Noise) -> Box<[u8]> {
    let num_blocks = rows * cols / format.block_elements();
    let make = || (0..num_blocks).flat_map(|_| random_block(format, noise)).collect::<Vec<_>>();
    unguarded(make).as_slice().into()
}

fn packed(format: WeightFormat, rows: usize, cols: usize, noise: &mut Noise) -> Packed {
    let mut packed = Packed::new(format, rows, cols).unwrap();
    packed.fill(0, &file_rows(format, rows, cols, noise)).unwrap();
    packed
}

fn weight(format: WeightFormat, rows: usize, cols: usize, noise: &mut Noise) -> Weight {
    Weight::new(vec![packed(format, rows, cols, noise)]).unwrap()
}

fn lengths(format: WeightFormat) -> &'static [usize] {
    match format.block_elements() {
        1 => &[1, 37, 130],
        32 => &[32, 160],
        _ => &[256, 512],
    }
}

pub(crate) fn products(pool: &Pool, noise: &mut Noise) {
    for format in WeightFormat::OF_FILES.into_iter().chain([WeightFormat::I8]) {
        for (&len, num_cols) in lengths(format).iter().flat_map(|len| [1, 17, 70].map(|n| (len, n)))
        {
            let weight = weight(format, num_cols, len, noise);
            for (num_rows, dtype) in [1, 3, 5, 33].into_iter().flat_map(|n| DTYPES.map(|d| (n, d)))
            {
                case(&format_args!("{num_rows} rows of {len} by {num_cols} {format:?}, {dtype:?}"));
                let x = Data::new(dtype, num_rows * len, noise);
                let bias = Data::new(dtype, num_cols, noise);
                let mut out = Data::new(dtype, num_rows * num_cols, noise);
                let bias = (num_rows != 3).then(|| bias.view(num_cols));
                let out = &mut out.view_mut(num_cols);
                linear(pool, &x.view(len), &weight, bias.as_ref(), out).unwrap();
            }
            gated(pool, format, num_cols, len, noise);
            for dtype in DTYPES {
                case(&format_args!("gather of {len} by {num_cols} {format:?}, {dtype:?}"));
                let rows = words(3, |i| [num_cols - 1, 0, num_cols / 2][i]);
                let mut out = Data::new(dtype, 3 * len, noise);
                gather(pool, &weight, &rows, &mut out.view_mut(len)).unwrap();
                if format == WeightFormat::I8 {
                    continue;
                }
                case(&format_args!("decoding {len} {format:?} as {dtype:?}"));
                let blocks = file_rows(format, 1, len, noise);
                match &mut Data::new(dtype, len, noise) {
                    Data::F32(out) => decode(format, &blocks, out).unwrap(),
                    Data::Bf16(out) => decode(format, &blocks, out).unwrap(),
                }
            }
        }
    }
}

/// A gated product with a norm in front.
fn gated(pool: &Pool, format: WeightFormat, num_cols: usize, len: usize, noise: &mut Noise) {
    let both = [0, 1].map(|_| packed(format, num_cols, len, noise));
    let weight = Weight::new(both.into()).unwrap();
    for (num_rows, dtype) in [1, 5].into_iter().flat_map(|n| DTYPES.map(|d| (n, d))) {
        case(&format_args!("{num_rows} gated rows of {len} by {num_cols} {format:?}, {dtype:?}"));
        let [x, scale] = [num_rows, 1].map(|rows| Data::new(dtype, rows * len, noise));
        let [mut residual, mut normed] = [0, 1].map(|_| Data::new(dtype, num_rows * len, noise));
        let mut out = Data::new(dtype, num_rows * num_cols, noise);
        let norm = Norm {
            x: x.view(len),
            residual: Some(residual.view_mut(len)),
            weight: scale.view(len),
            eps: 1e-5,
            out: normed.view_mut(len),
        };
        linear_silu_mul(pool, norm, &weight, None, &mut out.view_mut(num_cols)).unwrap();
    }
}

pub(crate) fn norm_and_gate(pool: &Pool, noise: &mut Noise) {
    for (rows, cols) in [(1, 1), (3, 7), (2, 16), (5, 37), (4, 576)] {
        for dtype in DTYPES {
            case(&format_args!("norm and gate of {rows} by {cols} {dtype:?}"));
            let x = Data::new(dtype, rows * cols, noise);
            let [mut out, mut residual] = [0, 1].map(|_| Data::new(dtype, rows * cols, noise));
            for weight_dtype in DTYPES {
                let weight = Data::new(weight_dtype, cols, noise);
                for has_residual in [false, true] {
                    let residual = has_residual.then(|| residual.view_mut(cols));
                    let (x, weight, out) = (x.view(cols), weight.view(cols), out.view_mut(cols));
                    rms_norm(pool, &Norm { x, residual, weight, eps: 1e-5, out }).unwrap();
                }
            }
            let gate_up = Data::new(dtype, rows * 2 * cols, noise);
            silu_mul(pool, &gate_up.view(2 * cols), &mut out.view_mut(cols)).unwrap();
        }
    }
}

/// One layer of keys and values, or several: words, which are aligned for every type.
fn cache(num_layers: usize, layout: KvLayout) -> Box<[f32]> {
    let len: usize = kv_shape(num_layers, layout).iter().product();
    vec![0.5; len * layout.dtype.size() / 4].into_boxed_slice()
}

pub(crate) fn rotation(pool: &Pool, noise: &mut Noise) {
    const HEADS: usize = 3;
    const TOKENS: usize = 11;
    for (head_dim, rotary) in [(8, 8), (24, 6), (64, 64), (80, 34), (256, 256)] {
        for (dtype, kv_dtype) in DTYPES.into_iter().flat_map(|d| KvDType::ALL.map(|kv| (d, kv))) {
            for block_size in [8, 16] {
                case(&format_args!(
                    "heads of {head_dim} {dtype:?}, blocks of {block_size} {kv_dtype:?}"
                ));
                let (num_blocks, num_kv_heads) = (3, 2);
                let layout =
                    KvLayout { num_blocks, num_kv_heads, block_size, head_dim, dtype: kv_dtype };
                // q, k and v side by side: the last row of v ends where the memory ends.
                let (q_size, kv_size) = (HEADS * head_dim, num_kv_heads * head_dim);
                let stride = q_size + 2 * kv_size;
                let mut fused = Data::new(dtype, TOKENS * stride, noise);
                let angles = Data::new(DType::F32, 5 * rotary, noise);
                let norms = [0, 1].map(|_| Data::new(dtype, head_dim, noise));
                let mut kv = cache(1, layout);
                // The first slot of the pool, the last one, and some between.
                let last = num_blocks * block_size - 1;
                let slot_mapping = words(TOKENS, |i| if i == 0 { 0 } else { last - 2 * (i - 1) });
                for norms in [None, Some(norms.each_ref().map(|norm| norm.view(head_dim)))] {
                    let start = fused.start();
                    let at = |column: usize| start.wrapping_add(column * dtype.size());
                    // SAFETY: three groups of columns of memory that outlives the views, one of them
                    // written, which no other view is of.
                    let (mut q, k, v) = unsafe {
                        let kv = |from| Matrix::from_raw(at(from), dtype, TOKENS, kv_size, stride);
                        let q = MatrixMut::from_raw(start, dtype, TOKENS, q_size, stride);
                        (q, kv(q_size), kv(q_size + kv_size))
                    };
                    let rope = Rope {
                        k,
                        v,
                        positions: &words(TOKENS, |i| i % 5),
                        slot_mapping: &slot_mapping,
                        cos_sin: angles.view(rotary),
                        q_norm: norms.map(|[q, _]| q),
                        k_norm: norms.map(|[_, k]| k),
                        norm_eps: 1e-5,
                    };
                    // SAFETY: words for a whole layer, borrowed by the view alone.
                    let mut kv = unsafe { KvViewMut::from_raw(kv.as_mut_ptr().cast(), layout) };
                    rope_and_write_kv(pool, &mut q, &mut kv, &rope).unwrap();
                }
            }
        }
    }
}

/// Rows whose first blocks are the pool's first, and whose last are its last; some share a range.
pub(crate) fn attention(pool: &Pool, noise: &mut Noise) {
    const LENS: [usize; 5] = [1, 270, 21, 300, 301];
    const QUERIES: [usize; 5] = [1, 9, 21, 1, 1];
    let shapes = [(8, 4, 1), (24, 3, 3), (64, 6, 2), (80, 2, 1), (256, 7, 1)];
    for (kv_dtype, block_size) in KvDType::ALL.into_iter().flat_map(|d| [8, 16, 32].map(|n| (d, n)))
    {
        for ((head_dim, num_heads, num_kv_heads), window) in
            shapes.into_iter().zip([0, 40, 0, 0, 7])
        {
            let dtype = DTYPES[usize::from(head_dim == 24)];
            case(&format_args!(
                "attention over heads of {head_dim}, blocks of {block_size} {kv_dtype:?}"
            ));
            let max_blocks = LENS[4].div_ceil(block_size);
            let num_blocks = LENS.len() * max_blocks;
            let layout =
                KvLayout { num_blocks, num_kv_heads, block_size, head_dim, dtype: kv_dtype };
            let kv = cache(1, layout);
            let num_tokens: usize = QUERIES.iter().sum();
            let q = Data::new(dtype, num_tokens * num_heads * head_dim, noise);
            let mut out = Data::new(dtype, num_tokens * num_heads * head_dim, noise);
            // The last two rows share 256 tokens.
            let num_shared = 256 / block_size;
            let block = |i: usize| {
                let (row, index) = (i / max_blocks, i % max_blocks);
                (if row == 4 && index < num_shared { 3 } else { row }) * max_blocks + index
            };
            let args = Attention {
                q: q.view(num_heads * head_dim),
                // SAFETY: words for a whole layer, borrowed for the view.
                kv: unsafe { KvView::from_raw(kv.as_ptr().cast(), layout) },
                block_tables: &words(num_blocks, block),
                max_blocks,
                row_slots: &words(5, |i| i),
                query_indptr: &words(6, |i| QUERIES[..i].iter().sum()),
                seq_lens: &words(5, |i| LENS[i]),
                num_shared_blocks: &words(5, |i| if i == 4 { num_shared } else { 0 }),
                scale: 0.1,
                window,
                softcap: if head_dim == 80 { 20.0 } else { 0.0 },
            };
            paged_attention(pool, &args, &mut out.view_mut(num_heads * head_dim)).unwrap();
        }
    }
}

pub(crate) fn sampling(pool: &Pool, noise: &mut Noise) {
    const ROWS: usize = 3;
    for num_cols in [1, 7, 16, 100, 4097] {
        case(&format_args!("sampling from {num_cols} tokens"));
        let logits = Data::new(DType::F32, ROWS * num_cols, noise);
        let logits = logits.view(num_cols);
        best_tokens(pool, &logits).unwrap();
        for (top_k, top_p, min_p) in [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.8, 0.0), (3, 0.9, 0.1)] {
            let draws = Draws {
                rows: &words(ROWS, |i| ROWS - 1 - i),
                temperature: &vec![0.8; ROWS].into_boxed_slice(),
                top_k: &words(ROWS, |_| top_k),
                top_p: &vec![top_p; ROWS].into_boxed_slice(),
                min_p: &vec![min_p; ROWS].into_boxed_slice(),
                bits: &vec![u64::MAX / 3; ROWS].into_boxed_slice(),
            };
            draw_tokens(pool, &logits, &draws).unwrap();
        }
        let rows = words(ROWS, |i| i);
        let chosen = words(ROWS, |i| (num_cols - 1) * (i % 2));
        row_logprobs(pool, &logits, &rows, &chosen, &words(ROWS, |i| 3 * i)).unwrap();
    }
}

fn model(dtype: DType, noise: &mut Noise) -> Model {
    let both = [0, 1].map(|_| packed(WeightFormat::F32, 24, 40, noise));
    let gate_up = Arc::new(Weight::new(both.into()).unwrap());
    let mut packed = |rows, cols| Arc::new(weight(WeightFormat::F32, rows, cols, noise));
    let numbers = |len| Numbers::F32(vec![1.0; len]);
    let layer = Layer {
        attention_norm: numbers(40),
        qkv: packed(16 * 8, 40),
        qkv_bias: Some(numbers(16 * 8)),
        q_norm: Some(numbers(16)),
        k_norm: Some(numbers(16)),
        output: packed(40, 4 * 16),
        output_bias: None,
        mlp_norm: numbers(40),
        gate_up,
        gate_up_bias: None,
        down: packed(40, 24),
        down_bias: Some(numbers(40)),
        window: 0,
    };
    Model {
        dtype,
        num_q_heads: 4,
        num_kv_heads: 2,
        head_dim: 16,
        norm_eps: 1e-5,
        attention_scale: 0.25,
        embedding: packed(37, 40),
        layers: vec![layer.clone(), layer],
        norm: numbers(40),
        lm_head: packed(37, 40),
    }
}

/// Copies of the pool's first block to its last and back, then a step that writes both.
pub(crate) fn steps(pool: &Pool, noise: &mut Noise) {
    for dtype in DTYPES {
        let decoder = Decoder::new(model(dtype, noise)).unwrap();
        for (kv_dtype, tokens) in KvDType::ALL.into_iter().flat_map(|d| [1, 5, 20].map(|n| (d, n)))
        {
            case(&format_args!("a step of {tokens} tokens, {dtype:?} over {kv_dtype:?}"));
            let layout = KvLayout {
                num_blocks: 3,
                num_kv_heads: 2,
                block_size: 16,
                head_dim: 16,
                dtype: kv_dtype,
            };
            let mut kv = cache(2, layout);
            let angles = Data::new(DType::F32, tokens * 16, noise);
            let mut logits = Data::new(DType::F32, 2 * 37, noise);
            let step = Step {
                token_ids: &words(tokens, |i| 36 - i),
                last_samples: &words(1, |_| 3),
                positions: &words(tokens, |i| i),
                slot_mapping: &words(tokens, |i| if i < 16 { 32 + i } else { i - 16 }),
                row_slots: &words(1, |_| 0),
                query_indptr: &words(2, |i| i * tokens),
                seq_lens: &words(1, |_| tokens),
                num_shared_blocks: &words(1, |_| 0),
                block_tables: &words(2, |i| 2 - 2 * i),
                max_blocks: 2,
                out_rows: &words(2, |i| i * (tokens - 1)),
                copies: &words(4, |i| [0, 2, 2, 0][i]),
                cos_sin: angles.view(16),
            };
            // SAFETY: words for two layers, borrowed by the cache alone.
            let mut kv = unsafe { KvCache::from_raw(kv.as_mut_ptr().cast(), 2, layout) };
            decoder.forward(pool, &step, &mut kv, &mut logits.view_mut(37)).unwrap();
        }
    }
}
