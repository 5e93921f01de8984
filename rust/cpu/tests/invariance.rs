//! Results do not depend on company: the bits of a token's attention are the same alone, in a chunk
//! of any size, in any batch, and with any number of threads.

mod common;

use common::Buffer;
use common::paged::{Call, Case};
use fastserve_cpu::{DType, Isa, KvDType, Pool};

fn assert_same(what: &str, got: &Buffer, row: usize, want: &Buffer, want_row: usize) {
    let (got, want) = (got.row_bits(row), want.row_bits(want_row));
    let differs = (0..got.len()).find(|&col| got[col] != want[col]);
    if let Some(col) = differs {
        panic!("{what}: column {col} is {:08x}, alone it is {:08x}", got[col], want[col]);
    }
}

/// Whether a token is looked at: all around the ends of ranges, and some between.
fn is_sampled(token: usize) -> bool {
    !(20..=240).contains(&(token % 256)) || token.is_multiple_of(11)
}

/// The sampled tokens of a sequence of `len`, computed one at a time by one thread, with nothing in
/// the cache after them.
fn alone(case: &Case, len: usize, isa: Isa) -> Buffer {
    let pool = Pool::new(1, isa);
    let mut out = Buffer::poisoned(case.dtype, len, case.num_heads * case.head_dim, 0);
    for token in (0..len).filter(|&token| is_sampled(token)) {
        let one = Call::new(&Case { rows: vec![(1, token + 1)], ..case.clone() }, 1);
        let got = one.run(&pool);
        for col in 0..out.cols() {
            out.set(token, col, got.get(0, col));
        }
    }
    out
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for kv_dtype in KvDType::ALL {
        for (num_heads, num_kv_heads, head_dim, block_size, window, dtype) in [
            (9, 3, 64, 16, 0, DType::F32),
            (4, 4, 24, 8, 0, DType::Bf16),
            (7, 1, 80, 32, 100, DType::F32),
            (2, 2, 128, 16, 300, DType::Bf16),
            (13, 1, 8, 8, 0, DType::F32),
        ] {
            let shape = Case { num_heads, num_kv_heads, head_dim, block_size, ..Case::default() };
            cases.push(Case { dtype, kv_dtype, window, ..shape });
        }
    }
    cases
}

/// A chunk ends at the sequence's last token so far, so chunk `from..to` is a row `(to - from, to)`.
#[test]
fn chunks_of_any_size() {
    const LEN: usize = 330;
    for isa in Isa::available() {
        let pools = [1, 2, 4].map(|n| Pool::new(n, isa));
        for case in cases() {
            let want = alone(&case, LEN, isa);
            for chunk in [2, 7, 16, 61, 256, LEN] {
                for from in (0..LEN).step_by(chunk) {
                    let to = LEN.min(from + chunk);
                    // Small chunks repeat one another; those around the ends of ranges are enough.
                    if chunk < 32 && (40..=230).contains(&(from % 256)) {
                        continue;
                    }
                    let row = Case { rows: vec![(to - from, to)], ..case.clone() };
                    let got = Call::new(&row, 1).run(&pools[chunk % 3]);
                    for token in (from..to).filter(|&token| is_sampled(token)) {
                        let what = format!("{isa:?} {row:?} token {token}");
                        assert_same(&what, &got, token - from, &want, token);
                    }
                }
            }
        }
    }
}

#[test]
fn any_batch_and_any_number_of_threads() {
    // Row 0 is the one looked at, so that its content is that of `alone`.
    let company: [&[(usize, usize)]; 4] = [
        &[(1, 2000)],
        &[(1, 300), (200, 700), (3, 3)],
        &[(0, 0), (2, 0), (64, 64)],
        &[(1, 17); 20],
    ];
    let pools = Isa::available().into_iter().map(|isa| [1, 2, 4, 7].map(|n| Pool::new(n, isa)));
    let pools: Vec<[Pool; 4]> = pools.collect();
    for case in cases() {
        for (tokens, len) in [(1, 1), (1, 640), (5, 1500), (100, 513)] {
            let single = Call::new(&Case { rows: vec![(tokens, len)], ..case.clone() }, 1);
            let want: Vec<Buffer> = pools.iter().map(|pools| single.run(&pools[0])).collect();
            for (i, others) in company.into_iter().enumerate() {
                let rows = std::iter::once((tokens, len)).chain(others.iter().copied());
                let batch = Case { rows: rows.collect(), ..case.clone() };
                let call = Call::new(&batch, 1);
                for (pools, want) in pools.iter().zip(&want) {
                    for pool in [&pools[i], &pools[(i + 1) % 4]] {
                        let got = call.run(pool);
                        for token in 0..tokens {
                            let what = format!("{pool:?} {batch:?} token {token}");
                            assert_same(&what, &got, token, want, token);
                        }
                    }
                }
            }
        }
    }
}

/// That rows share blocks says how often memory is read, and nothing else.
#[test]
fn shared_blocks_change_no_bit() {
    let pools = Isa::available().into_iter().map(|isa| [1, 2, 5].map(|n| Pool::new(n, isa)));
    for pools in pools {
        for case in cases() {
            let case = Case { window: if case.window == 100 { 0 } else { case.window }, ..case };
            for num_shared_tokens in [256, 512, 528, 700] {
                let num_shared_blocks = num_shared_tokens / case.block_size;
                let rows = (0..13).map(|row| (1 + row / 9, 520 + 41 * row)).collect();
                let case = Case { rows, num_shared_blocks, ..case.clone() };
                let call = Call::new(&case, 21);
                let want = call.run_told(&pools[0], false);
                for pool in &pools {
                    let got = call.run(pool);
                    for token in 0..got.rows() {
                        let what = format!("{pool:?} {case:?} token {token}");
                        assert_same(&what, &got, token, &want, token);
                    }
                }
            }
        }
    }
}

/// The sets with a fused multiply-add run the same operations.
#[test]
fn vector_sets_agree_bit_for_bit() {
    let sets: Vec<Isa> = Isa::available().into_iter().filter(|&isa| isa != Isa::Portable).collect();
    for case in cases() {
        let rows = vec![(1, 700), (90, 400), (5, 5)];
        let call = Call::new(&Case { rows, ..case }, 4);
        let results: Vec<Buffer> = sets.iter().map(|&isa| call.run(&Pool::new(2, isa))).collect();
        for (set, got) in sets.iter().zip(&results) {
            for token in 0..got.rows() {
                assert_same(&format!("{set:?} token {token}"), got, token, &results[0], token);
            }
        }
    }
}
