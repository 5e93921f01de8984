//! What a step hands back: flat arrays, one entry per sequence with something to say.

use fastserve_base::{FinishReason, SeqId, StepId, Token};

/// Sizes of a plan. All 0: there is nothing to run and no step was created. A step without rows has
/// copies to another tier only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PlanSizes {
    /// The step to commit, if any row was planned.
    pub step: StepId,
    /// Rows.
    pub num_rows: u32,
    /// Tokens to compute.
    pub num_tokens: u32,
    /// Output rows: results to give to `commit`.
    pub num_outputs: u32,
    /// Copies, of all three kinds.
    pub num_copies: u32,
}

impl PlanSizes {
    /// Whether there is a step to run and commit.
    pub fn is_step(&self) -> bool {
        self.num_rows > 0 || self.num_copies > 0
    }
}

/// What a runner computed for a step: one entry per output row of its plan.
#[derive(Debug, Clone, Copy)]
pub struct Results<'a> {
    /// Tokens sampled in each output row: 1 for a sample, 0 for a score; negative ends the sequence
    /// with `error` (NaN logits, a dead grammar).
    pub counts: &'a [i32],
    /// The sampled tokens, one place per output row.
    pub tokens: &'a [i32],
}

/// Flat arrays that `take_outputs` fills; they keep their memory from step to step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepOutputs {
    /// Request of each entry.
    pub request_ids: Vec<u64>,
    /// Sequence of the request.
    pub seq_indices: Vec<u32>,
    /// Output row of the step whose result it is; −1: none (an abort, say).
    pub source_rows: Vec<i32>,
    /// CSR starts of `tokens`, one more than there are entries.
    pub token_indptr: Vec<u32>,
    /// New tokens.
    pub tokens: Vec<i32>,
    /// [`FinishReason`] as a code, 0 while the sequence goes on.
    pub finish_reasons: Vec<u8>,
    /// The stop token that ended the sequence, −1 for none.
    pub stop_tokens: Vec<i32>,
    /// Prompt tokens that came from the cache when the sequence was first admitted.
    pub num_cached_tokens: Vec<u32>,
    /// Output tokens of the sequence so far.
    pub num_output_tokens: Vec<u32>,
}

impl StepOutputs {
    /// With room for `entries` before anything grows.
    pub fn with_capacity(entries: usize) -> Self {
        let mut outputs = Self {
            request_ids: Vec::with_capacity(entries),
            seq_indices: Vec::with_capacity(entries),
            source_rows: Vec::with_capacity(entries),
            token_indptr: Vec::with_capacity(entries + 1),
            tokens: Vec::with_capacity(entries),
            finish_reasons: Vec::with_capacity(entries),
            stop_tokens: Vec::with_capacity(entries),
            num_cached_tokens: Vec::with_capacity(entries),
            num_output_tokens: Vec::with_capacity(entries),
        };
        outputs.clear();
        outputs
    }

    /// Entries.
    pub fn len(&self) -> usize {
        self.request_ids.len()
    }

    /// Whether nobody has anything to say.
    pub fn is_empty(&self) -> bool {
        self.request_ids.is_empty()
    }

    /// Forget everything, keep the memory.
    pub fn clear(&mut self) {
        self.request_ids.clear();
        self.seq_indices.clear();
        self.source_rows.clear();
        self.token_indptr.clear();
        self.token_indptr.push(0);
        self.tokens.clear();
        self.finish_reasons.clear();
        self.stop_tokens.clear();
        self.num_cached_tokens.clear();
        self.num_output_tokens.clear();
    }

    #[inline]
    pub(crate) fn push(&mut self, entry: &Entry) {
        self.request_ids.push(entry.seq.request.0);
        self.seq_indices.push(entry.seq.index);
        self.source_rows.push(entry.source_row);
        if let Some(token) = entry.token {
            self.tokens.push(token as i32);
        }
        self.token_indptr.push(self.tokens.len() as u32);
        self.finish_reasons.push(entry.finish.map_or(0, |reason| reason as u8));
        self.stop_tokens.push(entry.stop_token.map_or(-1, |token| token as i32));
        self.num_cached_tokens.push(entry.num_cached_tokens);
        self.num_output_tokens.push(entry.num_output_tokens);
    }
}

/// One entry of [`StepOutputs`], before it is spread over the arrays.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    pub(crate) seq: SeqId,
    pub(crate) source_row: i32,
    pub(crate) token: Option<Token>,
    pub(crate) finish: Option<FinishReason>,
    pub(crate) stop_token: Option<Token>,
    pub(crate) num_cached_tokens: u32,
    pub(crate) num_output_tokens: u32,
}

/// Where the core stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Lifecycle {
    /// Plans and takes requests.
    #[default]
    Running,
    /// Plans nothing; K and V are kept; requests queue.
    Paused,
    /// Takes no new request; what was accepted goes on to its end.
    Draining,
    /// Everything has ended; nothing can be planned.
    Closed,
}

impl Lifecycle {
    /// The word for messages and stats.
    pub fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Draining => "draining",
            Self::Closed => "closed",
        }
    }
}

macro_rules! stats {
    ($($name:ident: $doc:literal,)*) => {
        /// Counters since construction and gauges of now.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct Stats {
            $(#[doc = $doc] pub $name: u64,)*
        }

        impl Stats {
            /// Every field by name, in order.
            pub fn fields(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }
        }
    };
}

stats! {
    num_running: "Sequences with a row slot.",
    num_waiting: "Sequences in the queue, the inbox included.",
    num_queued_tokens: "Prompt tokens of requests that were never admitted.",
    num_steps_in_flight: "Steps planned and not committed.",
    num_steps: "Steps committed.",
    num_failed_steps: "Steps that failed.",
    num_scheduled_tokens: "Tokens planned.",
    num_prompt_tokens: "Prompt tokens computed, recomputation not counted.",
    num_generation_tokens: "Tokens generated.",
    num_preemptions: "Running sequences put back to wait for want of blocks.",
    num_recomputed_tokens: "Tokens computed again after a preemption or a failed step.",
    num_rollbacks: "Sequences rolled back by failed steps.",
    prefix_cache_queries: "Tokens looked up in the prefix tree at first admission.",
    prefix_cache_hits: "Of them, tokens found.",
    num_leader_waits: "Times a sequence waited a step for another to compute its prefix.",
    num_forks: "Sequences that took their prompt's blocks from a sibling.",
    num_copied_blocks: "Blocks copied on write.",
    num_offloaded_blocks: "Blocks copied to another tier.",
    num_fetched_blocks: "Blocks copied from another tier.",
    num_failed_transfers: "Copies to or from another tier that failed.",
    num_evicted_blocks: "Cached blocks evicted.",
    num_finished_stop: "Sequences that ended with `stop`.",
    num_finished_length: "Sequences that ended with `length`.",
    num_finished_abort: "Sequences that ended with `abort`.",
    num_finished_error: "Sequences that ended with `error`.",
    free: "Blocks free.",
    held: "Blocks held.",
    cached: "Blocks cached.",
    capacity: "Blocks in the pool.",
}

/// What happened to a sequence, for `timeline(request)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// Entered the queue behind `ahead` others.
    Queued {
        /// Sequences ahead of it.
        ahead: u32,
    },
    /// Got a row slot, with `cached` tokens from the prefix tree.
    Admitted {
        /// Tokens matched.
        cached: u32,
        /// Its row slot.
        slot: u32,
    },
    /// Took its prompt's blocks from a sibling.
    Forked {
        /// Its row slot.
        slot: u32,
    },
    /// Began to wait for another sequence to compute its next block.
    LeaderWait {
        /// Row slot of the sequence waited for.
        leader: u32,
    },
    /// Gave up its blocks to the sequence in row slot `by`.
    Preempted {
        /// Who needed them.
        by: u32,
        /// Tokens it had computed.
        computed: u32,
    },
    /// A step it was planned in failed.
    RolledBack {
        /// Failures so far.
        failures: u32,
    },
    /// Generated its first token.
    FirstToken,
    /// Ended.
    Finished {
        /// Why.
        reason: FinishReason,
    },
}

/// One state change of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimelineEvent {
    /// Whose.
    pub seq: SeqId,
    /// Last step planned when it happened.
    pub step: StepId,
    /// When, on the caller's clock, in nanoseconds.
    pub at: u64,
    /// What.
    pub kind: EventKind,
}

/// One planned step, for joining with a timeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepRecord {
    /// Which.
    pub step: StepId,
    /// When it was planned.
    pub planned_at: u64,
    /// When it was committed; 0 while in flight.
    pub committed_at: u64,
    /// Rows.
    pub num_rows: u32,
    /// Rows with one token to go.
    pub num_decode_rows: u32,
    /// Tokens.
    pub num_tokens: u32,
    /// Sequences preempted while it was planned.
    pub num_preempted: u32,
    /// Whether it failed.
    pub failed: bool,
}
