//! Budgets: tokens, rows, output rows, chunks, and the share of long prompts.

use crate::check::step::PlanCheck;
use crate::ledger::Place;
use crate::violation::{Check, ensure};

impl PlanCheck<'_> {
    /// No limit of the configuration is passed.
    pub(crate) fn budgets(&self) -> Check {
        let config = self.config;
        for (what, value, limit) in [
            ("tokens", self.sizes.num_tokens, config.max_num_batched_tokens),
            ("rows", self.sizes.num_rows, config.max_num_seqs),
            ("output rows", self.sizes.num_outputs, config.max_num_output_rows),
        ] {
            ensure!(value <= limit, "budget", "{value} {what} in a step, the limit is {limit}");
        }
        let chunk = config.max_chunk_tokens.map_or(usize::MAX, |chunk| chunk as usize);
        for row in &self.rows {
            ensure!(
                row.tokens.len() <= chunk,
                "budget",
                "{} tokens in the row of slot {}, max_chunk_tokens is {chunk}",
                row.tokens.len(),
                row.slot
            );
        }
        Ok(())
    }

    /// Long prompts together take more than their share only while nobody else could use it: no
    /// sequence that is running without a row in this step, and is not long, has tokens to go.
    pub(crate) fn long_share(&self) -> Check {
        let Some(threshold) = self.config.long_prefill_threshold else { return Ok(()) };
        let is_long = |remaining: usize| remaining > threshold as usize;
        let budget = u64::from(self.config.max_num_batched_tokens);
        let share = (budget * u64::from(self.config.max_long_prefill_percent) / 100).max(1);
        let taken: usize =
            self.rows.iter().filter(|row| is_long(row.remaining)).map(|row| row.tokens.len()).sum();
        if taken as u64 <= share {
            return Ok(());
        }
        for &seq in &self.stayed {
            let state = &self.ledger.seqs[seq];
            if !matches!(state.place, Place::Running(_)) {
                continue;
            }
            let Some(remaining) = state.remaining() else { continue };
            let has_row = self.rows.iter().any(|row| row.seq == seq);
            let fills = state.num_total >= state.stream.limit();
            let waits = self.may_follow(seq) || self.may_want_blocks(seq);
            ensure!(
                has_row || fills || remaining == 0 || is_long(remaining) || waits,
                "budget",
                "long prompts take {taken} tokens, their share is {share}; {} with \
                 {remaining} to go got none",
                self.ledger.name(seq)
            );
        }
        Ok(())
    }
}
