//! What the simulator knows of every request and sequence: from requests, plans and outputs alone.
//!
//! Nothing here is read from the core's state. A sequence's tokens come from its [`Stream`], its place
//! from slot events, its progress from the rows of plans and the entries of step outputs.

use std::collections::BTreeMap;

use fastserve_base::{FinishReason, Nanos, Request, SeqId};

use crate::model::Stream;

/// Where a sequence stands, as far as the outside can tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// A fork that has not come into being: its request's first sequence has not sampled yet.
    Unborn,
    /// In the inbox or the queue.
    Waiting,
    /// In a row slot.
    Running(u32),
    /// Preempted or rolled back; its slot has not been released yet.
    Leaving(u32),
    /// Has ended.
    Ended(FinishReason),
}

/// A place in the order of service, as the documentation of policies defines it: aged sequences first,
/// by arrival; the others by rank, then arrival.
pub type OrderKey = (u8, i64, u64, u32);

/// One sequence.
#[derive(Debug, Clone)]
pub struct Seq {
    /// Its name.
    pub id: SeqId,
    /// Its request, by number.
    pub request: usize,
    /// What must come out.
    pub stream: Stream,
    /// Where it stands.
    pub place: Place,
    /// Tokens known: the prompt and what outputs brought.
    pub num_known: usize,
    /// The same, and the samples of steps in flight.
    pub num_total: usize,
    /// Tokens with K and V once the planned steps have run; `None` where the next row decides.
    pub computed: Option<usize>,
    /// Most tokens it was ever computed to, matched ones included.
    pub high_water: usize,
    /// Prompt positions scored by committed steps.
    pub num_scored: usize,
    /// The same, by planned steps.
    pub num_scored_planned: usize,
    /// Oldest epoch whose K and V it may use.
    pub epoch: u32,
    /// Tokens matched at its first admission.
    pub num_cached: Option<usize>,
    /// The last step with a row of it.
    pub last_row: u64,
    /// The epoch at that step.
    pub last_row_epoch: u32,
    /// Most tokens that it may have matched, beside `num_cached`, without a row that shows it.
    pub unseen: usize,
    /// Went ahead of all that came later.
    pub aged: bool,
    /// Copies of blocks since it was assigned.
    pub num_copies: u32,
    /// Failed steps since the last token.
    pub num_failures: u32,
    /// Endings of others when it was last preempted.
    pub preempted_at: Option<u64>,
    /// Times it got a row slot.
    pub num_admissions: u32,
    /// Times it was preempted.
    pub num_preemptions: u32,
    /// Times it was rolled back.
    pub num_rollbacks: u32,
    /// The text side asked to end it, keeping so many tokens.
    pub cut: Option<(FinishReason, u32)>,
}

impl Seq {
    /// Tokens to compute, samples of steps in flight included.
    pub fn remaining(&self) -> Option<usize> {
        self.computed.map(|computed| self.num_total - computed)
    }

    /// Most tokens that it may have matched since its last row: it stands at a block boundary, and
    /// waits for another sequence to go on. `step` is the last one planned.
    pub fn may_have_matched(&self, step: u64, block_size: usize) -> usize {
        let Some(computed) = self.computed else { return 0 };
        let waits = matches!(self.place, Place::Running(_)) && self.last_row < step;
        if !waits || block_size == 0 || !computed.is_multiple_of(block_size) {
            return 0;
        }
        ((self.num_known - 1) / block_size * block_size).saturating_sub(computed)
    }

    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        matches!(self.place, Place::Ended(_))
    }

    /// Output tokens known.
    pub fn num_outputs(&self) -> usize {
        self.num_known - self.stream.num_prompt
    }

    /// Forget what steps that are gone did.
    pub fn roll_back(&mut self) {
        self.num_total = self.num_known;
        self.num_scored_planned = self.num_scored;
        self.computed = None;
    }
}

/// One accepted request.
#[derive(Debug, Clone)]
pub struct Record {
    /// What was asked.
    pub request: Request,
    /// Its first sequence; the others follow it.
    pub first_seq: usize,
    /// Sequences that have not ended.
    pub num_live: u32,
    /// The policy's rank.
    pub rank: i64,
    /// When a plan first took it over: its place in the order of arrival, and the time.
    pub queued: Option<(u64, Nanos)>,
    /// Whether any of its sequences ever got a slot.
    pub was_admitted: bool,
    /// An abort was accepted and takes effect at the next plan.
    pub abort_pending: bool,
    /// Steps planned when it was accepted.
    pub accepted_at: u64,
}

impl Record {
    /// Its sequences, by number.
    pub fn seqs(&self) -> std::ops::Range<usize> {
        self.first_seq..self.first_seq + self.request.num_sequences as usize
    }
}

/// Everything accepted so far.
#[derive(Debug, Clone, Default)]
pub struct Ledger {
    /// Requests, in the order they were accepted.
    pub requests: Vec<Record>,
    /// Their sequences.
    pub seqs: Vec<Seq>,
    /// Requests that have not ended, by their ids.
    pub live: BTreeMap<u64, usize>,
    /// Sequences that have not ended.
    pub live_seqs: Vec<usize>,
    /// Requests whose last sequence has ended, since somebody looked.
    pub ended: Vec<usize>,
    /// Sequences that ended.
    pub num_endings: u64,
}

impl Ledger {
    /// A request was accepted.
    pub fn accept(
        &mut self,
        request: Request,
        rank: i64,
        vocab_size: u32,
        max_model_len: u32,
        accepted_at: u64,
    ) {
        let number = self.requests.len();
        let first_seq = self.seqs.len();
        for index in 0..request.num_sequences {
            let stream = Stream::new(&request, index, vocab_size, max_model_len);
            self.live_seqs.push(self.seqs.len());
            self.seqs.push(Seq {
                id: SeqId { request: request.id, index },
                request: number,
                place: if index == 0 { Place::Waiting } else { Place::Unborn },
                num_known: stream.num_prompt,
                num_total: stream.num_prompt,
                stream,
                computed: None,
                high_water: 0,
                num_scored: 0,
                num_scored_planned: 0,
                epoch: 0,
                num_cached: None,
                last_row: 0,
                last_row_epoch: 0,
                unseen: 0,
                aged: false,
                num_copies: 0,
                num_failures: 0,
                preempted_at: None,
                num_admissions: 0,
                num_preemptions: 0,
                num_rollbacks: 0,
                cut: None,
            });
        }
        self.live.insert(request.id.0, number);
        self.requests.push(Record {
            num_live: request.num_sequences,
            request,
            first_seq,
            rank,
            queued: None,
            was_admitted: false,
            abort_pending: false,
            accepted_at,
        });
    }

    /// The live sequence of that name.
    pub fn find(&self, request: u64, index: u32) -> Option<usize> {
        let record = &self.requests[*self.live.get(&request)?];
        (index < record.request.num_sequences).then(|| record.first_seq + index as usize)
    }

    /// Most tokens that a prefix match may cover: one is left to compute, and none whose output is
    /// wanted is skipped.
    pub fn match_limit(&self, seq: usize) -> usize {
        let state = &self.seqs[seq];
        let scores = self.record_of(seq).request.score_prompt && state.num_outputs() == 0;
        if scores { 0 } else { state.num_known - 1 }
    }

    /// Whether its prompt has spans.
    pub fn has_spans(&self, seq: usize) -> bool {
        !self.record_of(seq).request.spans.is_empty()
    }

    /// The request of a sequence.
    pub fn record_of(&self, seq: usize) -> &Record {
        &self.requests[self.seqs[seq].request]
    }

    /// Whether a sequence's prompt is scored: its request asks, and it is the first.
    pub fn scores(&self, seq: usize) -> bool {
        self.record_of(seq).request.score_prompt && self.seqs[seq].id.index == 0
    }

    /// A sequence leaves its slot: what it may have matched without a row stays unknown.
    pub fn lose_sight(&mut self, seq: usize, step: u64, block_size: usize) -> usize {
        let lost = self.seqs[seq].may_have_matched(step, block_size);
        self.seqs[seq].unseen += lost;
        lost
    }

    /// A sequence has ended.
    pub fn end(&mut self, seq: usize, reason: FinishReason) {
        self.ended.extend((self.record_of(seq).num_live == 1).then_some(self.seqs[seq].request));
        self.seqs[seq].place = Place::Ended(reason);
        self.num_endings += 1;
        self.live_seqs.retain(|&live| live != seq);
        let number = self.seqs[seq].request;
        self.succeed(number);
        let record = &mut self.requests[number];
        record.num_live -= 1;
        if record.num_live == 0 {
            self.live.remove(&record.request.id.0);
        }
    }

    /// Where nobody is left to fork from, the next unborn sequence comes first.
    fn succeed(&mut self, number: usize) {
        let record = &self.requests[number];
        let mut seqs = record.seqs();
        let is_born =
            |&seq: &usize| !matches!(self.seqs[seq].place, Place::Unborn | Place::Ended(_));
        if record.seqs().any(|seq| is_born(&seq)) {
            return;
        }
        if let Some(next) = seqs.find(|&seq| self.seqs[seq].place == Place::Unborn) {
            self.seqs[next].place = Place::Waiting;
        }
    }

    /// A sequence's place in the order of service.
    pub fn order(&self, seq: usize) -> OrderKey {
        let record = self.record_of(seq);
        let place = record.queued.map_or(u64::MAX, |(order, _)| order);
        let index = self.seqs[seq].id.index;
        if self.seqs[seq].aged { (0, 0, place, index) } else { (1, record.rank, place, index) }
    }

    /// How a sequence is called in messages.
    pub fn name(&self, seq: usize) -> String {
        let id = self.seqs[seq].id;
        format!("r{}.{}", id.request.0, id.index)
    }
}
