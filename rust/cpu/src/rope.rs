//! Rotary positions, and writing keys and values into their slots.
//!
//! Tokens are independent. Each head goes through a small `f32` buffer: load, norm (if the model
//! has one), rotate, store; so queries are rounded once, and keys once, to what the cache holds
//! (`store.rs`).

use std::marker::PhantomData;

use crate::element::{Bf16, DType};
use crate::error::{ArgumentError, require};
use crate::layout::{KvDType, KvLayout, MAX_HEAD_DIM};
use crate::norm::inverse_rms;
use crate::pool::Pool;
use crate::simd::{Kernel, LANES, Lanes, Simd};
use crate::store::{Head, Stored, store};
use crate::view::{KvViewMut, Matrix, MatrixMut};

/// Tokens of one item.
const TOKENS_PER_ITEM: usize = 8;

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
    /// `[positions, rotary_dim]` of `f32`: cosines, then sines. The two of a pair are half of
    /// `rotary_dim` apart (`NeoX`); dimensions beyond it are not rotated.
    pub cos_sin: Matrix<'a>,
    /// Weight `[1, head_dim]` of a norm over each head of q before the rotation.
    pub q_norm: Option<Matrix<'a>>,
    /// The same for k.
    pub k_norm: Option<Matrix<'a>>,
    /// Epsilon of both norms.
    pub norm_eps: f32,
}

/// Rotate q in place; rotate k and store it and v in `kv`. `k` and `v` are left as they are.
///
/// # Errors
///
/// Shapes that do not fit each other and indices out of range, named by argument; nothing is computed.
pub fn rope_and_write_kv(
    pool: &Pool,
    q: &mut MatrixMut<'_>,
    kv: &mut KvViewMut<'_>,
    rope: &Rope<'_>,
) -> Result<(), ArgumentError> {
    check(q, kv, rope)?;
    match (q.as_matrix().dtype(), kv.as_view().dtype()) {
        (DType::F32, KvDType::F32) => run::<f32, f32>(pool, q, kv, rope),
        (DType::F32, KvDType::Bf16) => run::<f32, Bf16>(pool, q, kv, rope),
        (DType::F32, KvDType::I8) => run::<f32, i8>(pool, q, kv, rope),
        (DType::Bf16, KvDType::F32) => run::<Bf16, f32>(pool, q, kv, rope),
        (DType::Bf16, KvDType::Bf16) => run::<Bf16, Bf16>(pool, q, kv, rope),
        (DType::Bf16, KvDType::I8) => run::<Bf16, i8>(pool, q, kv, rope),
    }
    Ok(())
}

struct Rotate<'a, X, C> {
    q: &'a MatrixMut<'a>,
    kv: &'a KvViewMut<'a>,
    rope: &'a Rope<'a>,
    types: PhantomData<(X, C)>,
}

fn run<X: Lanes, C: Stored>(pool: &Pool, q: &MatrixMut<'_>, kv: &KvViewMut<'_>, rope: &Rope<'_>) {
    let num_tokens = rope.positions.len();
    let work_ns = num_tokens * (q.as_matrix().num_cols() + 2 * rope.k.num_cols()) / 4;
    let kernel = Rotate::<X, C> { q, kv, rope, types: PhantomData };
    pool.run(&kernel, num_tokens.div_ceil(TOKENS_PER_ITEM), work_ns);
}

impl<X: Lanes, C: Stored> Kernel for Rotate<'_, X, C> {
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, item: usize) {
        let rope = self.rope;
        let dim = self.kv.as_view().layout().head_dim;
        let end = rope.positions.len().min((item + 1) * TOKENS_PER_ITEM);
        let mut head = [0.0; MAX_HEAD_DIM + LANES];
        for token in item * TOKENS_PER_ITEM..end {
            let angles = rope.cos_sin.row::<f32>(rope.positions[token] as usize);
            let row = self.q.row::<X>(token);
            for at in (0..self.q.as_matrix().num_cols()).step_by(dim) {
                // SAFETY: columns at..at + dim of this token's row, which this item alone has;
                // `angles` is a row of `cos_sin`.
                unsafe {
                    self.rotate(s, row.add(at), rope.q_norm.as_ref(), angles, &mut head);
                    store_head(s, &head, row.add(at), dim);
                }
            }
            if let Ok(slot) = usize::try_from(rope.slot_mapping[token]) {
                self.write(s, token, slot, angles, &mut head);
            }
        }
    }
}

impl<X: Lanes, C: Stored> Rotate<'_, X, C> {
    /// Load a head into `head`, norm it and rotate it.
    ///
    /// # Safety
    ///
    /// `from` has `head_dim` elements, and `angles` is a row of `cos_sin`.
    #[inline(always)]
    unsafe fn rotate<S: Simd>(
        &self,
        s: S,
        from: *const X,
        norm: Option<&Matrix<'_>>,
        angles: *const f32,
        head: &mut Head,
    ) {
        let dim = self.kv.as_view().layout().head_dim;
        // SAFETY: the caller's promise.
        unsafe { load_head(s, from, head, dim) };
        if let Some(weight) = norm {
            match weight.dtype() {
                DType::F32 => norm_head::<S, f32>(s, head, dim, weight, self.rope.norm_eps),
                DType::Bf16 => norm_head::<S, Bf16>(s, head, dim, weight, self.rope.norm_eps),
            }
        }
        let half = self.rope.cos_sin.num_cols() / 2;
        for at in (0..half).step_by(LANES) {
            let (len, head) = (half - at, head.as_mut_ptr());
            // SAFETY: 2 * half is at most head_dim and is the length of a row of `cos_sin`.
            unsafe {
                let (a, b) = (
                    f32::load_first(s, head.add(at), len),
                    f32::load_first(s, head.add(half + at), len),
                );
                let cos = f32::load_first(s, angles.add(at), len);
                let sin = f32::load_first(s, angles.add(half + at), len);
                let first = s.sub(s.mul(a, cos), s.mul(b, sin));
                let second = s.add(s.mul(b, cos), s.mul(a, sin));
                f32::store_first(s, head.add(at), len, first);
                f32::store_first(s, head.add(half + at), len, second);
            }
        }
    }

    /// Store the key and the value of `token` in `slot`.
    #[inline(always)]
    fn write<S: Simd>(&self, s: S, token: usize, slot: usize, angles: *const f32, head: &mut Head) {
        let layout = self.kv.as_view().layout();
        let (dim, base) = (layout.head_dim, self.kv.base::<C>());
        let (block, offset) = (slot / layout.block_size, slot % layout.block_size);
        assert!(block < layout.num_blocks, "slot {slot} is outside the pool");
        let (k, v) = (self.rope.k.row::<X>(token), self.rope.v.row::<X>(token));
        for index in 0..layout.num_kv_heads {
            let (key_tile, value_tile) =
                (layout.key_tile(block, index), layout.value_tile(block, index));
            // SAFETY: k and v have num_kv_heads * dim columns; the block is in the pool, so both
            // tiles are inside the layer, and `key_at` and `value_at` are inside a tile.
            unsafe {
                self.rotate(s, k.add(index * dim), self.rope.k_norm.as_ref(), angles, head);
                store(s, head, base.add(key_tile), layout, offset, KvLayout::key_at);
                load_head(s, v.add(index * dim), head, dim);
                store(s, head, base.add(value_tile), layout, offset, KvLayout::value_at);
            }
        }
    }
}

/// # Safety
///
/// `from` has `dim` elements.
#[inline(always)]
unsafe fn load_head<S: Simd, X: Lanes>(s: S, from: *const X, head: &mut Head, dim: usize) {
    for at in (0..dim).step_by(LANES) {
        // SAFETY: the caller's promise; `head` has room for a whole vector at its end.
        unsafe { s.store(head.as_mut_ptr().add(at), X::load_first(s, from.add(at), dim - at)) };
    }
}

/// # Safety
///
/// `to` has `dim` writable elements.
#[inline(always)]
unsafe fn store_head<S: Simd, X: Lanes>(s: S, head: &Head, to: *mut X, dim: usize) {
    for at in (0..dim).step_by(LANES) {
        // SAFETY: the caller's promise; `head` has room for a whole vector at its end.
        unsafe { X::store_first(s, to.add(at), dim - at, s.load(head.as_ptr().add(at))) };
    }
}

#[inline(always)]
fn norm_head<S: Simd, W: Lanes>(s: S, head: &mut Head, dim: usize, weight: &Matrix<'_>, eps: f32) {
    let (head, weight) = (head.as_mut_ptr(), weight.row::<W>(0));
    // SAFETY: both have `dim` elements, and `head` has room for a whole vector at its end.
    unsafe {
        let inverse = s.splat(inverse_rms(s, head.cast_const(), dim, eps));
        for at in (0..dim).step_by(LANES) {
            let x = s.mul(s.load(head.add(at)), inverse);
            s.store(head.add(at), s.mul(x, W::load_first(s, weight.add(at), dim - at)));
        }
    }
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
