//! The two inner loops: scores of rows × keys, and weighted values of rows × dimensions.
//!
//! Each keeps a block of R rows × N vectors in registers. A score is one chain over the dimensions
//! in ascending order from zero; a sum of values is one chain over the keys in ascending order from
//! what it was. The shape of a block decides what runs side by side, and no result.
//!
//! With few rows the memory is the limit, and it should never be idle. Blocks lie anywhere, so the
//! machine's own prefetching finds no pattern. While scores are computed the values of the same
//! keys are asked for, and while values are added up the keys of the next range.

#![expect(
    clippy::needless_range_loop,
    reason = "the loops are over constants and are unrolled; iterators would hide the block's shape"
)]

use super::cached::{Cached, OCTET};
#[cfg(target_arch = "x86_64")]
use super::dots;
use super::scratch::STRIDE;
use crate::simd::{Kernel, LANES, Pair, Simd};

/// Most rows for which memory is asked for ahead: those of one token. With more, a tile is a chunk
/// of a prompt, and computes for longer than it reads.
pub(super) const MAX_ROWS_TO_PREFETCH: usize = 4;

/// Scores of `rows` query rows against `num_vectors` × 16 keys.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scores<C> {
    /// First query row; rows are [`STRIDE`] apart.
    pub(super) q: *const f32,
    /// The same by pairs; rows are [`PAIR_STRIDE`](super::scratch::PAIR_STRIDE) apart.
    pub(super) q_pairs: *const Pair,
    /// Whether to compute by pairs: only where keys are bfloat16 and the machine has the instructions.
    pub(super) by_pairs: bool,
    pub(super) rows: usize,
    pub(super) head_dim: usize,
    /// How far a key's value is from it, in elements.
    pub(super) to_value: usize,
    /// Octet pointers of the keys, two for each vector.
    pub(super) octets: *const *const C,
    /// Keys side by side in the cache: 8 or 16.
    pub(super) group: usize,
    pub(super) num_vectors: usize,
    /// Scores of the first row; rows are [`STRIDE`] apart.
    pub(super) out: *mut f32,
}

/// Values of the keys `from..to`, weighted, added to `out` for `rows` rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Values<C> {
    /// Weights of the first row, from key 0 of the range; rows are [`STRIDE`] apart.
    pub(super) weights: *const f32,
    /// The same by pairs; rows are [`PAIR_STRIDE`](super::scratch::PAIR_STRIDE) apart.
    pub(super) weight_pairs: *const Pair,
    /// As for [`Scores`].
    pub(super) by_pairs: bool,
    pub(super) rows: usize,
    pub(super) head_dim: usize,
    /// Octet pointers of the values, from key 0 of the range.
    pub(super) octets: *const *const C,
    /// Pointers to memory to ask for, as long as the octets.
    pub(super) next: *const *const C,
    pub(super) from: usize,
    pub(super) to: usize,
    /// Sums of the first row, all dimensions; rows are [`STRIDE`] apart.
    pub(super) out: *mut f32,
}

/// A block of scores.
struct ScoreBlock<C, const R: usize, const N: usize, const SPLIT: bool>(Scores<C>);

/// A block of values, at dimension `.1`.
struct ValueBlock<C, const R: usize, const N: usize, const HALF: bool>(Values<C>, usize);

// SAFETY: it is used by the thread that makes it, within `Simd::call`.
unsafe impl<C, const R: usize, const N: usize, const B: bool> Sync for ScoreBlock<C, R, N, B> {}
// SAFETY: as above.
unsafe impl<C, const R: usize, const N: usize, const B: bool> Sync for ValueBlock<C, R, N, B> {}

/// Compute the block of `$rows` rows, one of those listed: its number of rows becomes a constant.
macro_rules! call_block {
    ($s:expr, $rows:expr, [$($r:literal)+], $block:ident<$n:literal, $flag:tt>$fields:tt) => {
        match $rows {
            $($r => $s.call(&$block::<_, $r, $n, $flag>$fields, 0),)+
            rows => unreachable!("a block of {rows} rows"),
        }
    };
}

/// Vectors side by side for `rows` rows, so that a block fits in the registers.
#[inline(always)]
const fn num_vectors<S: Simd>(rows: usize) -> usize {
    if S::MANY_REGISTERS {
        4
    } else if S::IS_PLAIN || rows > 3 {
        1
    } else {
        2
    }
}

/// Most rows of a block.
#[inline(always)]
pub(super) const fn max_rows<S: Simd>() -> usize {
    if S::IS_PLAIN { 2 } else { 6 }
}

/// Dimensions of sixteen keys that are a line of memory, but two at least.
const fn dims_per_line<C>() -> usize {
    if size_of::<C>() == 1 { 4 } else { 2 }
}

/// Ask for the sixteen pairs at `at`: one line, or two lines `apart` elements apart.
#[inline(always)]
fn fetch<S: Simd, C: Cached>(s: S, at: *const C, apart: usize) {
    s.prefetch(at.cast());
    if C::KEY_STEP == 1 {
        s.prefetch(at.wrapping_add(apart).cast());
    }
}

impl<C: Cached> Scores<C> {
    /// Compute them. `SPLIT`: the cache holds keys in groups of eight.
    ///
    /// # Safety
    ///
    /// `q`, or `q_pairs` where they are used, has `rows` (1 to [`max_rows`]) rows of `head_dim` and `out`
    /// as many of `num_vectors` vectors;
    /// `octets` are octet pointers of tiles of `head_dim` dimensions, two for each vector (of which
    /// the first is used, unless `SPLIT`).
    #[inline(always)]
    pub(super) unsafe fn compute<S: Simd, const SPLIT: bool>(mut self, s: S) {
        #[cfg(target_arch = "x86_64")]
        if C::IS_PAIRED && self.by_pairs {
            // SAFETY: the caller's promise.
            return unsafe { dots::scores::<_, SPLIT>(self) };
        }
        let side_by_side = num_vectors::<S>(self.rows);
        while self.num_vectors > 0 {
            let n = if self.num_vectors >= side_by_side { side_by_side } else { 1 };
            // The branches on constants keep blocks that a machine never uses from being compiled.
            if S::IS_PLAIN {
                call_block!(s, self.rows, [1 2], ScoreBlock<1, SPLIT>(self));
            } else if n == 1 {
                call_block!(s, self.rows, [1 2 3 4 5 6], ScoreBlock<1, SPLIT>(self));
            } else if S::MANY_REGISTERS {
                call_block!(s, self.rows, [1 2 3 4 5 6], ScoreBlock<4, SPLIT>(self));
            } else {
                call_block!(s, self.rows, [1 2 3], ScoreBlock<2, SPLIT>(self));
            }
            self.num_vectors -= n;
            self.octets = self.octets.wrapping_add(2 * n);
            self.out = self.out.wrapping_add(LANES * n);
        }
    }
}

impl<C: Cached, const R: usize, const N: usize, const SPLIT: bool> Kernel
    for ScoreBlock<C, R, N, SPLIT>
{
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, _item: usize) {
        let Scores { q, head_dim, to_value, octets, group, out, .. } = self.0;
        let mut sums = [[s.splat(0.0); N]; R];
        let mut dim = 0;
        while dim < head_dim {
            // SAFETY: the promise of `Scores::compute`; `head_dim` is even.
            unsafe {
                let mut keys = [s.splat(0.0); N];
                for n in 0..N {
                    keys[n] = C::keys::<S, SPLIT>(s, octets.add(2 * n), group, dim).0;
                }
                for r in 0..R {
                    let x = s.splat(q.add(r * STRIDE + dim).read());
                    for n in 0..N {
                        sums[r][n] = s.fma(x, keys[n], sums[r][n]);
                    }
                }
                for n in 0..N {
                    keys[n] = C::keys::<S, SPLIT>(s, octets.add(2 * n), group, dim).1;
                }
                for r in 0..R {
                    let x = s.splat(q.add(r * STRIDE + dim + 1).read());
                    for n in 0..N {
                        sums[r][n] = s.fma(x, keys[n], sums[r][n]);
                    }
                }
            }
            if R <= MAX_ROWS_TO_PREFETCH && dim.is_multiple_of(dims_per_line::<C>()) {
                for n in 0..N {
                    // SAFETY: the promise of `Scores::compute`.
                    let keys = unsafe { octets.add(2 * n).read() };
                    let values = keys.wrapping_add(to_value + dim * LANES);
                    fetch::<S, C>(s, values, LANES);
                }
            }
            dim += 2;
        }
        for r in 0..R {
            for n in 0..N {
                // SAFETY: the promise of `Scores::compute`.
                unsafe { s.store(out.add(r * STRIDE + n * LANES), sums[r][n]) };
            }
        }
    }
}

impl<C: Cached> Values<C> {
    /// Add them up.
    ///
    /// # Safety
    ///
    /// `weights`, and `weight_pairs` where they are used, have `rows` (1 to [`max_rows`]) rows of `to`
    /// elements and `out` as many of `head_dim`,
    /// rounded up to a whole vector; `octets` are octet pointers of tiles of `head_dim` dimensions,
    /// of which those of the keys `from..to` are read; `next` is as long as `octets`, and what it
    /// points to is not read.
    #[inline(always)]
    pub(super) unsafe fn accumulate<S: Simd>(self, s: S) {
        #[cfg(target_arch = "x86_64")]
        if C::IS_PAIRED && self.by_pairs {
            // SAFETY: the caller's promise.
            return unsafe { dots::accumulate(self) };
        }
        let whole = self.head_dim / LANES;
        let side_by_side = num_vectors::<S>(self.rows);
        let mut vector = 0;
        while vector < whole {
            let n = if whole - vector >= side_by_side { side_by_side } else { 1 };
            let at = vector * LANES;
            if S::IS_PLAIN {
                call_block!(s, self.rows, [1 2], ValueBlock<1, false>(self, at));
            } else if n == 1 {
                call_block!(s, self.rows, [1 2 3 4 5 6], ValueBlock<1, false>(self, at));
            } else if S::MANY_REGISTERS {
                call_block!(s, self.rows, [1 2 3 4 5 6], ValueBlock<4, false>(self, at));
            } else {
                call_block!(s, self.rows, [1 2 3], ValueBlock<2, false>(self, at));
            }
            vector += n;
        }
        if self.head_dim.is_multiple_of(LANES) {
            return;
        }
        let at = whole * LANES;
        if S::IS_PLAIN {
            call_block!(s, self.rows, [1 2], ValueBlock<1, true>(self, at));
        } else {
            call_block!(s, self.rows, [1 2 3 4 5 6], ValueBlock<1, true>(self, at));
        }
    }
}

impl<C: Cached, const R: usize, const N: usize, const HALF: bool> Kernel
    for ValueBlock<C, R, N, HALF>
{
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, _item: usize) {
        let Values { weights, head_dim, octets, next, from, to, out, .. } = self.0;
        let at = self.1;
        let mut sums = [[s.splat(0.0); N]; R];
        for r in 0..R {
            for n in 0..N {
                // SAFETY: the promise of `Values::accumulate`.
                sums[r][n] = unsafe { s.load(out.add(r * STRIDE + at + n * LANES)) };
            }
        }
        let mut key = from;
        while key < to {
            // SAFETY: the promise of `Values::accumulate`: key is in from..to, and so is key + 1
            // where the pair is read.
            unsafe {
                let octet = octets.add(key / OCTET).read();
                let next = next.add(key / OCTET).read();
                let stop = to.min((key / OCTET + 1) * OCTET);
                if key % 2 == 1 || key + 1 == stop {
                    for n in 0..N {
                        let here = at + n * LANES;
                        let value = C::value::<S, HALF>(s, octet, head_dim, key % OCTET, here);
                        for r in 0..R {
                            let w = s.splat(weights.add(r * STRIDE + key).read());
                            sums[r][n] = s.fma(w, value, sums[r][n]);
                        }
                    }
                    key += 1;
                }
                while key + 1 < stop {
                    let mut values = [s.splat(0.0); N];
                    for n in 0..N {
                        let here = at + n * LANES;
                        values[n] = C::values::<S, HALF>(s, octet, head_dim, key % OCTET, here).0;
                    }
                    for r in 0..R {
                        let w = s.splat(weights.add(r * STRIDE + key).read());
                        for n in 0..N {
                            sums[r][n] = s.fma(w, values[n], sums[r][n]);
                        }
                    }
                    for n in 0..N {
                        let here = at + n * LANES;
                        values[n] = C::values::<S, HALF>(s, octet, head_dim, key % OCTET, here).1;
                    }
                    for r in 0..R {
                        let w = s.splat(weights.add(r * STRIDE + key + 1).read());
                        for n in 0..N {
                            sums[r][n] = s.fma(w, values[n], sums[r][n]);
                        }
                    }
                    if R <= MAX_ROWS_TO_PREFETCH {
                        let next = next.wrapping_add(key % OCTET * head_dim + at * C::KEY_STEP);
                        for n in 0..N {
                            fetch::<S, C>(s, next.wrapping_add(n * LANES * C::KEY_STEP), head_dim);
                        }
                    }
                    key += 2;
                }
            }
        }
        for r in 0..R {
            for n in 0..N {
                // SAFETY: the promise of `Values::accumulate`.
                unsafe { s.store(out.add(r * STRIDE + at + n * LANES), sums[r][n]) };
            }
        }
    }
}
