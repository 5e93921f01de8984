//! Rotary positions, and writing keys and values into their slots.

use crate::element::{Bf16, DType, Element};
use crate::error::{ArgumentError, require};
use crate::norm::{get, set};
use crate::pool::Pool;
use crate::view::{KvViewMut, Matrix, MatrixMut};

/// Everything of [`rope_and_write_kv`] that is only read.
#[derive(Debug, Clone, Copy)]
pub struct Rope<'a> {
    /// Keys `[tokens, kv heads * head_dim]`, of the type of q.
    pub k: Matrix<'a>,
    /// Values, like keys.
    pub v: Matrix<'a>,
    /// Position of each token: a row of `cos_sin`.
    pub positions: &'a [i32],
    /// Slot of each token (`block * block_size + offset`), −1: write nothing.
    pub slot_mapping: &'a [i32],
    /// `[positions, rotary_dim]` of `f32`: cosines, then sines. Pairs are half the rotated part
    /// apart (NeoX).
    pub cos_sin: Matrix<'a>,
    /// Weight `[1, head_dim]` of a norm over each head of q before the rotation.
    pub q_norm: Option<Matrix<'a>>,
    /// The same for k.
    pub k_norm: Option<Matrix<'a>>,
    /// Epsilon of both norms.
    pub norm_eps: f32,
}

/// Rotate q in place; rotate k and store it and v in `kv`. `k` and `v` are left as they are.
pub fn rope_and_write_kv(
    _pool: &Pool,
    q: &mut MatrixMut<'_>,
    kv: &mut KvViewMut<'_>,
    rope: &Rope<'_>,
) -> Result<(), ArgumentError> {
    check(q, kv, rope)?;
    let layout = *kv.as_view().layout();
    let dim = layout.head_dim;
    for token in 0..rope.positions.len() {
        for head in 0..q.as_matrix().num_cols() / dim {
            let row = head_row(q.as_matrix(), token, head, dim);
            let row = transform(row, rope.q_norm.as_ref(), rope, token);
            for (i, value) in row.into_iter().enumerate() {
                set(q, token, head * dim + i, value);
            }
        }
        let Ok(slot) = usize::try_from(rope.slot_mapping[token]) else { continue };
        let (block, offset) = (slot / layout.block_size, slot % layout.block_size);
        for head in 0..layout.num_kv_heads {
            let key = head_row(&rope.k, token, head, dim);
            let key = transform(key, rope.k_norm.as_ref(), rope, token);
            let value = head_row(&rope.v, token, head, dim);
            for i in 0..dim {
                let dtype = kv.as_view().dtype();
                let k_at = layout.key_tile(block, head) + layout.key_at(dtype, offset, i);
                let v_at = layout.value_tile(block, head) + layout.value_at(dtype, offset, i);
                // SAFETY: both are inside the layer: slot was checked.
                unsafe {
                    match dtype {
                        DType::F32 => {
                            *kv.base::<f32>().add(k_at) = key[i];
                            *kv.base::<f32>().add(v_at) = value[i];
                        }
                        DType::Bf16 => {
                            *kv.base::<Bf16>().add(k_at) = Bf16::narrow(key[i]);
                            *kv.base::<Bf16>().add(v_at) = Bf16::narrow(value[i]);
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

fn head_row(m: &Matrix<'_>, token: usize, head: usize, dim: usize) -> Vec<f32> {
    (0..dim).map(|i| get(m, token, head * dim + i)).collect()
}

fn transform(
    mut row: Vec<f32>,
    norm: Option<&Matrix<'_>>,
    rope: &Rope<'_>,
    token: usize,
) -> Vec<f32> {
    if let Some(weight) = norm {
        let mean = row.iter().map(|v| v * v).sum::<f32>() / row.len() as f32;
        let inv = 1.0 / (mean + rope.norm_eps).sqrt();
        for (i, value) in row.iter_mut().enumerate() {
            *value = *value * inv * get(weight, 0, i);
        }
    }
    let half = rope.cos_sin.num_cols() / 2;
    let position = rope.positions[token] as usize;
    for i in 0..half {
        let cos = get(&rope.cos_sin, position, i);
        let sin = get(&rope.cos_sin, position, half + i);
        let (a, b) = (row[i], row[half + i]);
        row[i] = a * cos - b * sin;
        row[half + i] = b * cos + a * sin;
    }
    row
}

fn check(q: &MatrixMut<'_>, kv: &KvViewMut<'_>, rope: &Rope<'_>) -> Result<(), ArgumentError> {
    let layout = kv.as_view().layout();
    layout.check()?;
    let (tokens, dim) = (rope.positions.len(), layout.head_dim);
    let q = q.as_matrix();
    require(
        q.num_rows() == tokens && q.num_cols() > 0 && q.num_cols().is_multiple_of(dim),
        "q",
        || q.describe(),
        || format!("[{tokens}, heads * {dim}]"),
    )?;
    for (name, m) in [("k", &rope.k), ("v", &rope.v)] {
        require(
            m.num_rows() == tokens
                && m.num_cols() == layout.num_kv_heads * dim
                && m.dtype() == q.dtype(),
            name,
            || m.describe(),
            || format!("[{tokens}, {} * {dim}] {}", layout.num_kv_heads, q.dtype().name()),
        )?;
    }
    let rotary = rope.cos_sin.num_cols();
    require(
        rope.cos_sin.dtype() == DType::F32 && rotary.is_multiple_of(2) && rotary <= dim,
        "cos_sin",
        || rope.cos_sin.describe(),
        || format!("[positions, an even number up to {dim}] float32"),
    )?;
    for (name, norm) in [("q_norm", &rope.q_norm), ("k_norm", &rope.k_norm)] {
        if let Some(m) = norm {
            require(
                m.num_rows() == 1 && m.num_cols() == dim,
                name,
                || m.describe(),
                || format!("[1, {dim}]"),
            )?;
        }
    }
    require(
        rope.slot_mapping.len() == tokens,
        "slot_mapping",
        || rope.slot_mapping.len().to_string(),
        || format!("one per token, {tokens}"),
    )?;
    for (i, &position) in rope.positions.iter().enumerate() {
        require(
            (0..rope.cos_sin.num_rows() as i64).contains(&i64::from(position)),
            "positions",
            || format!("{position} at {i}"),
            || format!("0 to {} (rows of cos_sin) exclusive", rope.cos_sin.num_rows()),
        )?;
    }
    let num_slots = (layout.num_blocks * layout.block_size) as i64;
    for (i, &slot) in rope.slot_mapping.iter().enumerate() {
        require(
            (-1..num_slots).contains(&i64::from(slot)),
            "slot_mapping",
            || format!("{slot} at {i}"),
            || format!("-1, or 0 to {num_slots} (slots of the pool) exclusive"),
        )?;
    }
    Ok(())
}
