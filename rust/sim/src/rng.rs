//! A small seeded generator: the only source of chance in a simulation.
//!
//! `SplitMix64`. A seed replays everything, on any machine; independent parts of a run take a stream of
//! their own ([`Rng::stream`]), so that adding a draw to one does not shift the others.

use std::ops::Range;

/// Mix all bits of `word`.
#[inline]
pub fn scramble(word: u64) -> u64 {
    let z = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// One hash of two words; the order matters.
#[inline]
pub fn mix(a: u64, b: u64) -> u64 {
    scramble(a.rotate_left(23).wrapping_add(scramble(b ^ 0x9e37_79b9_7f4a_7c15)))
}

/// The generator.
#[derive(Debug, Clone)]
pub struct Rng {
    state: u64,
}

impl Rng {
    /// The generator of `seed`.
    pub fn new(seed: u64) -> Self {
        Self { state: scramble(seed ^ 0x51ed_270b_a5f1_c3d7) }
    }

    /// A generator of its own for one part of the run.
    #[must_use]
    pub fn stream(&self, name: u64) -> Self {
        Self { state: mix(self.state, name) }
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        scramble(self.state)
    }

    /// A number of `0..end`. Panics if there is none.
    pub fn below(&mut self, end: u64) -> u64 {
        assert!(end > 0, "an empty range has no numbers");
        ((u128::from(self.bits()) * u128::from(end)) >> 64) as u64
    }

    /// A number of `range`.
    pub fn range(&mut self, range: Range<u32>) -> u32 {
        range.start + self.below(u64::from(range.end - range.start)) as u32
    }

    /// True in `percent` of 100 cases.
    pub fn chance(&mut self, percent: u32) -> bool {
        self.below(100) < u64::from(percent)
    }

    /// One of `choices`.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }
}
