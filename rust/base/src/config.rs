//! Limits of the core, fixed at construction and checked all at once.

use std::fmt::Display;

use crate::Nanos;

/// Layers that share a block table. One group until windowed models come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerGroup {
    /// Layers in the group.
    pub layers: u32,
    /// Attention window in tokens, `None` for the whole context.
    pub window: Option<u32>,
}

/// Order in which requests are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PolicyKind {
    /// First come, first served.
    #[default]
    Fcfs,
    /// Lower `priority` first, then first come.
    Priority,
}

/// Everything the core is sized by. Nothing grows after construction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CoreConfig {
    /// Tokens per block: a power of two, 1 to 256 (engines use 8, 16 or 32).
    pub block_size: u32,
    /// Blocks in the pool.
    pub num_blocks: u32,
    /// Longest sequence, prompt and output. Lowered to what the pool holds.
    pub max_model_len: u32,
    /// Sequences running at once. Lowered to `max_num_batched_tokens`.
    pub max_num_seqs: u32,
    /// Tokens a step may compute.
    pub max_num_batched_tokens: u32,
    /// Tokens one sequence may compute in a step, `None` for the whole budget.
    pub max_chunk_tokens: Option<u32>,
    /// A prompt with more uncomputed tokens than this is long; `None`: no prompt is.
    pub long_prefill_threshold: Option<u32>,
    /// Percent of the token budget that all long prompts together may take while others want it.
    pub max_long_prefill_percent: u32,
    /// Prompt tokens a step may compute beside rows that have one token to go, so that these do not
    /// wait long for their next; `None`: as many as the budget leaves.
    pub max_num_mixed_prefill_tokens: Option<u32>,
    /// Tokens of context to which attention costs as much as everything else about one token. A
    /// prompt token with `p` tokens before it then counts as `1 + p / context_per_token` tokens of the
    /// two limits above; `None`: as one.
    pub context_per_token: Option<u32>,
    /// Logits rows a step may ask for. At least `max_num_seqs` after lowering.
    pub max_num_output_rows: u32,
    /// Steps that may be planned ahead of their commit, plus one arena.
    pub max_num_steps_in_flight: u32,
    /// Draft tokens per row and step. 0 until speculation comes.
    pub max_num_draft_tokens: u32,
    /// Keep finished blocks for reuse by later prompts.
    pub enable_prefix_caching: bool,
    /// Order of service.
    pub scheduling_policy: PolicyKind,
    /// After this long in the queue a request goes ahead of all that arrived later. `None`: the wait
    /// under `priority` has no bound.
    pub max_wait: Option<Nanos>,
    /// Blocks that admission leaves free for running sequences to grow into.
    pub watermark_blocks: u32,
    /// Size of the vocabulary: token ids are below it.
    pub vocab_size: u32,
    /// Requests that may wait.
    pub max_num_queued_requests: u32,
    /// Uncomputed prompt tokens that may wait.
    pub max_num_queued_tokens: u64,
    /// Sequences one request may own (`n`).
    pub max_num_sequences_per_request: u32,
    /// Words of a request's sampling record.
    pub max_sampling_words: u32,
    /// Most failed steps between two tokens of a sequence; one more ends it with `error`.
    pub max_num_step_failures: u32,
    /// Copies to or from another tier that may be under way at once, at most 4,096.
    pub max_num_tickets: u32,
    /// Seed of the hash that finds tree nodes. Never decides equality.
    pub hash_seed: u64,
    /// Records kept of past steps.
    pub num_step_records: u32,
    /// State changes kept of requests, over all of them.
    pub num_timeline_events: u32,
    /// Whether outputs carry block events.
    pub enable_block_events: bool,
    /// Layer groups; exactly one for now.
    pub groups: Vec<LayerGroup>,
}

impl Default for CoreConfig {
    fn default() -> Self {
        Self {
            block_size: 16,
            num_blocks: 1024,
            max_model_len: 4096,
            max_num_seqs: 128,
            max_num_batched_tokens: 2048,
            max_chunk_tokens: None,
            long_prefill_threshold: None,
            max_long_prefill_percent: 100,
            max_num_mixed_prefill_tokens: None,
            context_per_token: None,
            max_num_output_rows: 1024,
            max_num_steps_in_flight: 1,
            max_num_draft_tokens: 0,
            enable_prefix_caching: true,
            scheduling_policy: PolicyKind::Fcfs,
            max_wait: Some(30_000_000_000),
            watermark_blocks: 0,
            vocab_size: u32::MAX >> 1,
            max_num_queued_requests: 4096,
            max_num_queued_tokens: 64 << 20,
            max_num_sequences_per_request: 128,
            max_sampling_words: 4096,
            max_num_step_failures: 3,
            max_num_tickets: 8,
            hash_seed: 0x9e37_79b9_7f4a_7c15,
            num_step_records: 4096,
            num_timeline_events: 65_536,
            enable_block_events: false,
            groups: vec![LayerGroup { layers: 1, window: None }],
        }
    }
}

/// Every bad field of a configuration, not only the first.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("bad configuration: {}", problems.join("; "))]
pub struct ConfigError {
    /// One sentence a field: `name=value: want …`.
    pub problems: Vec<String>,
}

/// What is wrong with a configuration, one sentence a field.
#[derive(Default)]
struct Problems(Vec<String>);

impl Problems {
    fn want(&mut self, ok: bool, field: &str, value: &dyn Display, want: &str) {
        if !ok {
            self.0.push(format!("{field}={value}: want {want}"));
        }
    }
}

impl CoreConfig {
    /// Check every field, then lower the limits that depend on others.
    ///
    /// Returns the configuration in force and one sentence for each limit that was lowered.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] names every bad field.
    pub fn validated(self) -> Result<(Self, Vec<String>), ConfigError> {
        let mut problems = Problems::default();
        self.check_sizes(&mut problems);
        self.check_step_limits(&mut problems);
        self.check_model(&mut problems);
        if problems.0.is_empty() {
            Ok(self.lowered())
        } else {
            Err(ConfigError { problems: problems.0 })
        }
    }

    fn check_sizes(&self, problems: &mut Problems) {
        problems.want(
            self.block_size.is_power_of_two() && self.block_size <= 256,
            "block_size",
            &self.block_size,
            "a power of two up to 256",
        );
        for (name, value) in [
            ("num_blocks", self.num_blocks),
            ("max_model_len", self.max_model_len),
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("max_num_queued_requests", self.max_num_queued_requests),
            ("num_step_records", self.num_step_records),
            ("num_timeline_events", self.num_timeline_events),
        ] {
            problems.want((1..=1 << 30).contains(&value), name, &value, "1 to 2^30");
        }
        problems.want(
            i32::try_from(u64::from(self.num_blocks) * u64::from(self.block_size)).is_ok(),
            "num_blocks",
            &self.num_blocks,
            "num_blocks * block_size below 2^31, so that a slot fits the plan's int32",
        );
        problems.want(
            self.max_num_seqs <= 1 << 20,
            "max_num_seqs",
            &self.max_num_seqs,
            "at most 2^20",
        );
    }

    fn check_step_limits(&self, problems: &mut Problems) {
        if let Some(chunk) = self.max_chunk_tokens {
            problems.want(chunk >= 1, "max_chunk_tokens", &chunk, "at least 1, or none");
        }
        problems.want(
            (1..=100).contains(&self.max_long_prefill_percent),
            "max_long_prefill_percent",
            &self.max_long_prefill_percent,
            "1 to 100",
        );
        if let Some(tokens) = self.max_num_mixed_prefill_tokens {
            problems.want(
                tokens >= 1,
                "max_num_mixed_prefill_tokens",
                &tokens,
                "at least 1, or none",
            );
        }
        if let Some(context) = self.context_per_token {
            problems.want(
                (1..=1 << 24).contains(&context),
                "context_per_token",
                &context,
                "1 to 2^24, or none",
            );
        }
        problems.want(
            self.max_num_output_rows >= 1,
            "max_num_output_rows",
            &self.max_num_output_rows,
            "at least 1",
        );
        problems.want(
            (1..=8).contains(&self.max_num_steps_in_flight),
            "max_num_steps_in_flight",
            &self.max_num_steps_in_flight,
            "1 to 8",
        );
        problems.want(
            self.max_num_draft_tokens == 0,
            "max_num_draft_tokens",
            &self.max_num_draft_tokens,
            "0 (speculation is not built yet)",
        );
        problems.want(
            self.max_num_tickets <= 4096,
            "max_num_tickets",
            &self.max_num_tickets,
            "at most 4096",
        );
        problems.want(
            self.watermark_blocks < self.num_blocks.max(1),
            "watermark_blocks",
            &self.watermark_blocks,
            "less than num_blocks",
        );
    }

    fn check_model(&self, problems: &mut Problems) {
        problems.want(
            i32::try_from(self.vocab_size).is_ok_and(|size| size >= 1),
            "vocab_size",
            &self.vocab_size,
            "1 to 2^31 - 1",
        );
        problems.want(
            (1..=4096).contains(&self.max_num_sequences_per_request),
            "max_num_sequences_per_request",
            &self.max_num_sequences_per_request,
            "1 to 4096",
        );
        problems.want(
            self.groups.len() == 1,
            "groups",
            &self.groups.len(),
            "exactly one layer group (windowed groups are not built yet)",
        );
        for group in &self.groups {
            problems.want(group.layers >= 1, "groups.layers", &group.layers, "at least 1");
            if let Some(window) = group.window {
                problems.want(window >= 1, "groups.window", &window, "at least 1, or none");
            }
        }
    }

    /// Lower what other limits bound, with one sentence each.
    fn lowered(mut self) -> (Self, Vec<String>) {
        let mut warnings = Vec::new();
        let pool_tokens = self.num_blocks * self.block_size;
        if self.max_model_len > pool_tokens {
            warnings.push(format!(
                "max_model_len lowered from {} to {pool_tokens}, which is what {} blocks of {} \
                 tokens hold",
                self.max_model_len, self.num_blocks, self.block_size
            ));
            self.max_model_len = pool_tokens;
        }
        if self.max_num_seqs > self.max_num_batched_tokens {
            warnings.push(format!(
                "max_num_seqs lowered from {} to {}, so that every running row fits the token \
                 budget",
                self.max_num_seqs, self.max_num_batched_tokens
            ));
            self.max_num_seqs = self.max_num_batched_tokens;
        }
        self.max_num_output_rows = self.max_num_output_rows.max(self.max_num_seqs);
        (self, warnings)
    }

    /// Blocks that the longest sequence takes.
    pub fn max_blocks_per_seq(&self) -> u32 {
        self.max_model_len.div_ceil(self.block_size)
    }
}
