//! Norm, gating and rotary positions against plain `f64`, for every instruction set of the machine.
//!
//! Tolerance, written down, relative to the value in `f32`: norm 1e-6, gating 1e-5 (its exponential
//! of up to 80), rotation 4e-7 of the pair's length; in bfloat16 half a unit in the last place on
//! top. Every row's bits are also the same alone and in company, with one thread and three.

mod common;

use common::{Buffer, DTYPES, Noise, assert_close, pools, rounding};
use fastserve_cpu::{
    Bf16, DType, KvDType, KvLayout, KvViewMut, Pool, Rope, rms_norm, rope_and_write_kv, silu_mul,
};
use proptest::prelude::*;

/// One row of a buffer, as a buffer.
fn one_row(buffer: &Buffer, dtype: DType, row: usize) -> Buffer {
    let mut one = Buffer::poisoned(dtype, 1, buffer.cols(), 0);
    for col in 0..buffer.cols() {
        one.set(0, col, buffer.get(row, col));
    }
    one
}

fn normed(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    x.iter().zip(weight).map(|(v, w)| v / (mean + eps).sqrt() * w).collect()
}

fn wide(buffer: &Buffer, row: usize) -> Vec<f64> {
    (0..buffer.cols()).map(|col| f64::from(buffer.get(row, col))).collect()
}

struct Norm {
    x: Buffer,
    weight: Buffer,
    residual: Option<Buffer>,
    dtype: DType,
}

impl Norm {
    fn run(&self, pool: &Pool) -> (Buffer, Option<Buffer>) {
        let poisoned = Buffer::poisoned(self.dtype, self.x.rows(), self.x.cols(), 3);
        let (mut out, mut residual) = (poisoned.clone(), self.residual.clone());
        {
            let residual = residual.as_mut().map(Buffer::view_mut);
            let (x, weight, out) = (self.x.view(), self.weight.view(), out.view_mut());
            rms_norm(pool, &fastserve_cpu::Norm { x, residual, weight, eps: 1e-5, out }).unwrap();
        }
        out.assert_guards(&poisoned);
        if let (Some(after), Some(before)) = (&residual, &self.residual) {
            after.assert_guards(before);
        }
        (out, residual)
    }
}

fn check_norm(rows: usize, cols: usize, dtype: DType, weight: DType, with_residual: bool) {
    let mut noise = Noise::new((rows * 1000 + cols) as u64);
    let norm = Norm {
        x: Buffer::noise(dtype, rows, cols, 2, &mut noise),
        weight: Buffer::noise(weight, 1, cols, 0, &mut noise),
        residual: with_residual.then(|| Buffer::noise(dtype, rows, cols, 4, &mut noise)),
        dtype,
    };
    for pool in pools() {
        let what = format!("{pool:?} norm of {rows} x {cols} {dtype:?}");
        let (out, residual) = norm.run(&pool);
        let mut source = norm.x.clone();
        if let (Some(after), Some(before)) = (&residual, &norm.residual) {
            for row in 0..rows {
                for col in 0..cols {
                    source.set(row, col, norm.x.get(row, col) + before.get(row, col));
                }
                assert_eq!(after.row_bits(row), source.row_bits(row), "{what}: residual {row}");
            }
        }
        let weight = wide(&norm.weight, 0);
        let want: Vec<_> =
            (0..rows).map(|row| normed(&wide(&source, row), &weight, 1e-5)).collect();
        assert_close(&what, &out, &want, 1e-30, 1e-6 + rounding(dtype));
        for row in 0..rows {
            let single = Norm {
                x: one_row(&norm.x, dtype, row),
                weight: norm.weight.clone(),
                residual: norm.residual.as_ref().map(|r| one_row(r, dtype, row)),
                dtype,
            };
            let alone = single.run(&Pool::new(1, pool.isa())).0;
            assert_eq!(alone.row_bits(0), out.row_bits(row), "{what}: row {row} alone");
        }
    }
}

#[test]
fn norm() {
    for (rows, cols) in [(0, 7), (1, 1), (1, 16), (3, 17), (9, 64), (2, 127), (40, 576)] {
        for dtype in DTYPES {
            for weight in DTYPES {
                check_norm(rows, cols, dtype, weight, false);
                check_norm(rows, cols, dtype, weight, true);
            }
        }
    }
}

/// Enough rows that the work is shared out among threads.
#[test]
fn norm_of_many_rows() {
    check_norm(300, 576, DType::F32, DType::F32, true);
}

fn check_gate(rows: usize, cols: usize, dtype: DType) {
    let mut gate_up =
        Buffer::noise(dtype, rows, 2 * cols, 3, &mut Noise::new((rows * 1000 + cols) as u64));
    for row in 0..rows {
        for col in 0..cols {
            gate_up.set(row, col, gate_up.get(row, col) * 40.0);
        }
    }
    let run = |gate_up: &Buffer, pool: &Pool| {
        let poisoned = Buffer::poisoned(dtype, gate_up.rows(), cols, 1);
        let mut out = poisoned.clone();
        silu_mul(pool, &gate_up.view(), &mut out.view_mut()).unwrap();
        out.assert_guards(&poisoned);
        out
    };
    let gated = |row: usize, col: usize| {
        let gate = f64::from(gate_up.get(row, col));
        gate / (1.0 + (-gate).exp()) * f64::from(gate_up.get(row, cols + col))
    };
    let want: Vec<Vec<f64>> =
        (0..rows).map(|row| (0..cols).map(|col| gated(row, col)).collect()).collect();
    for pool in pools() {
        let what = format!("{pool:?} gating of {rows} x {cols} {dtype:?}");
        let out = run(&gate_up, &pool);
        assert_close(&what, &out, &want, 1e-30, 1e-5 + rounding(dtype));
        for row in 0..rows.min(20) {
            let alone = run(&one_row(&gate_up, dtype, row), &Pool::new(1, pool.isa()));
            assert_eq!(alone.row_bits(0), out.row_bits(row), "{what}: row {row} alone");
        }
    }
}

#[test]
fn gating() {
    for (rows, cols) in [(0, 4), (1, 1), (3, 15), (2, 16), (5, 100), (2, 5000), (60, 1536)] {
        for dtype in DTYPES {
            check_gate(rows, cols, dtype);
        }
    }
}

/// A call of `rope_and_write_kv`.
#[derive(Debug, Clone)]
struct Rotation {
    num_tokens: usize,
    num_heads: usize,
    head_dim: usize,
    rotary_dim: usize,
    dtype: DType,
    has_norms: bool,
}

const NUM_POSITIONS: usize = 50;
const NUM_KV_HEADS: usize = 2;
const EPS: f32 = 1e-6;

impl Rotation {
    fn layout(&self) -> KvLayout {
        KvLayout {
            num_blocks: self.num_tokens.div_ceil(16) + 1,
            num_kv_heads: NUM_KV_HEADS,
            block_size: 16,
            head_dim: self.head_dim,
            dtype: KvDType::F32,
        }
    }

    /// The rotated (and normed) heads of a row, in `f64`.
    fn want(&self, row: &[f64], weight: &[f64], angles: &[f64]) -> Vec<f64> {
        let half = self.rotary_dim / 2;
        let mut out = Vec::new();
        for head in row.chunks(self.head_dim) {
            let head =
                if self.has_norms { normed(head, weight, f64::from(EPS)) } else { head.to_vec() };
            let mut rotated = head.clone();
            for i in 0..half {
                let (cos, sin) = (angles[i], angles[half + i]);
                rotated[i] = head[i] * cos - head[half + i] * sin;
                rotated[half + i] = head[half + i] * cos + head[i] * sin;
            }
            out.extend(rotated);
        }
        out
    }

    fn check(&self) {
        let Self { num_tokens, num_heads, head_dim, dtype, .. } = *self;
        let mut noise = Noise::new((num_tokens * 100 + head_dim) as u64);
        let q = Buffer::noise(dtype, num_tokens, num_heads * head_dim, 8, &mut noise);
        let kv_cols = NUM_KV_HEADS * head_dim;
        let k = Buffer::noise(dtype, num_tokens, kv_cols, 1, &mut noise);
        let v = Buffer::noise(dtype, num_tokens, kv_cols, 0, &mut noise);
        let weight = Buffer::noise(DType::F32, 1, head_dim, 0, &mut noise);
        let mut angles = Buffer::poisoned(DType::F32, NUM_POSITIONS, self.rotary_dim, 0);
        for position in 0..NUM_POSITIONS {
            for i in 0..self.rotary_dim / 2 {
                let angle = noise.next() * 100.0;
                angles.set(position, i, angle.cos());
                angles.set(position, self.rotary_dim / 2 + i, angle.sin());
            }
        }
        let positions: Vec<i32> =
            (0..num_tokens).map(|_| noise.below(NUM_POSITIONS) as i32).collect();
        // Every third token is written nowhere; the others fill the pool from behind.
        let last = self.layout().num_blocks * 16 - 1;
        let slot_mapping: Vec<i32> =
            (0..num_tokens).map(|t| if t % 3 == 2 { -1 } else { (last - t) as i32 }).collect();

        let wide_weight = wide(&weight, 0);
        let want = |from: &Buffer, token: usize| {
            let angles = wide(&angles, positions[token] as usize);
            self.want(&wide(from, token), &wide_weight, &angles)
        };
        let want_q: Vec<_> = (0..num_tokens).map(|token| want(&q, token)).collect();
        for pool in pools() {
            let what = format!("{pool:?} {self:?}");
            let mut rotated = q.clone();
            let mut cache = vec![f32::NAN; self.layout().layer_len()];
            let norm = self.has_norms.then(|| weight.view());
            let rope = Rope {
                k: k.view(),
                v: v.view(),
                positions: &positions,
                slot_mapping: &slot_mapping,
                cos_sin: angles.view(),
                q_norm: norm,
                k_norm: norm,
                norm_eps: EPS,
            };
            let mut kv = KvViewMut::new(&mut cache, self.layout());
            rope_and_write_kv(&pool, &mut rotated.view_mut(), &mut kv, &rope).unwrap();
            rotated.assert_guards(&q);
            assert_close(&what, &rotated, &want_q, 4e-6, rounding(dtype) + 1e-6);
            let mut num_written = 0;
            for token in (0..num_tokens).filter(|&token| slot_mapping[token] >= 0) {
                let want_k = want(&k, token);
                for (col, want) in want_k.into_iter().enumerate() {
                    let (key, value) = self.read(&cache, slot_mapping[token] as usize, col);
                    let error = (f64::from(key) - want).abs();
                    assert!(error < 4e-6 + 1e-6 * want.abs(), "{what}: key {token}, {col}");
                    assert_eq!(value.to_bits(), v.get(token, col).to_bits(), "{what}: value");
                    num_written += 2;
                }
            }
            let num_kept = cache.iter().filter(|v| v.is_nan()).count();
            assert_eq!(num_kept + num_written, cache.len(), "{what}: other slots keep their NaN");
        }
    }

    fn read(&self, cache: &[f32], slot: usize, col: usize) -> (f32, f32) {
        let layout = self.layout();
        let (block, offset) = (slot / 16, slot % 16);
        let (head, dim) = (col / self.head_dim, col % self.head_dim);
        let key = layout.key_tile(block, head) + layout.key_at(offset, dim);
        let value = layout.value_tile(block, head) + layout.value_at(offset, dim);
        (cache[key], cache[value])
    }
}

#[test]
fn rotation() {
    for (head_dim, rotary_dim) in
        [(8, 8), (64, 64), (80, 80), (80, 32), (96, 96), (128, 6), (256, 256)]
    {
        for dtype in DTYPES {
            for has_norms in [false, true] {
                for num_tokens in [0, 1, 33] {
                    let num_heads = 3;
                    Rotation { num_tokens, num_heads, head_dim, rotary_dim, dtype, has_norms }
                        .check();
                }
            }
        }
    }
}

#[test]
fn rotation_of_many_tokens() {
    let (dtype, has_norms) = (DType::F32, true);
    Rotation { num_tokens: 400, num_heads: 9, head_dim: 64, rotary_dim: 64, dtype, has_norms }
        .check();
}

/// Two tokens may name one slot; one of them wins whole numbers.
#[test]
fn tokens_with_one_slot() {
    let (block_size, head_dim, dtype) = (16, 8, KvDType::Bf16);
    let layout = KvLayout { num_blocks: 1, num_kv_heads: 1, block_size, head_dim, dtype };
    let pool = Pool::new(3, fastserve_cpu::Isa::detect());
    let n = 4000;
    let numbers: Vec<Bf16> = (0..n * 8).map(|i| Bf16::from_f32((i / 8) as f32)).collect();
    let k = fastserve_cpu::Matrix::bf16(&numbers, 8);
    let angles = [1.0, 0.0];
    let rope = Rope {
        k,
        v: k,
        positions: &vec![0; n],
        slot_mapping: &vec![5; n],
        cos_sin: fastserve_cpu::Matrix::f32(&angles, 2),
        q_norm: None,
        k_norm: None,
        norm_eps: 0.0,
    };
    let mut q = numbers.clone();
    let mut cache = vec![Bf16::from_f32(f32::NAN); layout.layer_len()];
    let mut kv = KvViewMut::new(&mut cache, layout);
    let mut q = fastserve_cpu::MatrixMut::bf16(&mut q, 8);
    rope_and_write_kv(&pool, &mut q, &mut kv, &rope).unwrap();
    let written = cache.iter().filter(|v| !v.to_f32().is_nan());
    assert_eq!(written.clone().count(), 16);
    assert!(written.clone().all(|v| numbers.contains(v)));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn any_norm(rows in 0usize..5, cols in 1usize..300, residual: bool, narrow: bool) {
        let dtype = if narrow { DType::Bf16 } else { DType::F32 };
        check_norm(rows, cols, dtype, DType::F32, residual);
    }

    #[test]
    fn any_gate(rows in 0usize..5, cols in 1usize..300, narrow: bool) {
        check_gate(rows, cols, if narrow { DType::Bf16 } else { DType::F32 });
    }

    #[test]
    fn any_rotation(
        num_tokens in 0usize..20,
        num_heads in 1usize..4,
        eighths in 1usize..33,
        part in 0usize..128,
        has_norms: bool,
    ) {
        let head_dim = eighths * 8;
        let rotary_dim = 2 * (part % (head_dim / 2) + 1);
        Rotation { num_tokens, num_heads, head_dim, rotary_dim, dtype: DType::F32, has_norms }.check();
    }
}
