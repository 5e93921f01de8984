//! The hash that finds a tree node. It never decides equality, and it never leaves the process.
//!
//! A block's hash is chained to its parent's, so it stands for the whole prefix:
//!
//! ```text
//! hash(block) = fold(hash(parent) ^ k, content(block) ^ k')
//! ```
//!
//! Only that last multiplication waits for the parent; the contents of all blocks of a prompt can be
//! hashed side by side. `fold` is the 64 × 64 → 128 bit product with its halves xored, as in the wyhash
//! family. Its constants come from `hash_seed`: whoever does not know the seed cannot make many blocks
//! collide, and if they do, lookups get slow but stay right.

use fastserve_base::fault::{Fault, planted};
use fastserve_base::{Namespace, Span, Token};

/// Tokens that one multiplication takes in.
const LANE: usize = 4;

/// Seeded hash of block chains.
#[derive(Clone)]
pub(crate) struct ChainHasher {
    /// A pair of constants for each lane of a block, so that moved tokens change the hash.
    lanes: Vec<[u64; 2]>,
    root: [u64; 2],
    link: [u64; 2],
    span: [u64; 2],
    /// Bits that are kept: a test forces collisions by keeping none.
    #[cfg(test)]
    pub(crate) mask: u64,
}

impl ChainHasher {
    pub(crate) fn new(seed: u64, block_size: usize) -> Self {
        let mut state = seed;
        let mut pair = || [split_mix(&mut state), split_mix(&mut state)];
        Self {
            root: pair(),
            link: pair(),
            span: pair(),
            lanes: (0..block_size.div_ceil(LANE)).map(|_| pair()).collect(),
            #[cfg(test)]
            mask: u64::MAX,
        }
    }

    /// What the first block of a sequence is chained to.
    pub(crate) fn root(&self, namespace: Namespace) -> u64 {
        if planted(Fault::NamespaceIgnored) {
            return self.root[0];
        }
        let [low, high] = halves(namespace.0);
        fold(low ^ self.root[0], high ^ self.root[1])
    }

    /// Hash of the block of `tokens` below `parent`, overlapped by `spans`.
    #[expect(clippy::inline_always, reason = "see match_path")]
    #[inline(always)]
    pub(crate) fn next(&self, parent: u64, tokens: &[Token], spans: &[Span]) -> u64 {
        let mut content = 0_u64;
        let (whole, rest) = tokens.as_chunks::<LANE>();
        for (lane, keys) in whole.iter().zip(&self.lanes) {
            content = content.wrapping_add(hash_lane(lane, keys));
        }
        if !rest.is_empty() {
            let mut lane = [0; LANE];
            lane[..rest.len()].copy_from_slice(rest);
            content = content.wrapping_add(hash_lane(&lane, &self.lanes[whole.len()]));
        }
        for span in spans {
            let [low, high] = halves(span.digest);
            let place = u64::from(span.start) | u64::from(span.end) << 32;
            content = fold(content ^ self.span[0], place ^ self.span[1]);
            content = fold(content ^ low, high ^ self.span[0]);
        }
        self.few_bits_if_planted(fold(parent ^ self.link[0], content ^ self.link[1]))
    }

    /// A fault that takes the hash for equality shows only where hashes collide.
    #[inline]
    #[cfg_attr(not(test), expect(clippy::unused_self, reason = "the test's mask is in it"))]
    fn few_bits_if_planted(&self, hash: u64) -> u64 {
        #[cfg(test)]
        let hash = hash & self.mask;
        if planted(Fault::HashTakenForEquality) { hash & (7 << 61) } else { hash }
    }
}

#[inline]
fn hash_lane(tokens: &[Token; LANE], keys: &[u64; 2]) -> u64 {
    let [a, b, c, d] = tokens.map(u64::from);
    fold((a | b << 32) ^ keys[0], (c | d << 32) ^ keys[1])
}

#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let [low, high] = halves(u128::from(a) * u128::from(b));
    low ^ high
}

#[inline]
fn halves(value: u128) -> [u64; 2] {
    [value as u64, (value >> 64) as u64]
}

/// The next output of `SplitMix64`, which turns any seed into well mixed constants.
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ *state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

#[cfg(test)]
mod tests;
