//! A language model too simple to be wrong: the next token is a hash of everything before it.
//!
//! The *prefix* of a position stands for the namespace and for every token, and every submitted span,
//! up to and including that position. It rolls, so it is what a KV slot of a real model would depend
//! on: computed from the slot before it and the token at hand. The token that follows is a hash of the
//! last prefix, of the sequence's index (so that forks of one prompt part) and of its sampling record,
//! modulo a small vocabulary (so that different sequences meet again often, and stop tokens occur).
//!
//! [`Stream`] is the reference: the tokens of one sequence from its request alone. Nothing the core
//! does can reach it.

use fastserve_base::{FinishReason, Namespace, Request, Span, Token};

use crate::rng::mix;

/// Stands for a position and all before it.
pub type Prefix = u64;

/// What a sequence of `namespace` starts from.
pub fn root(namespace: Namespace) -> Prefix {
    mix(mix(0x6e61_6d65, namespace.0 as u64), (namespace.0 >> 64) as u64)
}

/// The prefix one position further. `span` is [`span_content`] of that position.
#[inline]
pub fn extend(prefix: Prefix, token: Token, span: u64) -> Prefix {
    mix(prefix, u64::from(token) ^ span)
}

/// What the spans of a request put at `position`: 0 outside all of them.
pub fn span_content(spans: &[Span], position: u32) -> u64 {
    spans.iter().find(|span| (span.start..span.end).contains(&position)).map_or(0, |span| {
        let digest = mix(span.digest as u64, (span.digest >> 64) as u64);
        mix(digest, u64::from(position - span.start)) | 1 << 63
    })
}

/// What a sampler knows of a sequence beside its logits.
pub fn sampler(index: u32, sampling: &[i32]) -> u64 {
    sampling.iter().fold(mix(0x7361_6d70, u64::from(index)), |hash, &word| mix(hash, word as u64))
}

/// The token that follows `prefix`.
pub fn next_token(prefix: Prefix, sampler: u64, vocab_size: u32) -> Token {
    (mix(prefix, sampler) % u64::from(vocab_size)) as Token
}

/// One sequence as it must come out: prompt and outputs to the end of its room, whatever stops it.
#[derive(Debug, Clone)]
pub struct Stream {
    /// Tokens, the prompt's first.
    pub tokens: Vec<Token>,
    /// Prefix at each position.
    pub prefixes: Vec<Prefix>,
    /// What spans put at each position of the prompt.
    pub spans: Vec<u64>,
    /// Tokens of the prompt.
    pub num_prompt: usize,
    /// What its sampler knows.
    pub sampler: u64,
    /// Output tokens until it ends by itself.
    pub num_outputs: usize,
    /// How it then ends: `Stop` or `Length`.
    pub finish: FinishReason,
}

impl Stream {
    /// Run the model on `request` alone. `max_model_len` is the one in force.
    pub fn new(request: &Request, index: u32, vocab_size: u32, max_model_len: u32) -> Self {
        let num_prompt = request.prompt.len();
        let room = (request.max_tokens as usize).min(max_model_len as usize - num_prompt);
        let sampler = sampler(index, &request.sampling);
        let spans: Vec<u64> =
            (0..num_prompt as u32).map(|at| span_content(&request.spans, at)).collect();
        let mut stream = Self {
            tokens: request.prompt.clone(),
            prefixes: Vec::with_capacity(num_prompt + room),
            spans,
            num_prompt,
            sampler,
            num_outputs: room,
            finish: FinishReason::Length,
        };
        let mut prefix = root(request.namespace);
        for position in 0..num_prompt + room {
            if position >= num_prompt {
                stream.tokens.push(next_token(prefix, sampler, vocab_size));
            }
            prefix = extend(prefix, stream.tokens[position], stream.span(position));
            stream.prefixes.push(prefix);
        }
        let is_stop = |n: usize| {
            n >= request.min_tokens as usize
                && request.stop_token_ids.contains(&stream.tokens[num_prompt + n - 1])
        };
        if let Some(n) = (1..=room).find(|&n| is_stop(n)) {
            stream.num_outputs = n;
            stream.finish = FinishReason::Stop;
        }
        stream
    }

    /// What spans put at `position`.
    #[inline]
    pub fn span(&self, position: usize) -> u64 {
        self.spans.get(position).copied().unwrap_or(0)
    }

    /// Most tokens it may grow to.
    pub fn limit(&self) -> usize {
        self.tokens.len()
    }

    /// The output tokens up to where it ends by itself.
    pub fn outputs(&self) -> &[Token] {
        &self.tokens[self.num_prompt..self.num_prompt + self.num_outputs]
    }
}
