//! What one step may hold: tokens, rows, output rows, and the share of long prompts.
//!
//! Rows with one token to go are counted before anything is scheduled, and a token is kept for each
//! of them until its turn comes. So prefill never displaces decode, although both are served in one
//! pass, in one order.

use fastserve_base::CoreConfig;
use fastserve_base::fault::{Fault, planted};

/// The budget of one step, as it is used up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepBudget {
    tokens: u32,
    reserved: u32,
    long_tokens: u32,
    spare_outputs: u32,
    max_chunk: u32,
}

impl StepBudget {
    /// A fresh budget, with `num_decode_rows` tokens kept for the rows that have one to go.
    pub fn new(config: &CoreConfig, num_decode_rows: u32) -> Self {
        let tokens = config.max_num_batched_tokens + u32::from(planted(Fault::BudgetExceededByOne));
        let long = u64::from(tokens) * u64::from(config.max_long_prefill_percent) / 100;
        Self {
            tokens,
            reserved: num_decode_rows,
            long_tokens: (long as u32).max(1),
            spare_outputs: config.max_num_output_rows - config.max_num_seqs,
            max_chunk: config.max_chunk_tokens.unwrap_or(u32::MAX),
        }
    }

    /// Tokens that a chunk may take now.
    pub fn chunk_room(&self, is_long: bool) -> u32 {
        let room = (self.tokens - self.reserved).min(self.max_chunk);
        if is_long { room.min(self.long_tokens) } else { room }
    }

    /// The same for a row that already has `taken` tokens in this step, the cap on long prompts lifted.
    pub fn extension_room(&self, taken: u32) -> u32 {
        (self.tokens - self.reserved).min(self.max_chunk.saturating_sub(taken))
    }

    /// Tokens left for anybody.
    pub fn tokens_left(&self) -> u32 {
        self.tokens - self.reserved
    }

    /// Output rows beyond the one that every row may have.
    pub fn spare_outputs(&self) -> u32 {
        self.spare_outputs
    }

    /// A decode row's turn: it takes its token, or gives it up.
    pub fn settle_decode(&mut self, takes: bool) {
        self.reserved = self.reserved.checked_sub(1).expect("a token was kept for the row");
        if takes {
            self.tokens -= 1;
        }
    }

    /// A chunk is scheduled.
    pub fn take_chunk(&mut self, tokens: u32, is_long: bool) {
        self.tokens -= tokens;
        if is_long {
            self.long_tokens = self.long_tokens.saturating_sub(tokens);
        }
    }

    /// Output rows beyond a row's own are scheduled.
    pub fn take_outputs(&mut self, outputs: u32) {
        self.spare_outputs -= outputs;
    }
}
