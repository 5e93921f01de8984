//! What can go wrong at run time. Bugs are not here: a bug panics.

use crate::{Nanos, RequestId, StepId};

/// Why a request was refused. Everything here is the caller's to handle, and nothing was queued.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// The prompt has no tokens.
    #[error("prompt is empty; a request needs at least one token")]
    EmptyPrompt,

    /// There is no room for a single output token.
    #[error(
        "prompt has {prompt} tokens; with one to generate that is more than max_model_len={max}; \
         shorten the prompt{}",
        if *lowered_by_pool { ", or give the KV pool more blocks" } else { "" }
    )]
    PromptTooLong {
        /// Tokens in the prompt.
        prompt: usize,
        /// The limit, prompt and output together.
        max: usize,
        /// Whether the limit is the pool's and not the model's.
        lowered_by_pool: bool,
    },

    /// A token id that the model has no row for.
    #[error(
        "token id {token} at position {position} is outside the vocabulary of {vocab_size} \
         (0 to {})", vocab_size - 1
    )]
    TokenOutOfRange {
        /// The id.
        token: u32,
        /// Where in the prompt, or in the list of stop tokens.
        position: usize,
        /// The limit.
        vocab_size: u32,
    },

    /// A number outside its range.
    #[error("{name}={value}: want {want}")]
    OutOfRange {
        /// The parameter.
        name: &'static str,
        /// What was given.
        value: i64,
        /// What is taken.
        want: String,
    },

    /// Spans out of order, overlapping, or outside the prompt.
    #[error(
        "span {index} ({start}..{end}) must be inside the prompt of {prompt} tokens and after the span before it"
    )]
    BadSpan {
        /// Which.
        index: usize,
        /// Its start.
        start: u32,
        /// Its end.
        end: u32,
        /// Tokens in the prompt.
        prompt: usize,
    },

    /// The id belongs to a request that has not ended.
    #[error("request id {} is in use by a request that has not ended; choose another", id.0)]
    DuplicateRequest {
        /// The id.
        id: RequestId,
    },

    /// Too many requests wait.
    #[error("queue is full: {limit} requests wait (max_num_queued_requests); retry in about {:.1} s", seconds(*retry_after))]
    QueueFull {
        /// The limit.
        limit: usize,
        /// Predicted wait.
        retry_after: Nanos,
    },

    /// Too many prompt tokens wait.
    #[error(
        "queue holds {queued} uncomputed tokens, {prompt} more would pass max_num_queued_tokens={limit}; \
         retry in about {:.1} s", seconds(*retry_after)
    )]
    QueueTokensFull {
        /// Tokens that wait now.
        queued: usize,
        /// What this request would add.
        prompt: usize,
        /// The limit.
        limit: usize,
        /// Predicted wait.
        retry_after: Nanos,
    },

    /// The engine is draining or closed.
    #[error("the engine is {state} and takes no new requests")]
    NotAccepting {
        /// Its state.
        state: &'static str,
    },
}

/// A wait in seconds, to be shown with one decimal: a short one is no reason to try again at once.
fn seconds(nanos: Nanos) -> f64 {
    (nanos as f64 / 1e9).max(0.1)
}

impl RequestError {
    /// HTTP status a server should answer with. One place, so every front end agrees.
    pub fn http_status(&self) -> u16 {
        match self {
            Self::EmptyPrompt
            | Self::PromptTooLong { .. }
            | Self::TokenOutOfRange { .. }
            | Self::OutOfRange { .. }
            | Self::BadSpan { .. } => 400,
            Self::DuplicateRequest { .. } => 409,
            Self::QueueFull { .. } | Self::QueueTokensFull { .. } => 429,
            Self::NotAccepting { .. } => 503,
        }
    }

    /// Stable machine-readable name.
    pub fn code(&self) -> &'static str {
        match self {
            Self::EmptyPrompt => "empty_prompt",
            Self::PromptTooLong { .. } => "context_length_exceeded",
            Self::TokenOutOfRange { .. } => "token_out_of_range",
            Self::OutOfRange { .. } => "out_of_range",
            Self::BadSpan { .. } => "bad_span",
            Self::DuplicateRequest { .. } => "duplicate_request",
            Self::QueueFull { .. } => "queue_full",
            Self::QueueTokensFull { .. } => "queue_tokens_full",
            Self::NotAccepting { .. } => "not_accepting",
        }
    }
}

/// A step driven out of turn. The core is unchanged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// The arena is too small for a plan.
    #[error("arena has {words} words, a plan needs {needed}; allocate layout.words")]
    ArenaTooSmall {
        /// Words given.
        words: usize,
        /// Words needed.
        needed: usize,
    },

    /// `plan` was called with every arena in use.
    #[error("{in_flight} steps are in flight, max_num_steps_in_flight={limit}; commit one first")]
    TooManyInFlight {
        /// Steps planned and not committed.
        in_flight: usize,
        /// The limit.
        limit: usize,
    },

    /// Steps commit in the order they were planned.
    #[error("step {} cannot be committed now; {}", got.0, match expected {
        Some(step) => format!("step {} is next", step.0),
        None => "no step is in flight".to_owned(),
    })]
    OutOfOrder {
        /// The step given.
        got: StepId,
        /// The step that is next.
        expected: Option<StepId>,
    },

    /// The results do not fit the plan.
    #[error("step {} has {outputs} outputs, the results have {got}", step.0)]
    WrongResultLength {
        /// The step.
        step: StepId,
        /// Output rows in its plan.
        outputs: usize,
        /// Rows given.
        got: usize,
    },

    /// A sampled token that the vocabulary does not have, or a count above what the row may give.
    #[error("output row {row} of step {}: {what}={value}, want {want}", step.0)]
    BadResult {
        /// The step.
        step: StepId,
        /// Output row.
        row: usize,
        /// `count` or `token`.
        what: &'static str,
        /// The value.
        value: i64,
        /// What is taken.
        want: String,
    },

    /// The core is closed.
    #[error("the core is closed; make a new one")]
    Closed,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_wait_is_not_none() {
        for (retry_after, shown) in [(0, "0.1 s"), (1_000, "0.1 s"), (2_360_000_000, "2.4 s")] {
            let text = RequestError::QueueFull { limit: 3, retry_after }.to_string();
            assert!(text.ends_with(&format!("retry in about {shown}")), "{text}");
        }
    }
}
