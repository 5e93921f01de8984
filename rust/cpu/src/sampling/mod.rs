//! What a step does with its logits: the best token of a row, log probabilities, draws.
//!
//! Logits are `f32` rows of a vocabulary. Rows are shared out over the pool's threads, and nothing
//! here depends on threads, instruction sets or other rows: maxima are exact in any order, and sums
//! are sums of integers ([`weight`]).
//!
//! The largest few of a row are found without sorting it ([`groups`]). What a draw does is told in
//! [`draw`], how its random bits are made in [`philox`]. A [`Sampler`] puts all of it together, with
//! what it keeps of each sequence from step to step.

mod adjust;
mod best;
mod candidates;
mod counts;
mod draw;
mod groups;
mod logprobs;
mod philox;
mod record;
mod sampler;
mod slots;
mod weight;

pub use best::{BestToken, best_tokens};
pub use draw::{Draws, draw_tokens};
pub use logprobs::{RowLogprobs, row_logprobs};
pub use philox::{draw_bits, philox4x32};
pub use sampler::{ALL_MASKED, NOT_FINITE, Outputs, Sampler, Samples, Score};
pub use slots::Assignment;

use std::cell::UnsafeCell;
use std::sync::OnceLock;

use crate::element::DType;
use crate::error::{ArgumentError, require};
use crate::view::Matrix;

use candidates::Candidate;
use groups::Groups;

/// Most columns of logits: a weight and a token fit 64 bits, and so does a row's sum of weights.
pub(crate) const MAX_COLS: usize = 1 << 23;

/// A thread's working memory, kept between calls so that none is allocated in a steady state.
#[derive(Default)]
struct Scratch {
    groups: Groups,
    /// Scaled logit and token of the largest.
    largest: Vec<(f32, u32)>,
    /// What may be drawn.
    candidates: Vec<Candidate>,
    /// Weight of each block of columns.
    sums: Vec<u64>,
}

thread_local! {
    static SCRATCH: UnsafeCell<Scratch> = UnsafeCell::default();
}

/// This thread's scratch. Its user must be done with it before anyone else on this thread asks.
fn scratch() -> *mut Scratch {
    SCRATCH.with(UnsafeCell::get)
}

/// One row of logits, which [`check_logits`] has passed.
#[inline(always)]
fn logits_row<'a>(logits: &Matrix<'a>, row: usize) -> &'a [f32] {
    // SAFETY: a row of the view has so many readable elements.
    unsafe { std::slice::from_raw_parts(logits.row::<f32>(row), logits.num_cols()) }
}

fn check_logits(logits: &Matrix<'_>) -> Result<(), ArgumentError> {
    require(
        logits.dtype() == DType::F32 && (1..=MAX_COLS).contains(&logits.num_cols()),
        "logits",
        || logits.describe(),
        || format!("float32 with 1 to {MAX_COLS} columns"),
    )
}

/// `values` of `argument` are at least 0 and below `end`, and there are `len` of them.
fn check_indices(
    argument: &'static str,
    values: &[i32],
    len: usize,
    end: usize,
) -> Result<(), ArgumentError> {
    check_len(argument, values.len(), len)?;
    let wrong = values.iter().position(|&value| usize::try_from(value).map_or(true, |v| v >= end));
    match wrong {
        None => Ok(()),
        Some(at) => Err(ArgumentError::new(
            argument,
            format!("{} at {at}", values[at]),
            format!("0 to {}", end.saturating_sub(1)),
        )),
    }
}

fn check_len(argument: &'static str, got: usize, len: usize) -> Result<(), ArgumentError> {
    require(
        got == len,
        argument,
        || format!("{got} values"),
        || format!("one for each of rows, {len}"),
    )
}

/// What the items of a kernel give, each written once by the thread that computes it.
#[derive(Debug)]
struct Results<T>(Vec<OnceLock<T>>);

impl<T> Default for Results<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> Results<T> {
    /// Forget everything, and have room for `num_items`.
    fn reset(&mut self, num_items: usize) {
        self.0.clear();
        self.0.resize_with(num_items, OnceLock::new);
    }

    fn set(&self, item: usize, result: T) {
        assert!(self.0[item].set(result).is_ok(), "item {item} was computed twice");
    }

    fn values(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|cell| cell.get().expect("every item was computed"))
    }

    fn into_values(self) -> impl Iterator<Item = T> {
        self.0.into_iter().map(|cell| cell.into_inner().expect("every item was computed"))
    }
}
