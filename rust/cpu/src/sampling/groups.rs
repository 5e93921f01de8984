//! The largest few of a row, without sorting it.
//!
//! Columns are in groups of sixteen: those of one lane in a block of [`BLOCK`] columns. One pass
//! finds the largest of each group. Where the k-th largest of these is f, there are at least k
//! columns of f and more, so the k largest of the row are all at least f, and only groups whose
//! largest is need be looked at again: not many more than k.

use super::weight::BLOCK;
use crate::simd::{LANES, Lanes, Simd};

/// Columns of a group.
const GROUP: usize = BLOCK / LANES;

/// The largest of each group of a row, over the temperature.
#[derive(Default)]
pub(super) struct Groups {
    maxima: Vec<f32>,
    /// Copies of the maxima, to be put in order.
    ordered: Vec<f32>,
}

impl Groups {
    /// Look at `row`, which is not empty, and return its largest quotient with `temperature`.
    ///
    /// NaN is smaller than everything.
    #[inline(always)]
    pub(super) fn fill<S: Simd>(&mut self, s: S, row: &[f32], temperature: f32) -> f32 {
        // A division keeps the order, so the largest is divided and not each.
        let divisor = s.splat(temperature);
        self.maxima.clear();
        self.maxima.resize(row.len().div_ceil(BLOCK) * LANES, f32::NEG_INFINITY);
        let mut best = s.splat(f32::NEG_INFINITY);
        for (block, maxima) in row.chunks(BLOCK).zip(self.maxima.chunks_exact_mut(LANES)) {
            let mut max = s.splat(f32::NEG_INFINITY);
            let vectors = block.chunks_exact(LANES);
            let rest = vectors.remainder();
            for vector in vectors {
                // SAFETY: a chunk is a vector.
                max = s.max(unsafe { f32::load(s, vector.as_ptr()) }, max);
            }
            if !rest.is_empty() {
                let mut last = [f32::NEG_INFINITY; LANES];
                last[..rest.len()].copy_from_slice(rest);
                // SAFETY: an array of one vector.
                max = s.max(unsafe { f32::load(s, last.as_ptr()) }, max);
            }
            max = s.div(max, divisor);
            best = s.max(max, best);
            // SAFETY: a chunk of the maxima is a vector.
            unsafe { f32::store(s, maxima.as_mut_ptr(), max) };
        }
        s.max_lane(best)
    }

    /// A quotient that at least `k` columns reach, if so many do; often few more.
    pub(super) fn floor(&mut self, k: usize) -> f32 {
        if k == 0 || k > self.maxima.len() {
            return f32::NEG_INFINITY;
        }
        self.ordered.clear();
        self.ordered.extend_from_slice(&self.maxima);
        *self.ordered.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1
    }

    /// The `k` largest quotients of the row with their columns, and all equals of the last of them.
    ///
    /// `row` and `temperature` are those of [`Groups::fill`].
    pub(super) fn largest(
        &mut self,
        row: &[f32],
        temperature: f32,
        k: usize,
        out: &mut Vec<(f32, u32)>,
    ) {
        out.clear();
        if k == 0 {
            return;
        }
        let floor = self.floor(k);
        self.collect(row, temperature, floor, out);
        if k < out.len() {
            let last = out.select_nth_unstable_by(k - 1, |a, b| b.0.total_cmp(&a.0)).1.0;
            out.retain(|&(z, _)| z >= last);
        }
    }

    /// The quotient and the column of every one that is at least `floor`, in any order.
    ///
    /// `row` and `temperature` are those of [`Groups::fill`].
    pub(super) fn collect(
        &self,
        row: &[f32],
        temperature: f32,
        floor: f32,
        out: &mut Vec<(f32, u32)>,
    ) {
        out.clear();
        for (group, &max) in self.maxima.iter().enumerate() {
            if max >= floor {
                let first = group / LANES * BLOCK + group % LANES;
                for col in (first..row.len()).step_by(LANES).take(GROUP) {
                    let z = row[col] / temperature;
                    if z >= floor {
                        out.push((z, col as u32));
                    }
                }
            }
        }
    }
}
