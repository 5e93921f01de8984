//! Arguments that would read or write outside an array are refused by name, before anything runs.

use fastserve_cpu::{
    ArgumentError, Attention, Isa, KvDType, KvLayout, KvView, KvViewMut, Matrix, MatrixMut, Norm,
    Pool, Rope, paged_attention, rms_norm, rope_and_write_kv, silu_mul,
};

/// How a message begins, and what brings it about.
type Wrong<T> = (&'static str, fn(&mut T));

const LAYOUT: KvLayout =
    KvLayout { num_blocks: 4, num_kv_heads: 2, block_size: 8, head_dim: 8, dtype: KvDType::F32 };

fn pool() -> Pool {
    Pool::new(1, Isa::detect())
}

/// What a call of attention over three tokens of two rows is made of.
#[derive(Clone)]
struct Words {
    block_tables: Vec<i32>,
    max_blocks: usize,
    row_slots: Vec<i32>,
    query_indptr: Vec<i32>,
    seq_lens: Vec<i32>,
    num_shared_blocks: Vec<i32>,
    scale: f32,
    softcap: f32,
    window: usize,
}

fn attend(change: impl FnOnce(&mut Words)) -> Result<(), ArgumentError> {
    let mut words = Words {
        block_tables: vec![0, 1, -1, 3, 2, -1],
        max_blocks: 3,
        row_slots: vec![1, 0],
        query_indptr: vec![0, 1, 3],
        seq_lens: vec![9, 16],
        num_shared_blocks: vec![],
        scale: 1.0,
        softcap: 0.0,
        window: 0,
    };
    change(&mut words);
    let (kv, q, mut out) = (vec![0.0; LAYOUT.layer_len()], vec![0.0; 3 * 32], vec![9.0; 3 * 32]);
    let args = Attention {
        q: Matrix::f32(&q, 32),
        kv: KvView::new(&kv, LAYOUT),
        block_tables: &words.block_tables,
        max_blocks: words.max_blocks,
        row_slots: &words.row_slots,
        query_indptr: &words.query_indptr,
        seq_lens: &words.seq_lens,
        num_shared_blocks: &words.num_shared_blocks,
        scale: words.scale,
        window: words.window,
        softcap: words.softcap,
    };
    let result = paged_attention(&pool(), &args, &mut MatrixMut::f32(&mut out, 32));
    assert!(
        result.is_ok() || out.iter().all(|v| v.to_bits() == 9f32.to_bits()),
        "nothing is computed"
    );
    result
}

#[test]
fn attention() {
    attend(|_| ()).unwrap();
    let cases: [Wrong<Words>; 22] = [
        ("block_tables: got block 4 at [1, 1], want 0 to 4", |w| w.block_tables[4] = 4),
        ("block_tables: got block -1 at [0, 1], want 0 to 4", |w| w.block_tables[1] = -1),
        ("row_slots: got 2 at 0, want 0 to 2", |w| w.row_slots[0] = 2),
        ("row_slots: got -1 at 1, want 0 to 2", |w| w.row_slots[1] = -1),
        ("row_slots: got 1 at 0, want 0 to 0", |w| w.block_tables.clear()),
        ("query_indptr: got 3 words from Some(1)", |w| w.query_indptr[0] = 1),
        ("query_indptr: got 3 words from Some(0) to Some(4)", |w| w.query_indptr[2] = 4),
        ("query_indptr: got 3 words", |w| w.query_indptr[1] = 5),
        ("query_indptr: got 3 words", |w| w.query_indptr[1] = -1),
        ("query_indptr: got 0 words", |w| w.query_indptr.clear()),
        ("seq_lens: got 1 words, want one per row, 2", |w| w.seq_lens.truncate(1)),
        ("seq_lens: got 1 at 1, which has 2 query tokens", |w| w.seq_lens[1] = 1),
        ("seq_lens: got 25 at 0, which has 1 query tokens, want 0, or 1 to 24", |w| {
            w.seq_lens[0] = 25;
        }),
        ("seq_lens: got -3 at 0", |w| w.seq_lens[0] = -3),
        ("num_shared_blocks: got 1 words, want one per row, 2, or none", |w| {
            w.num_shared_blocks = vec![0];
        }),
        ("num_shared_blocks: got 1 at 0, want 0 to 0", |w| w.num_shared_blocks = vec![1, 0]),
        ("num_shared_blocks: got 2 at 1, want 0 to 1", |w| w.num_shared_blocks = vec![0, 2]),
        ("num_shared_blocks: got -1 at 1, want 0 to 1", |w| w.num_shared_blocks = vec![0, -1]),
        (
            "num_shared_blocks: got 1 at 1, want leading blocks that are those of the row before",
            |w| {
                w.num_shared_blocks = vec![0, 1];
            },
        ),
        ("scale: got NaN", |w| w.scale = f32::NAN),
        ("softcap: got -1", |w| w.softcap = -1.0),
        ("softcap: got inf", |w| w.softcap = f32::INFINITY),
    ];
    for (want, change) in cases {
        let text = attend(change).unwrap_err().to_string();
        assert!(text.starts_with(want), "{text}");
    }
}

#[test]
fn blocks_may_be_shared_as_far_as_they_are_equal() {
    attend(|w| (w.block_tables[0], w.num_shared_blocks) = (3, vec![0, 1])).unwrap();
    attend(|w| w.num_shared_blocks = vec![0, 0]).unwrap();
}

/// Entries that no row reaches may be anything.
#[test]
fn unused_entries_are_not_looked_at() {
    attend(|w| w.block_tables[2] = i32::MAX).unwrap();
    attend(|w| (w.window, w.seq_lens[0], w.block_tables[3]) = (1, 9, i32::MIN)).unwrap();
    attend(|w| (w.seq_lens[0], w.block_tables[3]) = (0, i32::MIN)).unwrap();
}

#[test]
fn shapes_of_attention() {
    let kv = vec![0.0; LAYOUT.layer_len()];
    let cases = [
        (24, 2, 24, "q: got [2, 24] float32, want [tokens, a multiple of 2 kv heads * 8]"),
        (16, 1, 32, "out: got [1, 32] float32, want [2, 16] float32"),
    ];
    for (q_cols, out_rows, out_cols, want) in cases {
        let (q, mut out) = (vec![0.0; 2 * q_cols], vec![0.0; out_rows * out_cols]);
        let args = Attention {
            q: Matrix::f32(&q, q_cols),
            kv: KvView::new(&kv, LAYOUT),
            block_tables: &[0],
            max_blocks: 1,
            row_slots: &[0],
            query_indptr: &[0, 2],
            seq_lens: &[2],
            num_shared_blocks: &[],
            scale: 1.0,
            window: 0,
            softcap: 0.0,
        };
        let out = &mut MatrixMut::f32(&mut out, out_cols);
        assert_eq!(paged_attention(&pool(), &args, out).unwrap_err().to_string(), want);
    }
}

struct Rotation {
    positions: Vec<i32>,
    slot_mapping: Vec<i32>,
    k_cols: usize,
    rotary_dim: usize,
    norm_len: usize,
}

fn rotate(change: impl FnOnce(&mut Rotation)) -> Result<(), ArgumentError> {
    let mut r = Rotation {
        positions: vec![4, 0],
        slot_mapping: vec![31, -1],
        k_cols: 16,
        rotary_dim: 8,
        norm_len: 8,
    };
    change(&mut r);
    let (numbers, norm) = (vec![1.0; 480], vec![1.0; r.norm_len]);
    let mut q = vec![9.0; 2 * 8];
    let mut cache = vec![9.0; LAYOUT.layer_len()];
    let rope = Rope {
        k: Matrix::f32(&numbers[..2 * r.k_cols], r.k_cols),
        v: Matrix::f32(&numbers[..32], 16),
        positions: &r.positions,
        slot_mapping: &r.slot_mapping,
        cos_sin: Matrix::f32(&numbers[..5 * r.rotary_dim], r.rotary_dim),
        q_norm: Some(Matrix::f32(&norm, r.norm_len)),
        k_norm: None,
        norm_eps: 0.0,
    };
    let mut kv = KvViewMut::new(&mut cache, LAYOUT);
    let result = rope_and_write_kv(&pool(), &mut MatrixMut::f32(&mut q, 8), &mut kv, &rope);
    let untouched = q.iter().chain(&cache).all(|v| v.to_bits() == 9f32.to_bits());
    assert!(result.is_ok() || untouched, "nothing is computed");
    result
}

#[test]
fn rotation() {
    rotate(|_| ()).unwrap();
    let cases: [Wrong<Rotation>; 9] = [
        ("positions: got 5 at 0, want 0 to 5 (rows of cos_sin) exclusive", |r| r.positions[0] = 5),
        ("positions: got -1 at 1", |r| r.positions[1] = -1),
        ("slot_mapping: got 32 at 0, want -1, or 0 to 32", |r| r.slot_mapping[0] = 32),
        ("slot_mapping: got -2 at 1", |r| r.slot_mapping[1] = -2),
        ("slot_mapping: got 1, want one per token, 2", |r| r.slot_mapping.truncate(1)),
        ("k: got [2, 8] float32, want [2, 2 * 8] float32", |r| r.k_cols = 8),
        ("cos_sin: got [5, 10] float32", |r| r.rotary_dim = 10),
        ("cos_sin: got [5, 7] float32", |r| r.rotary_dim = 7),
        ("q_norm: got [1, 9] float32, want [1, 8]", |r| r.norm_len = 9),
    ];
    for (want, change) in cases {
        let text = rotate(change).unwrap_err().to_string();
        assert!(text.starts_with(want), "{text}");
    }
}

#[test]
fn shapes_of_norm_and_gate() {
    let x = [0.0; 12];
    let norm = |w: usize, out_cols: usize, residual_cols: usize| {
        let (mut out, mut residual, weight) = ([0.0; 12], [0.0; 12], vec![0.0; w]);
        let norm = Norm {
            x: Matrix::f32(&x, 4),
            residual: Some(MatrixMut::f32(&mut residual, residual_cols)),
            weight: Matrix::f32(&weight, w),
            eps: 0.0,
            out: MatrixMut::f32(&mut out, out_cols),
        };
        rms_norm(&pool(), &norm).map_err(|error| error.argument)
    };
    assert_eq!(norm(4, 4, 4), Ok(()));
    assert_eq!(norm(3, 4, 4), Err("weight"));
    assert_eq!(norm(4, 6, 4), Err("out"));
    assert_eq!(norm(4, 4, 2), Err("residual"));
    let mut out = [0.0; 9];
    let error = silu_mul(&pool(), &Matrix::f32(&x, 4), &mut MatrixMut::f32(&mut out, 3));
    assert_eq!(error.unwrap_err().argument, "out");
}
