//! Values come from a separate implementation of the module header's formula.

use super::*;

fn chain(hasher: &ChainHasher, blocks: &[&[Token]]) -> u64 {
    let root = hasher.root(Namespace(0));
    blocks.iter().fold(root, |hash, block| hasher.next(hash, block, &[]))
}

#[test]
fn constants_are_those_of_split_mix() {
    let mut state = 0;
    let first: Vec<u64> = (0..3).map(|_| split_mix(&mut state)).collect();
    assert_eq!(first, [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4, 0x06c4_5d18_8009_454f]);
}

#[test]
fn hashes_are_the_same_on_every_machine() {
    let hasher = ChainHasher::new(42, 16);
    let root = hasher.root(Namespace(7 << 64 | 9));
    assert_eq!(root, 0x16e1_6746_1c30_c1f5);
    let tokens: Vec<Token> = (1..17).collect();
    let first = hasher.next(root, &tokens, &[]);
    assert_eq!(first, 0x0692_0b27_1ee7_8624);
    let tokens: Vec<Token> = (100..116).collect();
    let spans =
        [Span { start: 3, end: 40, digest: 5 << 64 | 6 }, Span { start: 40, end: 41, digest: 1 }];
    assert_eq!(hasher.next(first, &tokens, &spans), 0x3624_e688_df9b_979e);

    let hasher = ChainHasher::new(42, 2);
    let root = hasher.root(Namespace(0));
    assert_eq!(root, 0x320f_fed6_2cfc_c73c);
    assert_eq!(hasher.next(root, &[5, 6], &[]), 0x10bb_6965_b160_8382);
}

#[test]
fn all_that_is_hashed_changes_the_hash() {
    let hasher = ChainHasher::new(1, 16);
    let zeros = [0; 16];
    let mut found = vec![chain(&hasher, &[&zeros]), chain(&hasher, &[&zeros, &zeros])];
    for position in 0..16 {
        for bit in 0..32 {
            let mut tokens = zeros;
            tokens[position] = 1 << bit;
            found.push(chain(&hasher, &[&tokens]));
            found.push(chain(&hasher, &[&tokens, &zeros]));
            found.push(chain(&hasher, &[&zeros, &tokens]));
        }
    }
    for bit in 0..128 {
        found.push(hasher.next(hasher.root(Namespace(1 << bit)), &zeros, &[]));
        let spans = [Span { start: 0, end: 1, digest: 1 << bit }];
        found.push(hasher.next(hasher.root(Namespace(0)), &zeros, &spans));
    }
    found.push(chain(&ChainHasher::new(2, 16), &[&zeros]));
    let num_found = found.len();
    found.sort_unstable();
    found.dedup();
    assert_eq!(found.len(), num_found);
}

#[test]
fn the_upper_half_is_spread_evenly() {
    let hasher = ChainHasher::new(3, 8);
    let root = hasher.root(Namespace(0));
    let mut counts = vec![0_u32; 1 << 10];
    for token in 0..100 << 10 {
        let hash = hasher.next(root, &[token, 0, 0, 0, 0, 0, 0, 0], &[]);
        counts[(hash >> 54) as usize] += 1;
    }
    // 100 a bucket, standard deviation 10.
    assert!(counts.iter().all(|count| (50..150).contains(count)), "{counts:?}");
}
