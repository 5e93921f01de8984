//! Log probabilities of chosen tokens and of the best ones.
//!
//! They are the model's own: taken from the raw logits, before bias, penalties and temperature
//! (vLLM's `raw_logprobs`).
//!
//! The sum of a softmax is that of the integer weights of a draw ([`super::weight`]), so it has the
//! same bits in whatever order it is taken. Its relative error is below 2^-41 a column.

use std::cmp::Ordering;

use super::weight::{ONE, Scale};
use super::{Results, Scratch, check_indices, check_len, check_logits, logits_row, scratch};
use crate::error::ArgumentError;
use crate::pool::Pool;
use crate::simd::{Kernel, Simd};
use crate::view::Matrix;

/// Nanoseconds of one core for a column.
const COLUMN_NS: usize = 2;

/// What one row has to say.
#[derive(Debug, Clone, PartialEq)]
pub struct RowLogprobs {
    /// Of the chosen token: one more than there are greater logits.
    pub rank: usize,
    /// The chosen token, then the best ones, equals by token.
    pub token_ids: Vec<i32>,
    /// Theirs, within 1e-6 of the truth or half a unit in the last place.
    pub logprobs: Vec<f32>,
}

/// For each of `rows` of `logits`, `f32` `[rows, vocabulary]`: its `chosen` token and its `num_best`
/// best ones, or all where that is more.
///
/// Where a row is not finite, its numbers mean nothing and its best tokens may be fewer.
///
/// # Errors
///
/// `logits` as for [`super::best_tokens`]; a row or token that is not theirs; a negative number;
/// slices of different lengths. Nothing is computed then.
pub fn row_logprobs(
    pool: &Pool,
    logits: &Matrix<'_>,
    rows: &[i32],
    chosen: &[i32],
    num_best: &[i32],
) -> Result<Vec<RowLogprobs>, ArgumentError> {
    check_logits(logits)?;
    check_indices("rows", rows, rows.len(), logits.num_rows())?;
    check_indices("chosen", chosen, rows.len(), logits.num_cols())?;
    check_len("num_best", num_best.len(), rows.len())?;
    if let Some(at) = num_best.iter().position(|&num| num < 0) {
        let got = format!("{} at {at}", num_best[at]);
        return Err(ArgumentError::new("num_best", got, "at least 0"));
    }
    let mut scores = Results::default();
    scores.reset(rows.len());
    let kernel = Score { logits, rows, chosen, num_best, scores };
    pool.run(&kernel, rows.len(), rows.len() * logits.num_cols() * COLUMN_NS);
    Ok(kernel.scores.into_values().collect())
}

struct Score<'a> {
    logits: &'a Matrix<'a>,
    rows: &'a [i32],
    chosen: &'a [i32],
    num_best: &'a [i32],
    scores: Results<RowLogprobs>,
}

impl Kernel for Score<'_> {
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, item: usize) {
        let row = logits_row(self.logits, self.rows[item] as usize);
        // SAFETY: this thread's own, and nothing below asks for it again.
        let Scratch { groups, largest, sums, .. } = unsafe { &mut *scratch() };
        let best = groups.fill(s, row, 1.0);
        let total = Scale { temperature: 1.0, best, min_p: 0.0 }.weigh_all(row, sums);
        let log_sum = (total as f64 / ONE as f64).ln();

        let chosen = self.chosen[item];
        let own = row[chosen as usize];
        let mut rank = 1;
        for &logit in row {
            rank += usize::from(logit > own);
        }

        let num_best = (self.num_best[item] as usize).min(row.len());
        groups.largest(row, 1.0, num_best, largest);
        largest.sort_unstable_by(best_first);
        largest.truncate(num_best);

        let logprob = |logit: f32| (f64::from(logit) - f64::from(best) - log_sum) as f32;
        let mut score = RowLogprobs {
            rank,
            token_ids: Vec::with_capacity(1 + num_best),
            logprobs: Vec::with_capacity(1 + num_best),
        };
        score.token_ids.push(chosen);
        score.logprobs.push(logprob(own));
        for &(logit, token) in &*largest {
            score.token_ids.push(token as i32);
            score.logprobs.push(logprob(logit));
        }
        self.scores.set(item, score);
    }
}

/// The order of the best tokens: larger logits first, equals (both zeros, too) by token. There is no
/// NaN among the largest.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "signature of sort_by")]
fn best_first(a: &(f32, u32), b: &(f32, u32)) -> Ordering {
    b.0.partial_cmp(&a.0).unwrap_or(Ordering::Equal).then(a.1.cmp(&b.1))
}
