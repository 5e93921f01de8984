//! What happened, one line an event: `step free held cached event`.
//!
//! ```text
//! step  free  held cached  event
//!    1     6     2      0  admit    r0.0 slot=0 match=0 take=7
//!    2     6     2      0  extend   r0.0 at=7 take=1
//! ```
//!
//! Events are kept as data and written out only when somebody reads them: a failing seed's last lines,
//! a snapshot in a test, `--trace`.

use std::fmt;

use fastserve_base::{FinishReason, SeqId};

use crate::transfers::Direction;

/// Free, held and cached blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Blocks {
    /// Free.
    pub free: u64,
    /// Held.
    pub held: u64,
    /// Cached.
    pub cached: u64,
}

/// One thing that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A request was accepted.
    Submit {
        /// Its id.
        request: u64,
        /// Tokens of the prompt.
        prompt: u32,
        /// Most tokens to generate.
        max_tokens: u32,
        /// Sequences.
        n: u32,
    },
    /// A request was refused.
    Refuse {
        /// Its id.
        request: u64,
        /// The error's code.
        code: &'static str,
    },
    /// A sequence got a row slot, and its first tokens in it.
    Admit {
        /// The sequence.
        seq: SeqId,
        /// Its row slot.
        slot: u32,
        /// Tokens that came from the cache.
        matched: u32,
        /// Tokens scheduled.
        take: u32,
    },
    /// A running sequence was given tokens.
    Extend {
        /// The sequence.
        seq: SeqId,
        /// Position of the first.
        at: u32,
        /// Tokens scheduled.
        take: u32,
    },
    /// A running sequence went ahead by prefix match.
    Rematch {
        /// The sequence.
        seq: SeqId,
        /// From here.
        from: u32,
        /// To there.
        to: u32,
    },
    /// A sequence took its prompt's blocks from a sibling.
    Fork {
        /// The sequence.
        seq: SeqId,
        /// Its row slot.
        slot: u32,
    },
    /// A block was copied.
    Copy {
        /// From.
        source: u32,
        /// To.
        destination: u32,
    },
    /// A sequence was put back to wait.
    Preempt {
        /// The sequence.
        seq: SeqId,
        /// Row slot of the sequence that wanted its blocks.
        by: u32,
    },
    /// A step is whole.
    Commit {
        /// Which.
        step: u64,
    },
    /// A step failed, with all that were in flight.
    Fail {
        /// The oldest.
        step: u64,
        /// How many.
        steps: u32,
    },
    /// A sequence ended.
    Finish {
        /// The sequence.
        seq: SeqId,
        /// Why.
        reason: FinishReason,
        /// Output tokens.
        outputs: u32,
    },
    /// A copy to or from another tier was accepted.
    Transfer {
        /// Its ticket.
        ticket: u64,
        /// Which way.
        direction: Direction,
        /// Blocks.
        blocks: u32,
    },
    /// It was completed.
    Complete {
        /// Its ticket.
        ticket: u64,
        /// Whether the data is whole.
        ok: bool,
    },
    /// An abort was asked for.
    Abort {
        /// Of which request.
        request: u64,
    },
    /// The text side ended a sequence.
    Cut {
        /// Which.
        seq: SeqId,
        /// Tokens kept.
        kept: u32,
    },
    /// Anything else that is done to the core as a whole.
    Call {
        /// What.
        what: &'static str,
    },
}

fn name(seq: SeqId) -> String {
    format!("r{}.{}", seq.request.0, seq.index)
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Submit { request, prompt, max_tokens, n } => {
                write!(f, "submit   r{request} prompt={prompt} max_tokens={max_tokens} n={n}")
            }
            Self::Refuse { request, code } => write!(f, "refuse   r{request} {code}"),
            Self::Admit { seq, slot, matched, take } => {
                write!(f, "admit    {} slot={slot} match={matched} take={take}", name(seq))
            }
            Self::Extend { seq, at, take } => {
                write!(f, "extend   {} at={at} take={take}", name(seq))
            }
            Self::Rematch { seq, from, to } => {
                write!(f, "rematch  {} from={from} to={to}", name(seq))
            }
            Self::Fork { seq, slot } => write!(f, "fork     {} slot={slot}", name(seq)),
            Self::Copy { source, destination } => write!(f, "copy     b{source} to b{destination}"),
            Self::Preempt { seq, by } => write!(f, "preempt  {} by slot {by}", name(seq)),
            Self::Commit { step } => write!(f, "commit   step {step}"),
            Self::Fail { step, steps } => write!(f, "fail     step {step} and {} more", steps - 1),
            Self::Finish { seq, reason, outputs } => {
                write!(f, "finish   {} {} outputs={outputs}", name(seq), reason.name())
            }
            Self::Transfer { ticket, direction, blocks } => {
                let what = if direction == Direction::Out { "offload" } else { "fetch" };
                write!(f, "{what:<8} t{ticket} blocks={blocks}")
            }
            Self::Complete { ticket, ok } => {
                write!(f, "complete t{ticket} {}", if ok { "ok" } else { "failed" })
            }
            Self::Abort { request } => write!(f, "abort    r{request}"),
            Self::Cut { seq, kept } => write!(f, "cut      {} kept={kept}", name(seq)),
            Self::Call { what } => write!(f, "call     {what}"),
        }
    }
}

/// One line of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// The last step planned.
    pub step: u64,
    /// Blocks after the call in which it happened.
    pub blocks: Blocks,
    /// What happened.
    pub event: Event,
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Blocks { free, held, cached } = self.blocks;
        write!(f, "{:>4} {free:>5} {held:>5} {cached:>6}  {}", self.step, self.event)
    }
}

/// Column heads of a trace.
pub const HEAD: &str = "step  free  held cached  event";

/// Every event of a run, in order.
#[derive(Debug, Clone, Default)]
pub struct Trace {
    lines: Vec<Line>,
    num_settled: usize,
}

impl Trace {
    /// Add an event; its block counts come with [`settle`](Self::settle).
    pub fn push(&mut self, step: u64, event: Event) {
        self.lines.push(Line { step, blocks: Blocks::default(), event });
    }

    /// Give the events added since the last call the block counts that they led to.
    pub fn settle(&mut self, blocks: Blocks) {
        for line in &mut self.lines[self.num_settled..] {
            line.blocks = blocks;
        }
        self.num_settled = self.lines.len();
    }

    /// Every line.
    pub fn lines(&self) -> &[Line] {
        &self.lines
    }

    /// The last `most` lines under their heads, as text.
    pub fn tail(&self, most: usize) -> String {
        let from = self.lines.len().saturating_sub(most);
        let mut text = String::from(HEAD);
        for line in &self.lines[from..] {
            text.push('\n');
            text.push_str(&line.to_string());
        }
        text
    }

    /// Lines whose event `wanted` picks, under their heads, as text.
    pub fn only(&self, wanted: impl Fn(&Event) -> bool) -> String {
        let mut text = String::from(HEAD);
        for line in self.lines.iter().filter(|line| wanted(&line.event)) {
            text.push('\n');
            text.push_str(&line.to_string());
        }
        text
    }
}
