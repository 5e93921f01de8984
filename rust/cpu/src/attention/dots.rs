//! The inner loops of `micro` by instructions for pairs of bfloat16: the same blocks, and the same chains.
//!
//! A key at the end of a run may be without its partner. It then has a partner of zeros, which adds
//! nothing.

#![expect(
    clippy::needless_range_loop,
    reason = "the loops are over constants and are unrolled; iterators would hide the block's shape"
)]

use super::cached::{Cached, OCTET};
use super::micro::{MAX_ROWS_TO_PREFETCH, Scores, Values};
use super::scratch::{PAIR_STRIDE, STRIDE};
use crate::element::Bf16;
use crate::simd::{Dot, DotKernel, LANES, Pair, Simd, run_dot};

/// Call `$block` with `$rows`, 1 to 6, as a constant.
macro_rules! by_rows {
    ($self:ident, $rows:expr, $block:ident<$($more:tt),+>($($argument:expr),*)) => {
        match $rows {
            1 => $self.$block::<1, $($more),+>($($argument),*),
            2 => $self.$block::<2, $($more),+>($($argument),*),
            3 => $self.$block::<3, $($more),+>($($argument),*),
            4 => $self.$block::<4, $($more),+>($($argument),*),
            5 => $self.$block::<5, $($more),+>($($argument),*),
            6 => $self.$block::<6, $($more),+>($($argument),*),
            rows => unreachable!("a block of {rows} rows"),
        }
    };
}

/// Compute scores.
///
/// # Safety
///
/// As for [`Scores::compute`]; the cache is one of bfloat16, and the machine has the instructions.
pub(super) unsafe fn scores<C: Cached, const SPLIT: bool>(scores: Scores<C>) {
    // SAFETY: the caller's promise.
    unsafe { run_dot(&ScoreBlocks::<C, SPLIT>(scores)) };
}

/// Add up values.
///
/// # Safety
///
/// As for [`Values::accumulate`]; the cache is one of bfloat16, and the machine has the instructions.
pub(super) unsafe fn accumulate<C: Cached>(values: Values<C>) {
    // SAFETY: the caller's promise.
    unsafe { run_dot(&ValueBlocks(values)) };
}

struct ScoreBlocks<C, const SPLIT: bool>(Scores<C>);

impl<C: Cached, const SPLIT: bool> DotKernel for ScoreBlocks<C, SPLIT> {
    #[inline(always)]
    fn run(&self, dot: Dot) {
        let Scores { rows, num_vectors, .. } = self.0;
        let mut vector = 0;
        while vector < num_vectors {
            // SAFETY: the promise of `scores`.
            vector += unsafe {
                if num_vectors - vector < 4 {
                    by_rows!(self, rows, block<1>(dot, vector))
                } else {
                    by_rows!(self, rows, block<4>(dot, vector))
                }
            };
        }
    }
}

impl<C: Cached, const SPLIT: bool> ScoreBlocks<C, SPLIT> {
    /// `R` rows by `N` vectors from `vector` on. Returns `N`.
    ///
    /// # Safety
    ///
    /// There are as many.
    #[inline(always)]
    unsafe fn block<const R: usize, const N: usize>(&self, dot: Dot, vector: usize) -> usize {
        let Scores { q_pairs, head_dim, to_value, octets, group, out, .. } = self.0;
        let s = dot.simd();
        let mut keys = [[std::ptr::null::<Bf16>(); 2]; N];
        for n in 0..N {
            let octets = octets.wrapping_add(2 * (vector + n));
            // SAFETY: the promise of `Scores::compute`.
            keys[n] = unsafe { [octets.read(), octets.add(1).read()] }.map(<*const C>::cast);
        }
        let mut sums = [[s.splat(0.0); N]; R];
        for pair in 0..head_dim / 2 {
            let mut k = [dot.no_pairs(); N];
            for n in 0..N {
                let [low, high] = keys[n].map(|octet| octet.wrapping_add(2 * pair * group).cast());
                // SAFETY: the promise of `Scores::compute`: a pair of dimensions of sixteen keys.
                k[n] = unsafe { if SPLIT { dot.split(low, high) } else { dot.load(low) } };
                if R <= MAX_ROWS_TO_PREFETCH {
                    let value = keys[n][0].wrapping_add(to_value + 2 * pair * LANES);
                    s.prefetch(value.cast());
                }
            }
            for r in 0..R {
                // SAFETY: the promise of `Scores::compute`.
                let x = unsafe { dot.splat(q_pairs.add(r * PAIR_STRIDE + pair)) };
                for n in 0..N {
                    sums[r][n] = dot.add(sums[r][n], x, k[n]);
                }
            }
        }
        for r in 0..R {
            for n in 0..N {
                let to = out.wrapping_add(r * STRIDE + (vector + n) * LANES);
                // SAFETY: the promise of `Scores::compute`.
                unsafe { s.store(to, sums[r][n]) };
            }
        }
        N
    }
}

struct ValueBlocks<C>(Values<C>);

impl<C: Cached> DotKernel for ValueBlocks<C> {
    #[inline(always)]
    fn run(&self, dot: Dot) {
        let Values { rows, head_dim, .. } = self.0;
        let mut at = 0;
        while at < head_dim {
            // SAFETY: the promise of `accumulate`.
            at += unsafe {
                match head_dim - at {
                    ..LANES => by_rows!(self, rows, block < 1, true > (dot, at)),
                    LANES..64 => by_rows!(self, rows, block < 1, false > (dot, at)),
                    _ => by_rows!(self, rows, block < 4, false > (dot, at)),
                }
            };
        }
    }
}

impl<C: Cached> ValueBlocks<C> {
    /// `R` rows by `N` vectors of dimensions from `at` on, eight of them if `HALF`. Returns how many.
    ///
    /// # Safety
    ///
    /// There are as many.
    #[inline(always)]
    unsafe fn block<const R: usize, const N: usize, const HALF: bool>(
        &self,
        dot: Dot,
        at: usize,
    ) -> usize {
        let Values { weight_pairs, head_dim, octets, next, from, to, out, .. } = self.0;
        let s = dot.simd();
        let mut sums = [[s.splat(0.0); N]; R];
        for r in 0..R {
            for n in 0..N {
                // SAFETY: the promise of `Values::accumulate`.
                sums[r][n] = unsafe { s.load(out.add(r * STRIDE + at + n * LANES)) };
            }
        }
        let mut key = from;
        while key < to {
            let stop = to.min((key / OCTET + 1) * OCTET);
            // SAFETY: the promise of `Values::accumulate`: `key` is in `from..to`, and so is its partner
            // where there is one.
            let (octet, next) =
                unsafe { (octets.add(key / OCTET).read(), next.add(key / OCTET).read()) };
            while key < stop {
                let first = key & !1;
                let is_alone = key != first || key + 1 == stop;
                let place = |octet: *const C| {
                    octet.wrapping_add(first % OCTET * head_dim + 2 * at).cast::<Pair>()
                };
                let mut v = [dot.no_pairs(); N];
                for n in 0..N {
                    let from = place(octet).wrapping_add(n * LANES);
                    // SAFETY: as above: a pair of keys of so many dimensions.
                    v[n] = unsafe { if HALF { dot.half(from) } else { dot.load(from) } };
                    if is_alone {
                        v[n] = dot.one_of(v[n], key % 2);
                    }
                    if R <= MAX_ROWS_TO_PREFETCH {
                        s.prefetch(place(next).wrapping_add(n * LANES).cast());
                    }
                }
                for r in 0..R {
                    // SAFETY: as above.
                    let mut w = unsafe { dot.splat(weight_pairs.add(r * PAIR_STRIDE + key / 2)) };
                    if is_alone {
                        w = dot.one_of(w, key % 2);
                    }
                    for n in 0..N {
                        sums[r][n] = dot.add(sums[r][n], w, v[n]);
                    }
                }
                key = if is_alone { key + 1 } else { key + 2 };
            }
        }
        for r in 0..R {
            for n in 0..N {
                let to: *mut f32 = out.wrapping_add(r * STRIDE + at + n * LANES);
                // SAFETY: the promise of `Values::accumulate`.
                unsafe { s.store(to, sums[r][n]) };
            }
        }
        if HALF { LANES / 2 } else { N * LANES }
    }
}
