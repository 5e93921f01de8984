//! Attention against a plain reference in `f64`, for every instruction set of the machine.
//!
//! Tolerance, written down: with |q|, |k|, |v| at most 2, an output in `f32` is within 4e-6 +
//! 2e-6 · |want| of the reference (scores of up to 256 products, weights and sums in `f32`; twice
//! that without a fused multiply-add or with a softcap); in bfloat16 rounding comes on top. Where
//! queries and cache are both bfloat16, weights are off by 2^-8 of themselves at most, and values are
//! at most 4 from their mean: 2^-6 at worst. Errors of either sign meet, and 2^-7 holds. The cache's own
//! rounding is in the reference's inputs.

mod common;

use common::cache::Cache;
use common::paged::{Call, Case};
use common::{Buffer, DTYPES, assert_close, pools, rounding};
use fastserve_cpu::{Attention, DType, KvDType, KvLayout, paged_attention};
use proptest::prelude::*;

fn check(case: &Case, seed: u64) {
    let call = Call::new(case, seed);
    let want = call.reference();
    for pool in pools() {
        let what = format!("{pool:?} {case:?}");
        let got = call.run(&pool);
        let relative = rounding(case.dtype) + 4e-6;
        let is_narrow = case.dtype == DType::Bf16 && case.kv_dtype == KvDType::Bf16;
        let absolute = 8e-6 + if is_narrow { 2_f64.powi(-7) } else { 0.0 };
        assert_close(&what, &got, &want, absolute, relative);
    }
}

#[test]
fn every_shape_of_head_and_block() {
    for head_dim in [8, 24, 32, 64, 80, 96, 128, 200, 256] {
        for block_size in [8, 16, 32, 48] {
            for kv_dtype in KvDType::ALL {
                let rows = vec![(1, 1), (1, 37), (5, 20)];
                let (num_heads, num_kv_heads) = (6, 2);
                let shape = Case { rows, num_heads, num_kv_heads, head_dim, ..Case::default() };
                check(&Case { block_size, kv_dtype, ..shape }, head_dim as u64);
            }
        }
    }
}

#[test]
fn mixed_rows_over_several_ranges() {
    let rows = vec![(1, 700), (70, 300), (0, 9), (33, 33), (1, 256), (1, 257), (2, 512), (17, 530)];
    for dtype in DTYPES {
        for (num_heads, num_kv_heads) in [(9, 3), (4, 4), (14, 2), (7, 1)] {
            let shape = Case { rows: rows.clone(), num_heads, num_kv_heads, ..Case::default() };
            check(&Case { dtype, kv_dtype: KvDType::Bf16, ..shape.clone() }, 7);
            check(&Case { dtype, kv_dtype: KvDType::I8, ..shape.clone() }, 6);
            check(&Case { dtype, block_size: 8, ..shape }, 8);
        }
    }
}

/// Rows that share nothing, less than a range, some ranges; of one token and of several; more than a
/// tile takes; between others.
#[test]
fn rows_that_share_blocks() {
    let rows = vec![
        (3, 700),
        (1, 900),
        (1, 600),
        (1, 513),
        (1, 512),
        (2, 800),
        (2, 801),
        (2, 802),
        (40, 900),
        (1, 300),
        (1, 900),
        (0, 0),
        (2, 0),
        (1, 777),
    ];
    let many: Vec<_> = (0..37).map(|row| (1, 530 + row)).collect();
    for num_shared_blocks in [1, 16, 17, 32, 44] {
        let cases = [(9, 3, KvDType::F32), (4, 4, KvDType::Bf16), (6, 2, KvDType::I8)];
        for (num_heads, num_kv_heads, kv_dtype) in cases {
            let shape = Case { num_heads, num_kv_heads, kv_dtype, ..Case::default() };
            let shape = Case { num_shared_blocks, head_dim: 32, ..shape };
            check(&Case { rows: rows.clone(), ..shape.clone() }, 11);
            check(&Case { rows: many.clone(), ..shape.clone() }, 12);
            check(&Case { rows: rows.clone(), window: 800, ..shape }, 13);
        }
    }
}

#[test]
fn more_heads_in_a_group_than_rows_in_a_tile() {
    let shape = Case { rows: vec![(3, 300), (1, 5)], num_heads: 71, ..Case::default() };
    check(&Case { head_dim: 8, ..shape }, 3);
}

#[test]
fn windows() {
    for window in [1, 2, 7, 16, 63, 255, 256, 257, 600] {
        for block_size in [8, 16] {
            for kv_dtype in [KvDType::F32, KvDType::I8] {
                let rows = vec![(1, 700), (40, 640), (300, 300), (1, 3)];
                let (num_heads, num_kv_heads) = (4, 2);
                let shape = Case { rows, num_heads, num_kv_heads, kv_dtype, ..Case::default() };
                check(&Case { block_size, window, head_dim: 32, ..shape }, window as u64);
            }
        }
    }
}

#[test]
fn softcap() {
    for softcap in [0.5, 5.0, 50.0] {
        for kv_dtype in KvDType::ALL {
            let rows = vec![(1, 300), (20, 40)];
            let shape = Case { rows, num_heads: 4, num_kv_heads: 2, kv_dtype, ..Case::default() };
            check(&Case { softcap, ..shape }, 5);
        }
    }
}

#[test]
fn no_rows_and_padding_rows() {
    check(&Case { rows: vec![], ..Case::default() }, 0);
    check(&Case { rows: vec![(0, 0), (0, 5)], ..Case::default() }, 0);
    check(&Case { rows: vec![(2, 0), (1, 5), (1, 0)], ..Case::default() }, 0);
}

/// int8 moves the result no further than the rounding of keys and values explains.
#[test]
fn int8_is_near_what_was_given() {
    for (head_dim, block_size) in [(8, 8), (64, 16), (80, 32), (256, 16)] {
        let rows = vec![(1, 700), (30, 300), (1, 1), (5, 20)];
        let shape = Case { rows, num_heads: 4, num_kv_heads: 2, head_dim, ..Case::default() };
        let call = Call::new(&Case { block_size, kv_dtype: KvDType::I8, ..shape }, 9);
        let (want, bounds) = (call.reference_of_given(), call.bounds_of_int8());
        for pool in pools() {
            let got = call.run(&pool);
            for (row, (want, bounds)) in want.iter().zip(&bounds).enumerate() {
                for (col, (want, bound)) in want.iter().zip(bounds).enumerate() {
                    let error = (f64::from(got.get(row, col)) - want).abs();
                    let what = format!("{pool:?} {:?}: [{row}, {col}]", call.case);
                    assert!(error <= *bound, "{what} is off by {error}, want {bound} at most");
                }
            }
        }
    }
}

/// Values 1 and -1 with weights 1 and 2^-x: what is left is half of the difference, and nothing where the
/// second weight was rounded to 1.
#[test]
fn weights_are_rounded_where_all_is_bfloat16() {
    let head_dim = 8;
    // One less its neighbour in bfloat16 is 2^-8; in base 2 and with a scale of 1/4 about 2^-9.5.
    let keys = [1.0, 1.0 - 2_f32.powi(-8)];
    let (scale, x) = (0.25, 2_f64.powi(-8) * 0.25);
    let exact = -(-x).exp_m1() / (1.0 + (-x).exp());
    for (dtype, kv_dtype) in DTYPES.into_iter().flat_map(|d| KvDType::ALL.map(|kv| (d, kv))) {
        let layout =
            KvLayout { num_blocks: 1, num_kv_heads: 1, block_size: 8, head_dim, dtype: kv_dtype };
        let mut cache = Cache::poisoned(layout);
        for (slot, key) in keys.into_iter().enumerate() {
            cache.write(slot, 0, &[key; 8], &[1.0 - 2.0 * slot as f32; 8]);
        }
        let mut q = Buffer::poisoned(dtype, 1, head_dim, 0);
        (0..head_dim).for_each(|col| q.set(0, col, if col == 3 { 1.0 } else { 0.0 }));
        let attention = Attention {
            q: q.view(),
            kv: cache.view(),
            block_tables: &[0],
            max_blocks: 1,
            row_slots: &[0],
            query_indptr: &[0, 1],
            seq_lens: &[2],
            num_shared_blocks: &[],
            scale,
            window: 0,
            softcap: 0.0,
        };
        let is_rounded = dtype == DType::Bf16 && kv_dtype == KvDType::Bf16;
        let want = if is_rounded { 0.0 } else { exact };
        for pool in pools() {
            let mut out = Buffer::poisoned(dtype, 1, head_dim, 0);
            paged_attention(&pool, &attention, &mut out.view_mut()).unwrap();
            let error = f64::from(out.get(0, 0)) - want;
            assert!(error.abs() < 5e-6, "{pool:?} {dtype:?} over {kv_dtype:?} is off by {error}");
        }
    }
}

/// A row whose own numbers are NaN says so, and the others do not notice.
#[test]
fn nan_stays_in_its_row() {
    let mut call = Call::new(&Case { rows: vec![(2, 300), (2, 20)], ..Case::default() }, 1);
    let clean = call.reference();
    call.q.set(1, 3, f32::NAN);
    for pool in pools() {
        let got = call.run(&pool);
        for (row, want) in clean.iter().enumerate() {
            for (col, &want) in want.iter().enumerate() {
                let value = got.get(row, col);
                let right =
                    if row == 1 { value.is_nan() } else { (f64::from(value) - want).abs() < 2e-5 };
                assert!(right, "{pool:?}: [{row}, {col}] is {value}");
            }
        }
    }
}

/// `rope_and_write_kv` puts every element where the layout says, and nothing anywhere else.
#[test]
fn the_writing_kernel_follows_the_layout() {
    for (block_size, head_dim) in [(8, 8), (16, 64), (32, 80), (48, 256)] {
        for kv_dtype in KvDType::ALL {
            let rows = vec![(0, 1), (0, 75)];
            let shape = Case { rows, num_kv_heads: 2, num_heads: 2, ..Case::default() };
            let call = Call::new(&Case { head_dim, block_size, kv_dtype, ..shape }, 2);
            for pool in pools() {
                assert!(call.written_by_the_kernel(&pool) == call.cache_bits(), "{:?}", call.case);
            }
        }
    }
}

fn any_case() -> impl Strategy<Value = Case> {
    let row = (0usize..40, prop_oneof![1usize..64, 250usize..270, 500usize..600]);
    let rows = prop::collection::vec(row.prop_map(|(n, len)| (n.min(len), len)), 0..4);
    let heads = (1usize..4, 1usize..9);
    let block_size = prop_oneof![Just(8usize), Just(16), Just(32)];
    let dtype = prop_oneof![Just(DType::F32), Just(DType::Bf16)];
    let kv_dtype = prop::sample::select(KvDType::ALL.to_vec());
    let window = prop_oneof![Just(0usize), 1usize..400];
    let shared = 0usize..80;
    (rows, heads, 1usize..17, block_size, dtype, kv_dtype, window, shared).prop_map(
        |(rows, (num_kv_heads, group), eighths, block_size, dtype, kv_dtype, window, shared)| {
            Case {
                rows,
                num_heads: num_kv_heads * group,
                num_kv_heads,
                head_dim: eighths * 8,
                block_size,
                dtype,
                kv_dtype,
                window,
                softcap: 0.0,
                num_shared_blocks: shared,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn any_shape(case in any_case(), seed in 0u64..1000) {
        check(&case, seed);
    }
}
