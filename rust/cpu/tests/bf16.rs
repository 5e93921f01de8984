//! Products of bfloat16 by bfloat16, against their definition in plain Rust: bit by bit, for every shape,
//! instruction set and number of threads. Products of two are exact, so that fused multiply-adds define the
//! bits of the portable path too. And attention over them, against that by fused multiply-adds.

mod common;

use std::ops::Range;

use common::chains::chain;
use common::paged::{Call, Case};
use common::{Buffer, DTYPES, Noise, pools};
use fastserve_cpu::{Bf16, DType, Isa, KvDType, Packed, Pool, Weight, WeightFormat, linear};

/// Shapes around every edge: rows of a tile, of a block; panels, strips; pairs, pieces of K.
const ROWS: [usize; 12] = [1, 2, 3, 4, 5, 6, 12, 13, 16, 29, 192, 197];
const COLUMNS: [usize; 8] = [1, 15, 16, 17, 33, 64, 65, 143];
const LENGTHS: [usize; 10] = [1, 2, 3, 127, 128, 129, 255, 258, 576, 1031];

/// Rows of bfloat16, as `f32`.
fn noise_rows(rows: usize, len: usize, noise: &mut Noise) -> Vec<Vec<f32>> {
    let mut number = || Bf16::from_f32(noise.next()).to_f32();
    (0..rows).map(|_| (0..len).map(|_| number()).collect()).collect()
}

fn weight(rows: &[Vec<f32>]) -> Weight {
    let number = |&number: &f32| Bf16::from_f32(number).0.to_le_bytes();
    let bytes: Vec<u8> = rows.iter().flatten().flat_map(number).collect();
    let mut packed = Packed::new(WeightFormat::Bf16, rows.len(), rows[0].len()).unwrap();
    packed.fill(0, &bytes).unwrap();
    Weight::new(vec![packed]).unwrap()
}

/// Compare a product with the definition.
fn check(pool: &Pool, x: &Buffer, w: &[Vec<f32>], bias: Option<&Buffer>, out_dtype: DType) {
    let mut out = Buffer::poisoned(out_dtype, x.rows(), w.len(), 5);
    let before = out.clone();
    let bias_view = bias.map(Buffer::view);
    linear(pool, &x.view(), &weight(w), bias_view.as_ref(), &mut out.view_mut()).unwrap();
    out.assert_guards(&before);
    let mut want = Buffer::poisoned(out_dtype, 1, 1, 0);
    for row in 0..x.rows() {
        let numbers: Vec<f32> = (0..x.cols()).map(|k| x.get(row, k)).collect();
        for (col, w) in w.iter().enumerate() {
            want.set(0, 0, chain(true, &numbers, w, bias.map(|bias| bias.get(0, col))));
            let (got, want) = (out.get(row, col), want.get(0, 0));
            assert!(
                got.to_bits() == want.to_bits(),
                "{pool:?}, {} rows of {}: [{row}, {col}] is {got:e}, want {want:e}",
                x.rows(),
                x.cols()
            );
        }
    }
}

/// All row counts and widths with the shortest lengths, some of them with the others. Rows of `x` lie an
/// odd number of elements apart, or an even one.
#[test]
fn every_shape() {
    let mut noise = Noise::new(1);
    let pools = pools();
    for (i, len) in LENGTHS.into_iter().enumerate() {
        let w = noise_rows(143, len, &mut noise);
        for (j, columns) in COLUMNS.into_iter().enumerate() {
            for (k, rows) in ROWS.into_iter().enumerate() {
                if i > 2 && (i + j + k) % 5 > 0 || rows * len * columns > 1_500_000 {
                    continue;
                }
                let x = Buffer::noise(DType::Bf16, rows, len, 2 + k % 2, &mut noise);
                let kind = [None, Some(DType::F32), Some(DType::Bf16)][(j + k) % 3];
                let bias = kind.map(|dtype| Buffer::noise(dtype, 1, columns, 0, &mut noise));
                // Every instruction set, with one thread or with three.
                for pool in pools.iter().skip((i + j + k) % 2).step_by(2) {
                    check(pool, &x, &w[..columns], bias.as_ref(), DTYPES[(i + k) % 2]);
                }
            }
        }
    }
}

/// Threads share a product out; each element is still computed whole, by one of them.
#[test]
fn large_enough_to_be_shared() {
    let mut noise = Noise::new(2);
    let w = noise_rows(1000, 577, &mut noise);
    for pool in pools() {
        for rows in [1, 3, 9] {
            let x = Buffer::noise(DType::Bf16, rows, 577, 0, &mut noise);
            check(&pool, &x, &w, None, DType::F32);
        }
    }
}

/// One row by one, both given as `f32`.
fn product_of(pool: &Pool, x_dtype: DType, x: &[f32], w: &[f32]) -> f32 {
    let mut row = Buffer::poisoned(x_dtype, 1, x.len(), 0);
    x.iter().enumerate().for_each(|(k, &number)| row.set(0, k, number));
    let mut out = Buffer::poisoned(DType::F32, 1, 1, 0);
    linear(pool, &row.view(), &weight(&[w.to_vec()]), None, &mut out.view_mut()).unwrap();
    out.get(0, 0)
}

/// After 2^24, of which neighbours are two apart: 1 then 2 is 2, since 2^24 + 1 is a tie that goes down; 2
/// then 1 would be 4, since 2^24 + 3 is one that goes up.
#[test]
fn the_order_is_that_of_k() {
    let (x, w) = ([4096.0, 0.0, 1.0, 2.0], [4096.0, 0.0, 1.0, 1.0]);
    for (pool, dtype) in pools().iter().flat_map(|pool| DTYPES.map(|d| (pool, d))) {
        let got = product_of(pool, dtype, &x, &w);
        assert_eq!(got.to_bits(), 16_777_218_f32.to_bits(), "{pool:?}: {got}");
    }
}

/// The one difference between instruction sets: that of bfloat16 knows no subnormal numbers.
#[test]
fn numbers_next_to_zero() {
    let tiny = f32::MIN_POSITIVE / 2.0;
    for pool in pools() {
        let want = if pool.isa() == Isa::Avx512Bf16 { 0.0 } else { tiny };
        for (dtype, want) in [(DType::Bf16, want), (DType::F32, tiny)] {
            let got = product_of(&pool, dtype, &[tiny], &[1.0]);
            assert_eq!(got.to_bits(), want.to_bits(), "{pool:?} {dtype:?}: {got:e}");
        }
    }
}

/// Rows of every size, next to zero too, have the same bits alone and in company.
#[test]
fn rows_alone_and_together() {
    const ROWS: usize = 200;
    let mut noise = Noise::new(3);
    for len in [33, 576] {
        let weight = weight(&noise_rows(143, len, &mut noise));
        let mut x = Buffer::noise(DType::Bf16, ROWS, len, 3, &mut noise);
        for row in 0..ROWS {
            let size = [1.0, 1e30, 1e-30, 1e-38][row % 4];
            (0..len).for_each(|k| x.set(row, k, x.get(row, k) * size));
        }
        for pool in pools() {
            let product = |rows: Range<usize>| {
                let mut some = Buffer::poisoned(DType::Bf16, rows.len(), len, 1);
                for (i, row) in rows.clone().enumerate() {
                    (0..len).for_each(|k| some.set(i, k, x.get(row, k)));
                }
                let mut out = Buffer::poisoned(DType::F32, rows.len(), 143, 0);
                linear(&pool, &some.view(), &weight, None, &mut out.view_mut()).unwrap();
                out
            };
            let together = product(0..ROWS);
            for (first, count) in [(0, 1), (1, 1), (7, 2), (3, 4), (20, 5), (150, 13), (190, 10)] {
                let some = product(first..first + count);
                for row in first..first + count {
                    let (alone, want) = (some.row_bits(row - first), together.row_bits(row));
                    assert!(alone == want, "{pool:?}: row {row} of {len} with {count} others");
                }
            }
        }
    }
}

/// Heads and blocks of every kind; ends of what a row sees at odd keys and at even ones.
fn attention_cases() -> Vec<Case> {
    let shapes = [(4, 2, 24, 8, 0), (6, 1, 64, 16, 0), (2, 2, 80, 32, 19), (7, 1, 136, 16, 256)];
    let case = |(num_heads, num_kv_heads, head_dim, block_size, window)| Case {
        rows: vec![(1, 300), (7, 20), (1, 1), (9, 275), (2, 38)],
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        window,
        dtype: DType::Bf16,
        kv_dtype: KvDType::Bf16,
        ..Case::default()
    };
    shapes.into_iter().map(case).collect()
}

/// Every set with fused multiply-adds, pairs or not, comes to the same.
#[test]
fn attention_by_pairs_is_that_by_single_numbers() {
    let fused = pools().into_iter().filter(|pool| pool.isa() != Isa::Portable);
    let fused: Vec<Pool> = fused.collect();
    for case in attention_cases() {
        let call = Call::new(&case, 5);
        let results: Vec<Buffer> = fused.iter().map(|pool| call.run(pool)).collect();
        for (pool, got) in fused.iter().zip(&results) {
            for row in 0..got.rows() {
                let (got, want) = (got.row_bits(row), results[0].row_bits(row));
                assert!(got == want, "{pool:?} {case:?}: row {row} differs from {:?}'s", fused[0]);
            }
        }
    }
}

/// A chunk's tokens end at odd keys and at even ones, where a token alone has a key without a partner, or
/// others have.
#[test]
fn attention_alone_and_in_a_chunk() {
    for case in attention_cases() {
        let chunk = Call::new(&Case { rows: vec![(13, 270)], ..case.clone() }, 6);
        for pool in pools() {
            let together = chunk.run(&pool);
            for token in 0..13 {
                let rows = vec![(1, 258 + token)];
                let alone = Call::new(&Case { rows, ..case.clone() }, 6).run(&pool);
                let (got, want) = (together.row_bits(token), alone.row_bits(0));
                assert!(got == want, "{pool:?} {case:?}: token {token} of a chunk");
            }
        }
    }
}
