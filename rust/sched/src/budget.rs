//! What one step may hold: tokens, rows, output rows, and the share of long prompts.
//!
//! Rows with one token to go are counted before anything is scheduled, and a token is kept for each
//! of them until its turn comes. So prefill never displaces decode, although both are served in one
//! pass, in one order.
//!
//! Prompt tokens are weighed too, since a step takes as long as its work: a token with `p` tokens
//! before it counts as `1 + p / context_per_token`. So the chunks of a long prompt shrink as its
//! context grows. The first chunk of a step may have a token whatever it weighs.

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
    work: Work,
}

/// What prompt tokens may weigh, in parts of a token without context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Work {
    left: u64,
    /// What a token weighs without context.
    token: u64,
    /// What each token before it adds: 1, or 0 where context costs nothing.
    context: u64,
    /// Whether nothing is taken yet.
    is_whole: bool,
}

impl Work {
    fn new(config: &CoreConfig, beside_decode: bool) -> Self {
        let mixed = config.max_num_mixed_prefill_tokens.filter(|_| beside_decode);
        let tokens = mixed.unwrap_or(u32::MAX).min(config.max_num_batched_tokens);
        let (token, context) = match config.context_per_token {
            Some(context) if !planted(Fault::ContextUnweighed) => (u64::from(context), 1),
            _ => (1, 0),
        };
        Self { left: u64::from(tokens) * token, token, context, is_whole: true }
    }

    /// What `tokens` weigh that have `start` before them.
    fn weight(&self, tokens: u32, start: u32) -> u64 {
        let (n, start) = (u64::from(tokens), u64::from(start));
        n * self.token + self.context * (n * start + n * n.saturating_sub(1) / 2)
    }

    /// Most tokens that have `start` before them and weigh no more than what is left.
    fn room(&self, start: u32) -> u32 {
        let first = self.weight(1, start);
        // Where tokens weigh the same: n * first <= left. Otherwise each weighs one more than the one
        // before it: n * first + n * (n - 1) / 2 <= left, the greater root of a square in n.
        let room = if self.context == 0 {
            self.left / first
        } else {
            let b = 2 * first - 1;
            ((b * b + 8 * self.left).isqrt() - b) / 2
        };
        room.max(u64::from(self.is_whole)).min(u64::from(u32::MAX)) as u32
    }

    fn take(&mut self, tokens: u32, start: u32) {
        self.left = self.left.saturating_sub(self.weight(tokens, start));
        self.is_whole = false;
    }
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
            work: Work::new(config, num_decode_rows > 0),
        }
    }

    /// Tokens that a chunk with `start` tokens before it may take now.
    pub fn chunk_room(&self, is_long: bool, start: u32) -> u32 {
        let room = self.extension_room(0, start);
        if is_long { room.min(self.long_tokens) } else { room }
    }

    /// The same for a row that already has `taken` tokens in this step, the cap on long prompts lifted.
    pub fn extension_room(&self, taken: u32, start: u32) -> u32 {
        let room = self.tokens_left().min(self.max_chunk.saturating_sub(taken));
        room.min(self.work.room(start))
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

    /// A chunk with `start` tokens before it is scheduled.
    pub fn take_chunk(&mut self, tokens: u32, is_long: bool, start: u32) {
        self.tokens -= tokens;
        if is_long {
            self.long_tokens = self.long_tokens.saturating_sub(tokens);
        }
        self.work.take(tokens, start);
    }

    /// Output rows beyond a row's own are scheduled.
    pub fn take_outputs(&mut self, outputs: u32) {
        self.spare_outputs -= outputs;
    }
}
