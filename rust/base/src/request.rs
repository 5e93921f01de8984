//! What a client asks for, as the core sees it: tokens and numbers, no text.

use crate::{Namespace, Nanos, RequestId, Token};

/// A stretch of the prompt whose meaning is not its tokens (an image's placeholders).
///
/// The digest is part of the key of every block that the stretch overlaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// First position, counted from the start of the prompt.
    pub start: u32,
    /// One past the last position.
    pub end: u32,
    /// Digest of the content.
    pub digest: u128,
}

/// One request: a prompt, and 1..n sequences that continue it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The caller's id.
    pub id: RequestId,
    /// The prompt. At least one token.
    pub prompt: Vec<Token>,
    /// Most tokens to generate in each sequence, at least 1. Cut to what the model's length leaves.
    pub max_tokens: u32,
    /// No stop token ends a sequence before it has generated this many tokens.
    pub min_tokens: u32,
    /// Tokens that end a sequence (they are part of the output).
    pub stop_token_ids: Vec<Token>,
    /// Sequences that continue the prompt (`n`), at least 1.
    pub num_sequences: u32,
    /// For the `priority` policy: lower runs first.
    pub priority: i32,
    /// Whether logits are wanted at every prompt position (`prompt_logprobs`).
    pub score_prompt: bool,
    /// Who may share this request's blocks.
    pub namespace: Namespace,
    /// Adapter to run with, 0 for none. Opaque to the core.
    pub adapter: u32,
    /// Stretches of the prompt keyed by digest. Sorted by `start`, not overlapping.
    pub spans: Vec<Span>,
    /// Sampling record: opaque words that reach the sampler once, in the slot event.
    pub sampling: Vec<i32>,
    /// When the request arrived, on the clock that `plan` is given.
    pub arrival: Nanos,
}

impl Request {
    /// A request for up to `max_tokens` tokens after `prompt`, everything else at its default.
    pub fn new(id: RequestId, prompt: Vec<Token>, max_tokens: u32) -> Self {
        Self {
            id,
            prompt,
            max_tokens,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            num_sequences: 1,
            priority: 0,
            score_prompt: false,
            namespace: Namespace::default(),
            adapter: 0,
            spans: Vec::new(),
            sampling: Vec::new(),
            arrival: 0,
        }
    }
}

/// Why a sequence ended. The codes are what the arrays of `StepOutputs` carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FinishReason {
    /// A stop token, or the text side's stop string.
    Stop = 1,
    /// `max_tokens` or the model's length.
    Length = 2,
    /// The caller aborted it.
    Abort = 3,
    /// The request or a step under it failed.
    Error = 4,
}

impl FinishReason {
    /// The name `OpenAI`'s API uses.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error => "error",
        }
    }
}

/// What is wanted of an output row. The codes are what `out_kinds` carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum OutputKind {
    /// Sample the next token from these logits.
    Sample = 0,
    /// Verify a draft token (reserved: `max_num_draft_tokens` is 0 for now).
    Verify = 1,
    /// Score the prompt token that follows; nothing is appended.
    Score = 2,
    /// The hidden state itself is the output (reserved).
    Embed = 3,
}
