//! Keys and values as int8: what is stored is the definition's, bit by bit, and bad numbers are neither
//! hidden nor passed on to rows that do not read them.

mod common;

use common::cache::{Cache, quantized};
use common::{Noise, pools};
use fastserve_cpu::{
    Attention, Bf16, KvDType, KvLayout, Matrix, MatrixMut, Pool, Rope, paged_attention,
    rope_and_write_kv,
};

const HEAD_DIM: usize = 24;
const BLOCK_SIZE: usize = 16;

fn layout(num_blocks: usize) -> KvLayout {
    let (num_kv_heads, dtype) = (1, KvDType::I8);
    KvLayout { num_blocks, num_kv_heads, block_size: BLOCK_SIZE, head_dim: HEAD_DIM, dtype }
}

/// Store keys and values of tokens 0, 1, … in slots 0, 1, ….
fn store(pool: &Pool, cache: &mut Cache, k: &[f32], v: &[f32]) {
    let num_tokens = k.len() / HEAD_DIM;
    let rope = Rope {
        k: Matrix::f32(k, HEAD_DIM),
        v: Matrix::f32(v, HEAD_DIM),
        positions: &vec![0; num_tokens],
        slot_mapping: &(0..num_tokens as i32).collect::<Vec<_>>(),
        cos_sin: Matrix::f32(&[1.0, 0.0], 2),
        q_norm: None,
        k_norm: None,
        norm_eps: 0.0,
    };
    let mut q = k.to_vec();
    let q = &mut MatrixMut::f32(&mut q, HEAD_DIM);
    rope_and_write_kv(pool, q, &mut cache.view_mut(), &rope).unwrap();
}

/// A head with the numbers first, then zeros.
fn head(numbers: &[f32]) -> Vec<f32> {
    let mut head = numbers.to_vec();
    head.resize(HEAD_DIM, 0.0);
    head
}

/// Heads at the edges of the definition.
fn edges() -> Vec<Vec<f32>> {
    let smallest = 127.0 * f32::MIN_POSITIVE;
    let below = f32::from_bits(smallest.to_bits() - 1);
    let mut heads = vec![
        head(&[]),
        head(&[-0.0]),
        // The scale is 1, so these are ties.
        head(&[127.0, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 126.5, -126.5]),
        head(&[-127.0, 0.499_999_97, -0.499_999_97, 125.5]),
        head(&[f32::MAX, -f32::MAX, f32::MAX / 254.0, 1.0]),
        head(&[smallest, -smallest, smallest / 3.0]),
        head(&[below, -below]),
        head(&[f32::from_bits(1), -f32::from_bits(300)]),
        head(&[1e-30, 1e30, -3e29]),
    ];
    // The largest number in every place.
    heads.extend((0..HEAD_DIM).map(|dim| {
        let mut head = vec![0.25; HEAD_DIM];
        head[dim] = if dim % 2 == 0 { 3.7 } else { -3.7 };
        head
    }));
    let mut noise = Noise::new(5);
    for exponent in [-120, -30, 0, 30, 120] {
        let size = 2_f32.powi(exponent);
        heads.extend((0..20).map(|_| (0..HEAD_DIM).map(|_| noise.next() * size).collect()));
    }
    heads
}

#[test]
fn what_is_stored_is_the_definitions() {
    let heads = edges();
    let flat: Vec<f32> = heads.concat();
    let reversed: Vec<f32> = heads.iter().rev().flatten().copied().collect();
    let layout = layout(heads.len().div_ceil(BLOCK_SIZE));
    let mut want = Cache::poisoned(layout);
    for (slot, (key, value)) in heads.iter().zip(heads.iter().rev()).enumerate() {
        want.write(slot, 0, key, value);
    }
    for pool in pools() {
        let mut got = Cache::poisoned(layout);
        store(&pool, &mut got, &flat, &reversed);
        assert!(got.bits() == want.bits(), "{pool:?}");
    }
}

/// The bound that `store.rs` states, in `f64`.
#[test]
fn numbers_move_by_half_a_scale_at_most() {
    for x in edges() {
        let (scale, numbers) = quantized(&x);
        let scale = f64::from(scale);
        assert!(numbers.iter().all(|n| (-127..=127).contains(n)));
        for (x, n) in x.iter().zip(numbers) {
            let error = (f64::from(n) * scale - f64::from(*x)).abs();
            // Zero for what is below the smallest scale; 127 roundings of the quotient.
            let most = scale * (0.5 + 127.0 * 6e-8) + if scale == 0.0 { 1.5e-36 } else { 0.0 };
            assert!(error <= most, "{x:e} became {n} times {scale:e}");
        }
    }
}

/// Bad numbers of every kind, as a key and as a value, in any place of the head.
#[test]
fn what_is_not_a_number_reaches_the_rows_that_read_it_and_no_other() {
    const LEN: usize = 40;
    let mut noise = Noise::new(6);
    let mut numbers = || -> Vec<f32> { (0..LEN * HEAD_DIM).map(|_| noise.next()).collect() };
    let (k, v, q) = (numbers(), numbers(), numbers());
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (token, dim, is_key) in [(0, 0, true), (17, 23, true), (17, 5, false), (39, 16, false)]
        {
            let (mut k, mut v) = (k.clone(), v.clone());
            (if is_key { &mut k } else { &mut v })[token * HEAD_DIM + dim] = bad;
            for pool in pools() {
                // The last block is another row's, which must not notice.
                let mut cache = Cache::poisoned(layout(4));
                store(&pool, &mut cache, &k, &v);
                for slot in 48..52 {
                    let row = slot - 48;
                    let part = row * HEAD_DIM..(row + 1) * HEAD_DIM;
                    cache.write(slot, 0, &q[part.clone()], &q[part]);
                }
                let out = attend(&pool, &cache, &q, LEN);
                for (at, row) in out.chunks(HEAD_DIM).enumerate() {
                    let reads_it = (token..LEN).contains(&at);
                    let what = format!("{pool:?} {bad} of token {token} in row {at}");
                    assert!(row.iter().all(|x| x.is_nan() == reads_it), "{what}: {row:?}");
                }
            }
        }
    }
}

/// All tokens of a sequence in blocks 0, 1, 2, and two rows of another one in block 3.
fn attend(pool: &Pool, cache: &Cache, q: &[f32], len: usize) -> Vec<f32> {
    let q = [q, &q[..2 * HEAD_DIM]].concat();
    let mut out = vec![0.0; q.len()];
    let args = Attention {
        q: Matrix::f32(&q, HEAD_DIM),
        kv: cache.view(),
        block_tables: &[0, 1, 2, 3, -1, -1],
        max_blocks: 3,
        row_slots: &[0, 1],
        query_indptr: &[0, len as i32, len as i32 + 2],
        seq_lens: &[len as i32, 4],
        num_shared_blocks: &[],
        scale: 0.3,
        window: 0,
        softcap: 0.0,
    };
    paged_attention(pool, &args, &mut MatrixMut::f32(&mut out, HEAD_DIM)).unwrap();
    out
}

/// Two tokens may name one slot: every element is one of the two tokens'.
#[test]
fn tokens_with_one_slot() {
    let num_tokens = 4000;
    let given: Vec<Bf16> = (0..num_tokens * HEAD_DIM)
        .map(|i| Bf16::from_f32(if (i / HEAD_DIM).is_multiple_of(2) { 127.0 } else { -254.0 }))
        .collect();
    let k = Matrix::bf16(&given, HEAD_DIM);
    let rope = Rope {
        k,
        v: k,
        positions: &vec![0; num_tokens],
        slot_mapping: &vec![5; num_tokens],
        cos_sin: Matrix::f32(&[1.0, 0.0], 2),
        q_norm: None,
        k_norm: None,
        norm_eps: 0.0,
    };
    for pool in pools() {
        let mut q = given.clone();
        let q = &mut MatrixMut::bf16(&mut q, HEAD_DIM);
        let mut cache = Cache::poisoned(layout(1));
        rope_and_write_kv(&pool, q, &mut cache.view_mut(), &rope).unwrap();
        let bytes: Vec<i8> =
            cache.bits().iter().flat_map(|word| word.to_ne_bytes().map(u8::cast_signed)).collect();
        let layout = layout(1);
        for (tile, place) in [
            (layout.key_tile(0, 0), KvLayout::key_at as fn(&KvLayout, usize, usize) -> usize),
            (layout.value_tile(0, 0), KvLayout::value_at),
        ] {
            let numbers = (0..HEAD_DIM).map(|dim| bytes[tile + place(&layout, 5, dim)]);
            assert!(numbers.into_iter().all(|n| [127, -127].contains(&n)));
            let scale = f32::from_bits(cache.bits()[(tile + layout.scale_at(5)) / 4]);
            assert!([1.0, 2.0].contains(&scale), "{scale}");
        }
    }
}
