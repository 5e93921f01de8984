//! From logits and random bits to a token, the same one on any machine.
//!
//! What is computed is a contract, and others may implement it. The order is vLLM's: temperature,
//! min-p, top-k, top-p, then one draw. What makes the draw repeatable is that probabilities are
//! *integers* ([`super::weight`]). With z the `f32` quotient of logit and temperature:
//!
//! ```text
//! weight[i] = round(2^40 * exp(z[i] - max(z)))      exp in f64, halves to even
//! ```
//!
//! so the best token weighs exactly 2^40 and sums have no rounding, whatever order they are taken in
//! (a vocabulary of 2^20 tokens stays below 2^60). Tokens below 2^-41 of the best are never drawn.
//!
//! * min-p keeps `weight >= min_p * 2^40`;
//! * top-k keeps every token whose z is at least the k-th largest (equals of it stay too);
//! * top-p goes through what is left by weight, equals by token, and keeps a token while the ones
//!   before it weigh less than `top_p` of the whole;
//! * with r the 64 random bits, the draw is the first token, in order of tokens, at which the running
//!   sum of the kept weights exceeds `floor(r * total / 2^64)`.
//!
//! Our exponential is made of operations that every machine rounds alike, so here the weights are
//! the same on any. Where another implementation takes its own, a weight may differ by one part in
//! 2^40 about once in 2^12 times.

use super::candidates::{self, Candidate};
use super::weight::{BLOCK, Scale};
use super::{Results, Scratch, check_indices, check_len, check_logits, logits_row, scratch};
use crate::error::ArgumentError;
use crate::pool::Pool;
use crate::simd::{Kernel, Simd};
use crate::view::Matrix;

/// Top-p looks among about so many of the largest first.
const NUM_LIKELY: usize = 128;

/// Nanoseconds of one core for a column.
const COLUMN_NS: usize = 2;

/// What is drawn: place i of every slice is that of one draw.
///
/// No value of the parameters is an error: a draw is one request's, and a call is everybody's. Where
/// a row's best logit over the temperature is not finite, or nothing is kept, the draw is some token
/// of the vocabulary.
#[derive(Debug, Clone, Copy)]
pub struct Draws<'a> {
    /// Which row of the logits it is from. A row may be drawn from several times.
    pub rows: &'a [i32],
    /// What logits are divided by.
    pub temperature: &'a [f32],
    /// Keep the so many largest logits and their equals; all where it is not in `1..vocabulary`.
    pub top_k: &'a [i32],
    /// Keep the fewest tokens whose share of the probability reaches it; all where it is 1 or more.
    pub top_p: &'a [f32],
    /// Keep tokens of so much of the best one's probability.
    pub min_p: &'a [f32],
    /// Random bits.
    pub bits: &'a [u64],
}

/// The drawn token of each draw from `logits`, `f32` `[rows, vocabulary]`.
///
/// # Errors
///
/// `logits` as for [`super::best_tokens`]; a row that is not theirs; slices of different lengths.
/// Nothing is computed then.
pub fn draw_tokens(
    pool: &Pool,
    logits: &Matrix<'_>,
    draws: &Draws<'_>,
) -> Result<Vec<i32>, ArgumentError> {
    let mut tokens = Results::default();
    draw_into(pool, logits, draws, &mut tokens)?;
    Ok(tokens.values().copied().collect())
}

/// The same, with memory of the caller for the tokens.
pub(super) fn draw_into(
    pool: &Pool,
    logits: &Matrix<'_>,
    draws: &Draws<'_>,
    tokens: &mut Results<i32>,
) -> Result<(), ArgumentError> {
    check_logits(logits)?;
    let num = draws.rows.len();
    check_indices("rows", draws.rows, num, logits.num_rows())?;
    check_len("temperature", draws.temperature.len(), num)?;
    check_len("top_k", draws.top_k.len(), num)?;
    check_len("top_p", draws.top_p.len(), num)?;
    check_len("min_p", draws.min_p.len(), num)?;
    check_len("bits", draws.bits.len(), num)?;
    tokens.reset(num);
    let kernel = Draw { logits, draws, tokens };
    pool.run(&kernel, num, num * logits.num_cols() * COLUMN_NS);
    Ok(())
}

struct Draw<'a> {
    logits: &'a Matrix<'a>,
    draws: &'a Draws<'a>,
    tokens: &'a Results<i32>,
}

impl Kernel for Draw<'_> {
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, item: usize) {
        let draws = self.draws;
        let row = logits_row(self.logits, draws.rows[item] as usize);
        // SAFETY: this thread's own, and nothing below asks for it again.
        let Scratch { groups, largest, candidates, sums } = unsafe { &mut *scratch() };
        let temperature = draws.temperature[item];
        let best = groups.fill(s, row, temperature);
        let scale = Scale { temperature, best, min_p: draws.min_p[item] };
        let (top_p, bits) = (draws.top_p[item], draws.bits[item]);
        let top_k = usize::try_from(draws.top_k[item]).unwrap_or(0);
        let picked = if (1..row.len()).contains(&top_k) {
            groups.largest(row, temperature, top_k, largest);
            weigh_largest(largest, scale, candidates);
            if top_p < 1.0 {
                let target = top_p_target(candidates::total(candidates), top_p);
                candidates::keep_heaviest(candidates, target);
            }
            candidates::pick(candidates, bits)
        } else {
            let total = scale.weigh_all(row, sums);
            if top_p < 1.0 {
                let target = top_p_target(total, top_p);
                let likely = groups.floor(NUM_LIKELY);
                groups.collect(row, temperature, likely, largest);
                weigh_largest(largest, scale, candidates);
                if !suffices(candidates, target, scale.weight(likely)) {
                    let floor = scale.floor_of_share(target, total, row.len());
                    groups.collect(row, temperature, floor, largest);
                    weigh_largest(largest, scale, candidates);
                    candidates::keep_heaviest(candidates, target);
                }
                candidates::pick(candidates, bits)
            } else {
                pick_of_row(row, scale, sums, candidates::share(total, bits))
            }
        };
        self.tokens.set(item, picked.unwrap_or(0) as i32);
    }
}

/// What the kept tokens must weigh: the share `top_p` of `total`.
fn top_p_target(total: u64, top_p: f32) -> u64 {
    ((f64::from(top_p) * total as f64) as u64).max(1)
}

#[inline(always)]
fn weigh_largest(largest: &[(f32, u32)], scale: Scale, candidates: &mut Vec<Candidate>) {
    let (mut z, mut weights) = ([f32::NAN; BLOCK], [0; BLOCK]);
    candidates.clear();
    for largest in largest.chunks(BLOCK) {
        for (z, largest) in z.iter_mut().zip(largest) {
            *z = largest.0;
        }
        scale.weigh_quotients(&z, &mut weights);
        for (&(_, token), &weight) in largest.iter().zip(&weights) {
            candidates.push(Candidate::new(token as usize, weight));
        }
    }
}

/// Leave the heaviest of `candidates` that weigh `target`; whether they are the heaviest of the row
/// too, whose other tokens are below one that weighs `floor`.
fn suffices(candidates: &mut Vec<Candidate>, target: u64, floor: u64) -> bool {
    if candidates::total(candidates) < target {
        return false;
    }
    candidates::keep_heaviest(candidates, target);
    // A token below another weighs no more, or one more: a rounded exponential need not keep order.
    candidates.last().is_some_and(|last| last.weight() > floor + 1)
}

/// The token at which the running sum of all weights exceeds `target`; `None` if it does not.
fn pick_of_row(row: &[f32], scale: Scale, sums: &[u64], target: u64) -> Option<usize> {
    let mut left = target;
    let block = sums.iter().position(|&sum| {
        let is_here = sum > left;
        left -= if is_here { 0 } else { sum };
        is_here
    })?;
    let mut weights = [0; BLOCK];
    let logits = row.chunks(BLOCK).nth(block)?;
    scale.weigh(logits, &mut weights);
    let place = weights.iter().position(|&weight| {
        let is_here = weight > left;
        left -= if is_here { 0 } else { weight };
        is_here
    })?;
    Some(block * BLOCK + place)
}
