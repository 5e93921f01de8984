//! Budgets: tokens, rows, output rows, chunks, the weight of prompts, and the share of long ones.

use crate::check::step::{PlanCheck, RowView};
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

    /// Prompts weigh no more than a step may: a token counts as one, and for each of those before it
    /// as a part of one. A single token may weigh anything, or a long prompt would stand still.
    pub(crate) fn prompt_weight(&self) -> Check {
        let num_tokens: usize = self.chunks().map(|row| row.tokens.len()).sum();
        let (weight, limit) = (self.chunk_weight(), self.weight_limit());
        ensure!(
            num_tokens <= 1 || weight <= limit,
            "budget",
            "{num_tokens} prompt tokens weigh {weight}, the limit is {limit}"
        );
        Ok(())
    }

    /// Rows that are no decode rows. One that a match of this step has brought to its last token is a
    /// chunk like any other.
    fn chunks(&self) -> impl Iterator<Item = &RowView> {
        self.rows.iter().filter(|row| {
            row.remaining > 1 || row.rematched_from.is_some() || self.assigned.contains(&row.seq)
        })
    }

    /// What a token weighs that has so many before it.
    fn token_weight(&self, position: usize) -> usize {
        self.config.context_per_token.map_or(1, |context| context as usize + position)
    }

    fn chunk_weight(&self) -> usize {
        self.chunks()
            .flat_map(|row| row.start..row.start + row.tokens.len())
            .map(|position| self.token_weight(position))
            .sum()
    }

    fn weight_limit(&self) -> usize {
        let config = self.config;
        let mut limit = config.max_num_batched_tokens;
        if self.chunks().count() < self.rows.len() {
            limit = limit.min(config.max_num_mixed_prefill_tokens.unwrap_or(limit));
        }
        limit as usize * self.token_weight(0)
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
            let position = state.num_total - remaining;
            let is_heavy = self.chunk_weight() + self.token_weight(position) > self.weight_limit();
            ensure!(
                has_row || fills || remaining == 0 || is_long(remaining) || waits || is_heavy,
                "budget",
                "long prompts take {taken} tokens, their share is {share}; {} with \
                 {remaining} to go got none",
                self.ledger.name(seq)
            );
        }
        Ok(())
    }
}
