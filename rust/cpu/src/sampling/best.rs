//! The best token of each row, and whether the row is finite, in one pass over memory.

use super::{Results, check_logits, logits_row};
use crate::error::ArgumentError;
use crate::pool::Pool;
use crate::simd::{Kernel, LANES, Lanes, Simd};
use crate::view::Matrix;

/// Columns of one item: a row of a large vocabulary is several, and one fits a first-level cache.
const COLS_PER_ITEM: usize = 8192;

/// Vectors that are compared before it is asked whether the best is among them.
const VECTORS_AT_ONCE: usize = 8;

/// What is known of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BestToken {
    /// The token with the largest logit, NaN apart; the lowest of equals.
    pub token: i32,
    /// Its logit; NaN if the row has one.
    pub logit: f32,
    /// Whether every logit is finite.
    pub is_finite: bool,
}

/// The best token of each row of `logits`, `f32` `[rows, vocabulary]`.
///
/// # Errors
///
/// `logits` are of another type, have no column or too many; nothing is computed.
pub fn best_tokens(pool: &Pool, logits: &Matrix<'_>) -> Result<Vec<BestToken>, ArgumentError> {
    let mut finder = BestTokens::default();
    finder.find(pool, logits)?;
    Ok(finder.best)
}

/// Finds best tokens, with memory that is kept from one time to the next.
#[derive(Debug, Default)]
pub(super) struct BestTokens {
    /// Of each row, as of the last time.
    pub(super) best: Vec<BestToken>,
    parts: Results<BestToken>,
}

impl BestTokens {
    /// See [`best_tokens`].
    pub(super) fn find(&mut self, pool: &Pool, logits: &Matrix<'_>) -> Result<(), ArgumentError> {
        check_logits(logits)?;
        let (num_rows, num_cols) = (logits.num_rows(), logits.num_cols());
        let parts_per_row = num_cols.div_ceil(COLS_PER_ITEM);
        let num_items = num_rows * parts_per_row;
        self.parts.reset(num_items);
        let kernel = Best { logits, parts_per_row, found: &self.parts };
        pool.run(&kernel, num_items, num_rows * num_cols / 8);
        let mut parts = self.parts.values();
        self.best.clear();
        self.best.extend((0..num_rows).map(|_| merged(parts.by_ref().take(parts_per_row))));
        Ok(())
    }
}

/// The best of a row's parts, which are in order.
fn merged<'a>(mut parts: impl Iterator<Item = &'a BestToken>) -> BestToken {
    let mut best = *parts.next().expect("a row has a column");
    for part in parts {
        // The first of equals stays, and so does NaN.
        if part.logit > best.logit || (part.logit.is_nan() && !best.logit.is_nan()) {
            (best.token, best.logit) = (part.token, part.logit);
        }
        best.is_finite &= part.is_finite;
    }
    best
}

struct Best<'a> {
    logits: &'a Matrix<'a>,
    parts_per_row: usize,
    found: &'a Results<BestToken>,
}

impl Kernel for Best<'_> {
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, item: usize) {
        let row = logits_row(self.logits, item / self.parts_per_row);
        let start = item % self.parts_per_row * COLS_PER_ITEM;
        let part = &row[start..row.len().min(start + COLS_PER_ITEM)];
        let (largest, is_finite) = largest(s, part);
        let best = BestToken {
            token: (start + first_reaching(part, largest)) as i32,
            logit: if !is_finite && part.iter().any(|x| x.is_nan()) { f32::NAN } else { largest },
            is_finite,
        };
        self.found.set(item, best);
    }
}

/// The largest of `values`, NaN apart, and whether all are finite.
#[inline(always)]
fn largest<S: Simd>(s: S, values: &[f32]) -> (f32, bool) {
    let mut max = [s.splat(f32::NEG_INFINITY); 2];
    // Zero times what is not finite is NaN, and stays it.
    let mut zero = [s.splat(0.0); 2];
    let pairs = values.chunks_exact(2 * LANES);
    let rest = pairs.remainder();
    for pair in pairs {
        for i in 0..2 {
            // SAFETY: a pair is two vectors.
            let x = unsafe { f32::load(s, pair.as_ptr().add(i * LANES)) };
            max[i] = s.max(x, max[i]);
            zero[i] = s.fma(x, s.splat(0.0), zero[i]);
        }
    }
    let mut best = s.max_lane(s.max(max[0], max[1]));
    let mut sum = s.sum(s.add(zero[0], zero[1]));
    for &x in rest {
        best = if x > best { x } else { best };
        sum += x * 0.0;
    }
    (best, !sum.is_nan())
}

/// Where the first of `values` is that is at least `least`; 0 without one.
#[inline(always)]
fn first_reaching(values: &[f32], least: f32) -> usize {
    for (i, chunk) in values.chunks(VECTORS_AT_ONCE * LANES).enumerate() {
        let mut is_here = false;
        for &x in chunk {
            is_here |= x >= least;
        }
        if is_here {
            let place = chunk.iter().position(|&x| x >= least);
            return i * VECTORS_AT_ONCE * LANES + place.unwrap_or(0);
        }
    }
    0
}
