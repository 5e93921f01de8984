//! The decoder as a whole: against plain loops in float64 that know no cache, no batch and no block,
//! in steps that cut sequences in every way; and what it refuses.

mod common;

use std::sync::Arc;

use common::{Noise, pools};
use fastserve_cpu::{
    DType, Decoder, Isa, KvCache, KvDType, KvLayout, Layer, Matrix, MatrixMut, Model, Numbers,
    Packed, Pool, Step, Weight, WeightFormat, kv_shape,
};

const VOCAB: usize = 37;
const HIDDEN: usize = 40;
const INNER: usize = 56;
const HEAD_DIM: usize = 16;
const NUM_Q_HEADS: usize = 4;
const NUM_KV_HEADS: usize = 2;
const Q: usize = NUM_Q_HEADS * HEAD_DIM;
const KV: usize = NUM_KV_HEADS * HEAD_DIM;
const EPS: f32 = 1e-5;
const SCALE: f32 = 0.25;
const MAX_POSITIONS: usize = 96;
const MAX_BLOCKS: usize = 6;
const NUM_SLOTS: usize = 3;

/// A matrix as plain rows and packed.
struct Dense {
    rows: Vec<Vec<f32>>,
    packed: Arc<Weight>,
}

impl Dense {
    fn new(rows: usize, cols: usize, noise: &mut Noise) -> Self {
        Self::parts(1, rows, cols, noise)
    }

    /// As so many parts of the same size.
    fn parts(num_parts: usize, rows: usize, cols: usize, noise: &mut Noise) -> Self {
        let scale = 1.5 / (cols as f32).sqrt();
        let rows: Vec<Vec<f32>> =
            (0..rows).map(|_| (0..cols).map(|_| noise.next() * scale).collect()).collect();
        let parts = rows.chunks(rows.len() / num_parts).map(|rows| {
            let mut packed = Packed::new(WeightFormat::F32, rows.len(), cols).unwrap();
            let bytes: Vec<u8> = rows.iter().flatten().flat_map(|x| x.to_ne_bytes()).collect();
            packed.fill(0, &bytes).unwrap();
            packed
        });
        let packed = Arc::new(Weight::new(parts.collect()).unwrap());
        Self { rows, packed }
    }

    fn times(&self, x: &[f64], bias: Option<&Vec<f32>>) -> Vec<f64> {
        let dot = |row: &Vec<f32>| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
        let bias = |i: usize| bias.map_or(0.0, |bias| f64::from(bias[i]));
        self.rows.iter().enumerate().map(|(i, row)| dot(row) + bias(i)).collect()
    }
}

struct PlainLayer {
    attention_norm: Vec<f32>,
    qkv: Dense,
    qkv_bias: Option<Vec<f32>>,
    q_norm: Option<Vec<f32>>,
    k_norm: Option<Vec<f32>>,
    output: Dense,
    output_bias: Option<Vec<f32>>,
    mlp_norm: Vec<f32>,
    gate_up: Dense,
    gate_up_bias: Option<Vec<f32>>,
    down: Dense,
    down_bias: Option<Vec<f32>>,
    window: usize,
}

/// What varies between architectures.
#[derive(Debug, Clone, Copy)]
struct Kind {
    biases: bool,
    head_norms: bool,
    tied: bool,
    window: usize,
}

const KINDS: [Kind; 3] = [
    Kind { biases: false, head_norms: false, tied: true, window: 0 },
    Kind { biases: true, head_norms: false, tied: false, window: 0 },
    Kind { biases: false, head_norms: true, tied: false, window: 5 },
];

struct Plain {
    embedding: Dense,
    layers: Vec<PlainLayer>,
    norm: Vec<f32>,
    lm_head: Option<Dense>,
    cos_sin: Vec<f32>,
}

impl Plain {
    fn new(kind: Kind) -> Self {
        let noise = &mut Noise::new(7);
        let vector = |len: usize, around: f32, noise: &mut Noise| -> Vec<f32> {
            (0..len).map(|_| around + noise.next() * 0.3).collect()
        };
        let bias = |len, noise: &mut Noise| kind.biases.then(|| vector(len, 0.0, noise));
        let head = |noise: &mut Noise| kind.head_norms.then(|| vector(HEAD_DIM, 1.0, noise));
        let layers = (0..3).map(|index| PlainLayer {
            attention_norm: vector(HIDDEN, 1.0, noise),
            qkv: Dense::new(Q + 2 * KV, HIDDEN, noise),
            qkv_bias: bias(Q + 2 * KV, noise),
            q_norm: head(noise),
            k_norm: head(noise),
            output: Dense::new(HIDDEN, Q, noise),
            output_bias: bias(HIDDEN, noise),
            mlp_norm: vector(HIDDEN, 1.0, noise),
            gate_up: Dense::parts(2, 2 * INNER, HIDDEN, noise),
            gate_up_bias: bias(2 * INNER, noise),
            down: Dense::new(HIDDEN, INNER, noise),
            down_bias: bias(HIDDEN, noise),
            window: if index == 1 { kind.window } else { 0 },
        });
        let layers = layers.collect();
        let angle = |position: usize, i: usize| position as f64 / 50f64.powf(i as f64 / 8.0);
        let cos_sin = (0..MAX_POSITIONS).flat_map(|position| {
            let half = HEAD_DIM / 2;
            let cos = (0..half).map(move |i| angle(position, i).cos() as f32);
            cos.chain((0..half).map(move |i| angle(position, i).sin() as f32))
        });
        Self {
            embedding: Dense::new(VOCAB, HIDDEN, noise),
            layers,
            norm: vector(HIDDEN, 1.0, noise),
            lm_head: (!kind.tied).then(|| Dense::new(VOCAB, HIDDEN, noise)),
            cos_sin: cos_sin.collect(),
        }
    }

    fn model(&self, dtype: DType) -> Model {
        let numbers = |vector: &Vec<f32>| Numbers::F32(vector.clone());
        let optional = |vector: &Option<Vec<f32>>| vector.as_ref().map(numbers);
        let layer = |plain: &PlainLayer| Layer {
            attention_norm: numbers(&plain.attention_norm),
            qkv: Arc::clone(&plain.qkv.packed),
            qkv_bias: optional(&plain.qkv_bias),
            q_norm: optional(&plain.q_norm),
            k_norm: optional(&plain.k_norm),
            output: Arc::clone(&plain.output.packed),
            output_bias: optional(&plain.output_bias),
            mlp_norm: numbers(&plain.mlp_norm),
            gate_up: Arc::clone(&plain.gate_up.packed),
            gate_up_bias: optional(&plain.gate_up_bias),
            down: Arc::clone(&plain.down.packed),
            down_bias: optional(&plain.down_bias),
            window: plain.window,
        };
        Model {
            dtype,
            num_q_heads: NUM_Q_HEADS,
            num_kv_heads: NUM_KV_HEADS,
            head_dim: HEAD_DIM,
            norm_eps: EPS,
            attention_scale: SCALE,
            embedding: Arc::clone(&self.embedding.packed),
            layers: self.layers.iter().map(layer).collect(),
            norm: numbers(&self.norm),
            lm_head: Arc::clone(&self.lm_head.as_ref().unwrap_or(&self.embedding).packed),
        }
    }

    /// Logits at every position of one sequence.
    fn logits(&self, tokens: &[i32]) -> Vec<Vec<f64>> {
        let wide = |row: &Vec<f32>| row.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let mut hidden: Vec<Vec<f64>> =
            tokens.iter().map(|&token| wide(&self.embedding.rows[token as usize])).collect();
        for layer in &self.layers {
            let qkv: Vec<Vec<f64>> = hidden
                .iter()
                .map(|x| layer.qkv.times(&norm(x, &layer.attention_norm), layer.qkv_bias.as_ref()))
                .collect();
            let head = |position: usize, from: usize, weight: Option<&Vec<f32>>| {
                let part = &qkv[position][from..from + HEAD_DIM];
                let part = weight.map_or_else(|| part.to_vec(), |weight| norm(part, weight));
                self.rotated(&part, position)
            };
            let mut attended = vec![vec![0.0; Q]; tokens.len()];
            for (position, out) in attended.iter_mut().enumerate() {
                let first = match layer.window {
                    0 => 0,
                    window => (position + 1).saturating_sub(window),
                };
                for (h, out) in out.chunks_mut(HEAD_DIM).enumerate() {
                    let kv = h / (NUM_Q_HEADS / NUM_KV_HEADS) * HEAD_DIM;
                    let q = head(position, h * HEAD_DIM, layer.q_norm.as_ref());
                    let score = |key: usize| {
                        let k = head(key, Q + kv, layer.k_norm.as_ref());
                        (q.iter().zip(&k).map(|(q, k)| q * k).sum::<f64>() * f64::from(SCALE)).exp()
                    };
                    let scores: Vec<f64> = (first..=position).map(score).collect();
                    let total: f64 = scores.iter().sum();
                    for (key, score) in (first..).zip(&scores) {
                        let v = &qkv[key][Q + KV + kv..Q + KV + kv + HEAD_DIM];
                        out.iter_mut().zip(v).for_each(|(out, v)| *out += score / total * v);
                    }
                }
            }
            for (x, attended) in hidden.iter_mut().zip(&attended) {
                add(x, &layer.output.times(attended, layer.output_bias.as_ref()));
                let bias = layer.gate_up_bias.as_ref();
                let gate_up = layer.gate_up.times(&norm(x, &layer.mlp_norm), bias);
                let silu = |g: f64| g / (1.0 + (-g).exp());
                let gated: Vec<f64> =
                    (0..INNER).map(|i| silu(gate_up[i]) * gate_up[INNER + i]).collect();
                add(x, &layer.down.times(&gated, layer.down_bias.as_ref()));
            }
        }
        let lm_head = self.lm_head.as_ref().unwrap_or(&self.embedding);
        hidden.iter().map(|x| lm_head.times(&norm(x, &self.norm), None)).collect()
    }

    fn rotated(&self, x: &[f64], position: usize) -> Vec<f64> {
        let (table, half) = (&self.cos_sin[position * HEAD_DIM..], HEAD_DIM / 2);
        let mut out = x.to_vec();
        for i in 0..half {
            let (cos, sin) = (f64::from(table[i]), f64::from(table[half + i]));
            out[i] = x[i] * cos - x[half + i] * sin;
            out[half + i] = x[half + i] * cos + x[i] * sin;
        }
        out
    }
}

fn norm(x: &[f64], weight: &[f32]) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let inverse = 1.0 / (mean + f64::from(EPS)).sqrt();
    x.iter().zip(weight).map(|(x, w)| x * inverse * f64::from(*w)).collect()
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// A row of a step: slot, first position, tokens.
type Row = (usize, usize, usize);

/// A decoder with a cache and sequences that it is taken through.
struct Run<'a> {
    plain: &'a Plain,
    decoder: Decoder,
    sequences: Vec<Vec<i32>>,
    /// All bits set: NaN of every type, or a scale that is.
    kv: Vec<u32>,
    layout: KvLayout,
    block_tables: Vec<i32>,
    last_samples: Vec<i32>,
    copies: Vec<i32>,
}

impl<'a> Run<'a> {
    fn new(plain: &'a Plain, dtype: DType, kv_dtype: KvDType) -> Self {
        let layout = KvLayout {
            num_blocks: NUM_SLOTS * MAX_BLOCKS + 2,
            num_kv_heads: NUM_KV_HEADS,
            block_size: 16,
            head_dim: HEAD_DIM,
            dtype: kv_dtype,
        };
        let kv_len: usize = kv_shape(plain.layers.len(), layout).iter().product();
        let noise = &mut Noise::new(11);
        let mut sequence =
            |len: usize| -> Vec<i32> { (0..len).map(|_| noise.below(VOCAB) as i32).collect() };
        Self {
            plain,
            decoder: Decoder::new(plain.model(dtype)).unwrap(),
            sequences: vec![sequence(33), sequence(16), sequence(50)],
            kv: vec![u32::MAX; kv_len * kv_dtype.size() / 4],
            layout,
            // Blocks of neighbours lie apart.
            block_tables: (0..NUM_SLOTS * MAX_BLOCKS)
                .map(|i| (i * 7 % (NUM_SLOTS * MAX_BLOCKS)) as i32)
                .collect(),
            last_samples: vec![0; NUM_SLOTS],
            copies: Vec::new(),
        }
    }

    /// Logits of every token of the rows. The last token of a row of one is given as unknown.
    fn step(&mut self, pool: &Pool, rows: &[Row]) -> Vec<Vec<f32>> {
        let (mut token_ids, mut positions, mut slot_mapping) = (vec![], vec![], vec![]);
        let (mut query_indptr, mut seq_lens) = (vec![0], vec![]);
        for &(slot, first, count) in rows {
            for position in first..first + count {
                let token = self.sequences[slot][position];
                if count == 1 {
                    self.last_samples[slot] = token;
                    token_ids.push(-1 - slot as i32);
                } else {
                    token_ids.push(token);
                }
                let block = self.block_tables[slot * MAX_BLOCKS + position / 16];
                slot_mapping.push(block * 16 + position as i32 % 16);
                positions.push(position as i32);
            }
            query_indptr.push(token_ids.len() as i32);
            seq_lens.push((first + count) as i32);
        }
        let out_rows: Vec<i32> = (0..token_ids.len() as i32).rev().collect();
        let mut logits = vec![f32::NAN; out_rows.len() * VOCAB];
        let step = Step {
            token_ids: &token_ids,
            last_samples: &self.last_samples,
            positions: &positions,
            slot_mapping: &slot_mapping,
            row_slots: &rows.iter().map(|row| row.0 as i32).collect::<Vec<_>>(),
            query_indptr: &query_indptr,
            seq_lens: &seq_lens,
            num_shared_blocks: &[],
            block_tables: &self.block_tables,
            max_blocks: MAX_BLOCKS,
            out_rows: &out_rows,
            copies: &self.copies,
            cos_sin: Matrix::f32(&self.plain.cos_sin, HEAD_DIM),
        };
        // SAFETY: the vector has the shape's bytes and is borrowed for the call alone.
        let mut kv = unsafe { KvCache::from_raw(self.kv.as_mut_ptr().cast(), 3, self.layout) };
        let out = &mut MatrixMut::f32(&mut logits, VOCAB);
        self.decoder.forward(pool, &step, &mut kv, out).unwrap();
        logits.chunks(VOCAB).rev().map(<[f32]>::to_vec).collect()
    }
}

/// The same tokens cut into steps in different ways. Slot 1 ends at a block's end.
fn schedules() -> Vec<Vec<Vec<Row>>> {
    vec![
        vec![vec![(0, 0, 33), (1, 0, 16), (2, 0, 50)]],
        vec![vec![(0, 0, 33)], vec![(1, 0, 16)], vec![(2, 0, 50)]],
        vec![
            vec![(2, 0, 7)],
            vec![(0, 0, 1), (2, 7, 30)],
            vec![(2, 37, 1), (1, 0, 15), (0, 1, 31)],
            vec![(1, 15, 1), (0, 32, 1), (2, 38, 12)],
        ],
    ]
}

#[test]
fn logits_are_those_of_plain_loops_however_sequences_are_cut() {
    for kind in KINDS {
        let plain = Plain::new(kind);
        let sequences = Run::new(&plain, DType::F32, KvDType::F32).sequences;
        let want: Vec<Vec<Vec<f64>>> = sequences.iter().map(|s| plain.logits(s)).collect();
        for (dtype, kv_dtype, most) in [
            (DType::F32, KvDType::F32, 2e-5),
            (DType::F32, KvDType::I8, 0.05),
            (DType::Bf16, KvDType::F32, 0.15),
        ] {
            let mut bits: Vec<Vec<u32>> = Vec::new();
            for pool in pools() {
                for steps in schedules() {
                    let mut run = Run::new(&plain, dtype, kv_dtype);
                    let mut got = vec![vec![Vec::new(); MAX_POSITIONS]; NUM_SLOTS];
                    for rows in steps {
                        let mut logits = run.step(&pool, &rows).into_iter();
                        for (slot, first, count) in rows {
                            got[slot][first..first + count].fill_with(|| logits.next().unwrap());
                        }
                    }
                    let mut own = Vec::new();
                    for (slot, want) in want.iter().enumerate() {
                        for (position, want) in want.iter().enumerate() {
                            for (got, want) in got[slot][position].iter().zip(want) {
                                let error = (f64::from(*got) - want).abs();
                                assert!(
                                    error <= most,
                                    "{kind:?} {dtype:?} {kv_dtype:?} {pool:?} slot {slot} at \
                                     {position}: {got}, want {want}"
                                );
                                own.push(got.to_bits());
                            }
                        }
                    }
                    bits.push(own);
                }
                bits.dedup();
            }
            // Instruction sets may differ where a product has chains of its own; schedules and
            // numbers of threads may not.
            assert!(bits.len() <= Isa::available().len(), "{kind:?} {dtype:?} {kv_dtype:?}");
        }
    }
}

#[test]
fn blocks_are_copied_before_anything_is_written() {
    let plain = Plain::new(KINDS[0]);
    let pool = Pool::new(2, Isa::detect());
    for kv_dtype in KvDType::ALL {
        let mut run = Run::new(&plain, DType::F32, kv_dtype);
        run.step(&pool, &[(2, 0, 20)]);
        let want = run.step(&pool, &[(2, 20, 1)]);
        // Slot 0 becomes a fork of slot 2: the first block is shared, the second is copied, and written
        // again at 20 after the copy.
        let source = run.block_tables[2 * MAX_BLOCKS + 1];
        let copy = (NUM_SLOTS * MAX_BLOCKS) as i32;
        run.sequences[0] = run.sequences[2].clone();
        run.block_tables[0] = run.block_tables[2 * MAX_BLOCKS];
        run.block_tables[1] = copy;
        run.copies = vec![source, copy];
        assert_eq!(run.step(&pool, &[(0, 20, 1)]), want);
        run.copies.clear();
        assert_eq!(run.step(&pool, &[(2, 20, 1)]), want, "the source is as it was");
    }
}

#[test]
fn a_model_whose_parts_do_not_fit_is_refused_by_name() {
    let plain = Plain::new(KINDS[1]);
    let refused = |change: &dyn Fn(&mut Model)| {
        let mut model = plain.model(DType::F32);
        change(&mut model);
        Decoder::new(model).expect_err("it does not fit").to_string()
    };
    let other = &Dense::new(8, 8, &mut Noise::new(1)).packed;
    assert_eq!(refused(&|m| m.layers.clear()), "layers: got none, want at least one");
    assert_eq!(refused(&|m| m.lm_head = Arc::clone(other)), "lm_head: got [8, 8], want [37, 40]");
    assert_eq!(
        refused(&|m| m.layers[1].qkv = Arc::clone(other)),
        "qkv: got [8, 8], want [128, 40]"
    );
    let one_part = &Dense::new(2 * INNER, HIDDEN, &mut Noise::new(1)).packed;
    assert_eq!(
        refused(&|m| m.layers[0].gate_up = Arc::clone(one_part)),
        "gate_up: got parts of 112 rows, want two halves of equal parts"
    );
    assert_eq!(
        refused(&|m| m.layers[2].down_bias = Some(Numbers::F32(vec![0.0; 3]))),
        "down_bias: got [3], want [40]"
    );
    assert_eq!(
        refused(&|m| m.head_dim = 12),
        "head_dim: got 12, want a multiple of 8, at most 256"
    );
    assert_eq!(
        refused(&|m| (m.num_q_heads, m.num_kv_heads) = ((1 << 61) + 2, 1)),
        "num_q_heads: got 2305843009213693954, want at most 1048576"
    );
    assert_eq!(
        refused(&|m| m.norm_eps = f32::NAN),
        "norm_eps: got NaN, want a finite number, 0 or more"
    );
    assert_eq!(
        refused(&|m| m.num_q_heads = 3),
        "num_q_heads: got 3, want a multiple of num_kv_heads=2"
    );
}

#[test]
fn a_step_that_does_not_fit_is_refused_by_name() {
    let plain = Plain::new(KINDS[0]);
    let pool = Pool::new(1, Isa::detect());
    let mut run = Run::new(&plain, DType::F32, KvDType::F32);
    let layout = run.layout;
    let good = Step {
        token_ids: &[5],
        last_samples: &[0],
        positions: &[0],
        slot_mapping: &[0],
        row_slots: &[0],
        query_indptr: &[0, 1],
        seq_lens: &[1],
        num_shared_blocks: &[],
        block_tables: &[0],
        max_blocks: 1,
        out_rows: &[0],
        copies: &[],
        cos_sin: Matrix::f32(&plain.cos_sin, HEAD_DIM),
    };
    let mut refused = |step: Step<'_>, num_layers: usize| {
        let mut logits = vec![0.0; VOCAB];
        // SAFETY: the vector has at least that many layers and is borrowed for the call alone.
        let mut kv = unsafe { KvCache::from_raw(run.kv.as_mut_ptr().cast(), num_layers, layout) };
        let out = &mut MatrixMut::f32(&mut logits, VOCAB);
        run.decoder.forward(&pool, &step, &mut kv, out).map_err(|error| error.to_string())
    };
    assert_eq!(refused(good, 3), Ok(()));
    let cases = [
        (Step { token_ids: &[37], ..good }, "rows: got 37, want 0 to 36"),
        (
            Step { token_ids: &[-2], ..good },
            "token_ids: got -2, want a token, or −1 − slot of 1 slots",
        ),
        (Step { out_rows: &[1], ..good }, "out_rows: got 1, want 0 to 0, of 1 tokens"),
        (Step { out_rows: &[-1], ..good }, "out_rows: got -1, want 0 to 0, of 1 tokens"),
        (Step { out_rows: &[0, 0], ..good }, "logits: got [1, 37] float32, want [2, 37] float32"),
        (Step { copies: &[0, 20], ..good }, "copies: got 20, want 0 to 19"),
        (Step { copies: &[0, 1, 2], ..good }, "copies: got 3 words, want two a copy"),
    ];
    for (step, message) in cases {
        assert_eq!(refused(step, 3), Err(message.to_owned()));
    }
    assert_eq!(
        refused(good, 2),
        Err("kv: got 2 layers of 2 heads of 16, want 3 layers of 2 heads of 16".to_owned())
    );
    assert_eq!(refused(good, 3), Ok(()), "nothing is broken by a refusal");
}
