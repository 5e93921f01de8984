//! One token for every output row of a step.
//!
//! What belongs to a sequence comes once, when it gets its row slot. A step then needs its logits and
//! the plan's arrays about its output rows. In vLLM's order:
//!
//! 1. rows whose raw logits are not finite are set apart;
//! 2. log probabilities are those of the raw logits ([`super::logprobs`]);
//! 3. logits are adjusted ([`super::adjust`]); a row whose best logit is not finite after that, or
//!    over the temperature, is set apart too;
//! 4. greedy rows take the best token (the lowest of equals), the others draw ([`super::draw`]), with
//!    bits named by seed, sequence index and position alone.
//!
//! A step of greedy rows without any of the rest is one pass over its logits, and allocates nothing.
//!
//! Nothing here is undone when a step fails: a rolled-back sequence gets a slot again, with its
//! tokens, and so what was counted is counted anew.

use super::adjust::adjust;
use super::best::BestTokens;
use super::draw::draw_into;
use super::logprobs::row_logprobs;
use super::slots::Slots;
use super::{Assignment, Draws, Results, RowLogprobs, check_logits, draw_bits, logits_row};
use crate::error::{ArgumentError, require};
use crate::pool::Pool;
use crate::view::Matrix;

/// Count of a row whose logits have NaN or an infinity: the raw ones, or those made of them.
pub const NOT_FINITE: i32 = -1;

/// Count of a row in which no token may be taken.
pub const ALL_MASKED: i32 = -2;

/// An output row that samples, as the plan has it.
const SAMPLE: i32 = 0;
/// One that scores a token of the prompt.
const SCORE: i32 = 2;

/// Rows that are adjusted at a time: what bounds the memory of their copies.
const ROWS_AT_A_TIME: usize = 32;

/// A step's output rows: a plan's arrays, by their names there.
#[derive(Debug, Clone, Copy)]
pub struct Outputs<'a> {
    /// `[T]` position of each of the step's tokens.
    pub positions: &'a [i32],
    /// `[R]` index into the step's tokens.
    pub out_rows: &'a [i32],
    /// `[R]` row slot whose sampling state is used.
    pub out_slots: &'a [i32],
    /// `[R]` 0 sample, 2 score.
    pub out_kinds: &'a [i32],
}

impl Outputs<'_> {
    /// Position of the token that follows an output row. It was checked.
    fn next_position(&self, output: usize) -> i32 {
        self.positions[self.out_rows[output] as usize] + 1
    }
}

/// The log probability of one token of a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Score {
    /// Whose prompt.
    pub request: u64,
    /// Of the token in the prompt; the first token has none, so 1 or more.
    pub position: i32,
    /// Its own, and the best tokens' in its place.
    pub logprobs: RowLogprobs,
}

/// What a step's output rows gave.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Samples {
    /// Tokens appended a row: 1 for a sample, 0 for a score; a row that failed has [`NOT_FINITE`] or
    /// [`ALL_MASKED`].
    pub counts: Vec<i32>,
    /// The sampled token a row; of no meaning where the count is not 1.
    pub tokens: Vec<i32>,
    /// Of the sampled tokens, with their output row, where they were asked for.
    pub logprobs: Vec<(i32, RowLogprobs)>,
    /// Of prompt tokens, where they were asked for.
    pub scores: Vec<Score>,
}

impl Samples {
    /// With room for `num_rows` before anything grows.
    pub fn with_capacity(num_rows: usize) -> Self {
        let (counts, tokens) = (Vec::with_capacity(num_rows), Vec::with_capacity(num_rows));
        Self { counts, tokens, ..Self::default() }
    }

    /// Forget everything, keep the memory.
    pub fn clear(&mut self) {
        self.counts.clear();
        self.tokens.clear();
        self.logprobs.clear();
        self.scores.clear();
    }
}

/// Sampling state by row slot. Samples step after step, in the order of the steps.
#[derive(Debug)]
pub struct Sampler {
    vocab_size: usize,
    slots: Slots,
    last_samples: Box<[i32]>,
    raw: BestTokens,
    /// Output rows whose logits are adjusted.
    changed: Vec<usize>,
    adjusted: Vec<f32>,
    best_adjusted: BestTokens,
    draw: DrawList,
    asked: AskedList,
}

impl Sampler {
    /// A sampler for `num_slots` row slots and logits of `vocab_size` columns.
    pub fn new(num_slots: usize, vocab_size: usize) -> Self {
        Self {
            vocab_size,
            slots: Slots::new(num_slots, vocab_size),
            last_samples: vec![0; num_slots].into(),
            raw: BestTokens::default(),
            changed: Vec::new(),
            adjusted: Vec::new(),
            best_adjusted: BestTokens::default(),
            draw: DrawList::default(),
            asked: AskedList::default(),
        }
    }

    /// The token that each slot sampled last, at an address that never changes.
    pub fn last_samples(&self) -> &[i32] {
        &self.last_samples
    }

    /// A slot has a new sequence. To be called after the step before was sampled.
    ///
    /// # Errors
    ///
    /// A slot, token or record that cannot be; the slot then has no sequence.
    pub fn assign(&mut self, given: &Assignment<'_>) -> Result<(), ArgumentError> {
        self.slots.assign(given, &self.last_samples)
    }

    /// A slot has no sequence any more.
    ///
    /// # Errors
    ///
    /// There is no such slot.
    pub fn release(&mut self, slot: i32) -> Result<(), ArgumentError> {
        self.slots.release(slot)
    }

    /// Sample the output rows of a step from `logits`, `f32` `[R, vocabulary]`, into `samples`.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit each other, and indices out of range, by name; nothing is sampled.
    pub fn sample(
        &mut self,
        pool: &Pool,
        logits: &Matrix<'_>,
        outputs: &Outputs<'_>,
        samples: &mut Samples,
    ) -> Result<(), ArgumentError> {
        samples.clear();
        self.check(logits, outputs)?;
        if outputs.out_slots.is_empty() {
            return Ok(());
        }
        self.raw.find(pool, logits)?;
        for (best, &kind) in self.raw.best.iter().zip(outputs.out_kinds) {
            let count = if best.is_finite { i32::from(kind == SAMPLE) } else { NOT_FINITE };
            samples.counts.push(count);
            samples.tokens.push(best.token);
        }
        self.score(pool, logits, outputs, samples)?;
        self.take_unchanged(pool, logits, outputs, samples)?;
        self.take_changed(pool, logits, outputs, samples)?;
        self.remember(outputs, samples);
        self.report(pool, logits, outputs, samples)
    }

    fn check(&self, logits: &Matrix<'_>, outputs: &Outputs<'_>) -> Result<(), ArgumentError> {
        check_logits(logits)?;
        let Outputs { positions, out_rows, out_slots, out_kinds } = outputs;
        let (num, vocab_size) = (out_slots.len(), self.vocab_size);
        require(
            (logits.num_rows(), logits.num_cols()) == (num, vocab_size),
            "logits",
            || logits.describe(),
            || format!("[{num}, {vocab_size}] float32"),
        )?;
        super::check_indices("out_rows", out_rows, num, positions.len())?;
        require(
            out_kinds.len() == num,
            "out_kinds",
            || format!("{} values", out_kinds.len()),
            || format!("one for each of out_slots, {num}"),
        )?;
        for (at, (&slot, &kind)) in out_slots.iter().zip(*out_kinds).enumerate() {
            require(
                kind == SAMPLE || kind == SCORE,
                "out_kinds",
                || format!("{kind} at {at}"),
                || format!("{SAMPLE} (sample) or {SCORE} (score)"),
            )?;
            require(
                self.slots.get(slot).is_some(),
                "out_slots",
                || format!("{slot} at {at}"),
                || "a slot that is assigned".into(),
            )?;
        }
        Ok(())
    }

    /// Score the tokens of prompts that follow the rows which ask for it.
    fn score(
        &mut self,
        pool: &Pool,
        logits: &Matrix<'_>,
        outputs: &Outputs<'_>,
        samples: &mut Samples,
    ) -> Result<(), ArgumentError> {
        self.asked.clear();
        for (output, &kind) in outputs.out_kinds.iter().enumerate() {
            if kind != SCORE || samples.counts[output] < 0 {
                continue;
            }
            let slot = self.slots.checked(outputs.out_slots[output]);
            let position = outputs.next_position(output);
            let token = usize::try_from(position).ok().and_then(|at| slot.prompt.get(at));
            let Some(&token) = token else {
                let want = "a row before one of a prompt that is scored";
                return Err(ArgumentError::new("out_kinds", format!("2 at {output}"), want));
            };
            self.asked.push(output, token, slot.record.num_prompt_logprobs);
        }
        let found = self.asked.row_logprobs(pool, logits)?;
        samples.scores.extend(self.asked.rows.iter().zip(found).map(|(&output, logprobs)| {
            let output = output as usize;
            let slot = self.slots.checked(outputs.out_slots[output]);
            let position = outputs.next_position(output);
            Score { request: slot.request, position, logprobs }
        }));
        Ok(())
    }

    /// Draw for the rows whose logits stay as they are, and list the others.
    fn take_unchanged(
        &mut self,
        pool: &Pool,
        logits: &Matrix<'_>,
        outputs: &Outputs<'_>,
        samples: &mut Samples,
    ) -> Result<(), ArgumentError> {
        let Self { slots, raw, changed, draw, .. } = self;
        changed.clear();
        draw.clear();
        for (output, &slot) in outputs.out_slots.iter().enumerate() {
            if samples.counts[output] != 1 {
                continue;
            }
            let slot = slots.checked(slot);
            if slot.record.adjusts() {
                changed.push(output);
            } else if !slot.record.is_greedy {
                draw.consider(slot, output, output, raw.best[output].logit, outputs, samples);
            }
        }
        draw.run(pool, logits, samples)
    }

    /// Take the tokens of the rows whose logits are adjusted.
    fn take_changed(
        &mut self,
        pool: &Pool,
        logits: &Matrix<'_>,
        outputs: &Outputs<'_>,
        samples: &mut Samples,
    ) -> Result<(), ArgumentError> {
        let Self { vocab_size, slots, changed, adjusted, best_adjusted, draw, .. } = self;
        for group in changed.chunks(ROWS_AT_A_TIME) {
            adjusted.resize(group.len() * *vocab_size, 0.0);
            for (&output, out) in group.iter().zip(adjusted.chunks_exact_mut(*vocab_size)) {
                let slot = slots.checked(outputs.out_slots[output]);
                adjust(logits_row(logits, output), slot, outputs.next_position(output), out);
            }
            let logits = Matrix::f32(adjusted, *vocab_size);
            best_adjusted.find(pool, &logits)?;
            draw.clear();
            for (row, (&output, best)) in group.iter().zip(&best_adjusted.best).enumerate() {
                let slot = slots.checked(outputs.out_slots[output]);
                samples.tokens[output] = best.token;
                draw.consider(slot, output, row, best.logit, outputs, samples);
            }
            draw.run(pool, &logits, samples)?;
        }
        Ok(())
    }

    /// Keep what was sampled for the steps to come.
    fn remember(&mut self, outputs: &Outputs<'_>, samples: &Samples) {
        for (output, &slot) in outputs.out_slots.iter().enumerate() {
            if samples.counts[output] != 1 {
                continue;
            }
            let token = samples.tokens[output];
            self.last_samples[slot as usize] = token;
            if let Some(counts) = &mut self.slots.checked_mut(slot).counts {
                counts.add_output(token);
            }
        }
    }

    /// Report log probabilities of the sampled tokens, where they are wanted.
    fn report(
        &mut self,
        pool: &Pool,
        logits: &Matrix<'_>,
        outputs: &Outputs<'_>,
        samples: &mut Samples,
    ) -> Result<(), ArgumentError> {
        self.asked.clear();
        for (output, &slot) in outputs.out_slots.iter().enumerate() {
            let num_best = self.slots.checked(slot).record.num_logprobs;
            if samples.counts[output] == 1 && num_best >= 0 {
                self.asked.push(output, samples.tokens[output], num_best);
            }
        }
        let found = self.asked.row_logprobs(pool, logits)?;
        samples.logprobs.extend(self.asked.rows.iter().copied().zip(found));
        Ok(())
    }
}

/// Rows whose log probabilities are wanted.
#[derive(Debug, Default)]
struct AskedList {
    rows: Vec<i32>,
    chosen: Vec<i32>,
    num_best: Vec<i32>,
}

impl AskedList {
    fn clear(&mut self) {
        self.rows.clear();
        self.chosen.clear();
        self.num_best.clear();
    }

    fn push(&mut self, output: usize, chosen: i32, num_best: i32) {
        self.rows.push(output as i32);
        self.chosen.push(chosen);
        self.num_best.push(num_best);
    }

    fn row_logprobs(
        &self,
        pool: &Pool,
        logits: &Matrix<'_>,
    ) -> Result<Vec<RowLogprobs>, ArgumentError> {
        if self.rows.is_empty() {
            return Ok(Vec::new());
        }
        row_logprobs(pool, logits, &self.rows, &self.chosen, &self.num_best)
    }
}

/// Draws to make from one matrix of logits.
#[derive(Debug, Default)]
struct DrawList {
    /// Output row of each.
    outputs: Vec<usize>,
    rows: Vec<i32>,
    temperature: Vec<f32>,
    top_k: Vec<i32>,
    top_p: Vec<f32>,
    min_p: Vec<f32>,
    bits: Vec<u64>,
    tokens: Results<i32>,
}

impl DrawList {
    fn clear(&mut self) {
        self.outputs.clear();
        self.rows.clear();
        self.temperature.clear();
        self.top_k.clear();
        self.top_p.clear();
        self.min_p.clear();
        self.bits.clear();
    }

    /// List a draw from `row`, whose largest logit is `best`, unless the row is set apart or greedy.
    ///
    /// Only the best one need be finite over the temperature: NaN and +inf come first in a row, and
    /// what falls to −inf beside it is not taken.
    fn consider(
        &mut self,
        slot: &super::slots::Slot,
        output: usize,
        row: usize,
        best: f32,
        outputs: &Outputs<'_>,
        samples: &mut Samples,
    ) {
        let record = &slot.record;
        let scaled = if record.is_greedy { best } else { best / record.temperature };
        if !scaled.is_finite() {
            let is_masked = scaled == f32::NEG_INFINITY;
            samples.counts[output] = if is_masked { ALL_MASKED } else { NOT_FINITE };
        } else if !record.is_greedy {
            self.outputs.push(output);
            self.rows.push(row as i32);
            self.temperature.push(record.temperature);
            self.top_k.push(record.top_k);
            self.top_p.push(record.top_p);
            self.min_p.push(record.min_p);
            let position = outputs.next_position(output) as u32;
            self.bits.push(draw_bits(record.seed, slot.index, position));
        }
    }

    /// Make the draws, each token into its output row.
    fn run(
        &mut self,
        pool: &Pool,
        logits: &Matrix<'_>,
        samples: &mut Samples,
    ) -> Result<(), ArgumentError> {
        if self.outputs.is_empty() {
            return Ok(());
        }
        let Self { outputs, rows, temperature, top_k, top_p, min_p, bits, tokens } = self;
        draw_into(pool, logits, &Draws { rows, temperature, top_k, top_p, min_p, bits }, tokens)?;
        for (&output, &token) in outputs.iter().zip(tokens.values()) {
            samples.tokens[output] = token;
        }
        Ok(())
    }
}
