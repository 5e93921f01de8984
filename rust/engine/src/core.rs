//! `Core`: the one owner of blocks, rows and queues.
//!
//! ```text
//!   Inbox ──commands──▶ intake ─▶ waiting ─▶ admit ─▶ running ──▶ plan ─▶ arena
//!                                    ▲                   │
//!                                    └── preempt, fail ──┤◀── commit ◀─ results
//!                                                        ▼
//!                                                   StepOutputs
//! ```
//!
//! A step is planned in one pass over the running sequences in the policy's order and one over the
//! waiting ones ([`schedule`](crate::schedule), [`admit`](crate::admit)), written in plan order
//! ([`emit`](crate::emit)), and committed ([`commit`](crate::commit)). Up to `max_num_steps_in_flight`
//! steps may be planned ahead; each is a [`Flight`].
//!
//! # Invariants
//!
//! Checked by [`Core::check`].
//!
//! 1. Free + held + cached = capacity.
//! 2. A row slot is free, running, or leaving (its sequence has ended or was preempted, and a step in
//!    flight names it). Only a free slot is assigned.
//! 3. A running row's table covers exactly its computed tokens.
//! 4. A waiting sequence holds no block.
//! 5. Every live sequence is waiting, running or settling, and its request counts it.
//!
//! Architecture invariant: no clock, no thread, no I/O. Time is an argument; steps come from outside.

use std::collections::VecDeque;
use std::sync::Arc;

use fastserve_base::fault::{Fault, planted};
use fastserve_base::{
    ConfigError, CoreConfig, Nanos, RequestId, RowSlot, SeqId, StepError, StepId, Ticket,
};
use fastserve_kv::{BlockEvent, BlockInfo, KvManager};
use fastserve_sched::policy::policy;
use fastserve_sched::{
    PlanLayout, PlanOrder, Policy, RequestState, Row, Sequence, ServiceOrder, Slab, WaitQueue,
};
use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;

use crate::inbox::{Command, Inbox, Retired, Shared};
use crate::outputs::{Entry, EventKind, Lifecycle, Stats, StepOutputs, StepRecord, TimelineEvent};
use crate::tail::Tail;
use crate::transfer::OpenTransfer;

/// A step between `plan` and `commit`.
#[derive(Debug, Default)]
pub(crate) struct Flight {
    pub(crate) step: StepId,
    pub(crate) planned_at: Nanos,
    pub(crate) num_tokens: u32,
    pub(crate) num_decode_rows: u32,
    pub(crate) num_preempted: u32,
    /// Slots of its rows, and of the forks that its outputs begin.
    pub(crate) slots: Vec<RowSlot>,
    /// Number of rows; the rest of `slots` are forks.
    pub(crate) num_rows: u32,
    /// For each output row, the slot it belongs to, and whether it samples.
    pub(crate) outputs: Vec<FlightOutput>,
}

/// An output row of a step in flight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FlightOutput {
    pub(crate) slot: RowSlot,
    pub(crate) samples: bool,
}

/// What a step touches last, or seldom, of a row slot.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RowName {
    pub(crate) seq: SeqId,
    pub(crate) num_prompt_tokens: u32,
    pub(crate) num_cached_tokens: u32,
    /// Leading table entries that the device knows of.
    pub(crate) num_edited: u32,
    /// Tokens that its sequence holds; those known beyond are in its tail.
    pub(crate) num_stored: u32,
    /// Hash of the block it is computing, 0 for none: others wait for it.
    pub(crate) claim: u64,
}

/// The scheduler and the KV bookkeeping of one engine. See the module header.
pub struct Core {
    pub(crate) config: CoreConfig,
    pub(crate) layout: PlanLayout,
    pub(crate) kv: KvManager,
    pub(crate) policy: Box<dyn Policy>,
    warnings: Vec<String>,
    pub(crate) shared: Arc<Shared>,

    pub(crate) requests: Slab<RequestState>,
    pub(crate) sequences: Slab<Sequence>,
    pub(crate) ids: HashMap<RequestId, u32, FxBuildHasher>,
    pub(crate) waiting: WaitQueue,
    pub(crate) next_order: u64,
    pub(crate) num_queued_requests: usize,
    pub(crate) num_queued_tokens: u64,
    /// Sequences that have ended: what frees memory for those that were preempted.
    pub(crate) num_endings: u64,

    pub(crate) rows: Vec<Row>,
    pub(crate) names: Vec<RowName>,
    pub(crate) tails: Vec<Tail>,
    pub(crate) free_slots: Vec<RowSlot>,
    pub(crate) service: ServiceOrder,
    pub(crate) order: PlanOrder,
    /// Slots whose sequence has left while a step in flight names them.
    pub(crate) leaving: Vec<RowSlot>,
    /// Slots released since the device was last told.
    pub(crate) released: Vec<RowSlot>,
    pub(crate) is_released: Vec<bool>,
    /// Who computes the block with this hash.
    pub(crate) claims: HashMap<u64, RowSlot, FxBuildHasher>,
    /// The slot that last wrote or adopted each block, as a hint for the plan order.
    pub(crate) block_user: Vec<RowSlot>,

    /// Copies to and from other tiers that were not completed.
    pub(crate) transfers: Vec<OpenTransfer>,
    /// Their block tables that are free, behind those of the row slots.
    pub(crate) transfer_slots: Vec<RowSlot>,
    pub(crate) next_ticket: Ticket,

    pub(crate) next_step: StepId,
    pub(crate) flights: VecDeque<Flight>,
    pub(crate) idle_flights: Vec<Flight>,
    pub(crate) lifecycle: Lifecycle,
    pub(crate) outputs: StepOutputs,
    pub(crate) stats: Stats,
    pub(crate) events: Vec<TimelineEvent>,
    pub(crate) step_records: Vec<StepRecord>,
    pub(crate) ended: Vec<RequestId>,
    pub(crate) retired: Vec<Retired>,
    pub(crate) commands: Vec<Command>,
    pub(crate) scratch: Scratch,
    pub(crate) last_now: Nanos,
    pub(crate) last_commit_at: Nanos,
}

/// Vectors that a plan fills and empties.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    pub(crate) deferred: Vec<(fastserve_sched::OrderKey, u32)>,
    /// Forks begun in this step: the sibling whose prompt it is, the fork.
    pub(crate) forks: Vec<(RowSlot, RowSlot)>,
    pub(crate) copies: Vec<(u32, u32)>,
    /// Rows that fill a block in this step.
    pub(crate) filling: Vec<RowSlot>,
    /// Long prompts that had a turn: they may take more in the end.
    pub(crate) long: Vec<RowSlot>,
    /// Slots that join the running rows after the pass, and whom to stand beside.
    pub(crate) joining: Vec<(RowSlot, Option<RowSlot>)>,
    /// Slots of sequences preempted in the pass over the running rows.
    pub(crate) freed: Vec<RowSlot>,
    /// Blocks matched in this step: table edits beyond those of its tokens.
    pub(crate) matched: usize,
}

impl Core {
    /// A core with the policy that `config` names.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] names every bad field.
    pub fn new(config: CoreConfig) -> Result<Self, ConfigError> {
        let policy = policy(config.scheduling_policy);
        Self::with_policy(config, policy)
    }

    /// A core with an embedder's own policy.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] names every bad field.
    pub fn with_policy(config: CoreConfig, policy: Box<dyn Policy>) -> Result<Self, ConfigError> {
        let asked_model_len = config.max_model_len;
        let (config, warnings) = config.validated()?;
        let slots = config.max_num_seqs as usize;
        let live = slots + config.max_num_queued_requests as usize;
        let flights = config.max_num_steps_in_flight as usize;
        let shared = Arc::new(Shared::new(&config, config.max_model_len < asked_model_len));
        let reserved_map = || HashMap::with_capacity_and_hasher(2 * live, FxBuildHasher);
        let mut core = Self {
            layout: PlanLayout::new(&config),
            kv: KvManager::new(&with_transfer_slots(&config)),
            policy,
            warnings,
            shared,
            requests: Slab::with_capacity(live),
            sequences: Slab::with_capacity(live),
            ids: reserved_map(),
            waiting: WaitQueue::new(live, config.max_wait),
            next_order: 0,
            num_queued_requests: 0,
            num_queued_tokens: 0,
            num_endings: 0,
            rows: vec![Row::EMPTY; slots],
            names: vec![RowName::default(); slots],
            tails: vec![Tail::default(); slots],
            free_slots: (0..slots as u32).rev().map(RowSlot).collect(),
            service: ServiceOrder::with_capacity(slots),
            order: PlanOrder::with_capacity(slots),
            leaving: Vec::with_capacity(slots),
            released: Vec::with_capacity(slots),
            is_released: vec![false; slots],
            claims: HashMap::with_capacity_and_hasher(2 * slots, FxBuildHasher),
            block_user: vec![RowSlot(u32::MAX); config.num_blocks as usize],
            transfers: Vec::with_capacity(config.max_num_tickets as usize),
            transfer_slots: (slots as u32..slots as u32 + config.max_num_tickets)
                .rev()
                .map(RowSlot)
                .collect(),
            next_ticket: Ticket(1),
            next_step: StepId(1),
            flights: VecDeque::with_capacity(flights),
            idle_flights: (0..flights).map(|_| Flight::sized(&config)).collect(),
            lifecycle: Lifecycle::Running,
            outputs: StepOutputs::with_capacity(2 * live),
            stats: Stats::default(),
            events: Vec::with_capacity(8 * slots + 1024),
            step_records: Vec::with_capacity(64),
            ended: Vec::with_capacity(live),
            retired: Vec::with_capacity(live),
            commands: Vec::with_capacity(live + config.max_num_queued_requests as usize),
            scratch: Scratch {
                deferred: Vec::with_capacity(crate::admit::MAX_DEFERRED),
                forks: Vec::with_capacity(slots),
                copies: Vec::with_capacity(slots),
                filling: Vec::with_capacity(slots),
                // One that preempts itself may leave its slot to another in the same pass.
                long: Vec::with_capacity(slots + 1),
                joining: Vec::with_capacity(slots),
                freed: Vec::with_capacity(slots),
                matched: 0,
            },
            last_now: 0,
            last_commit_at: 0,
            config,
        };
        core.publish(); // Other threads read the pool's size before the first plan.
        Ok(core)
    }

    /// The configuration in force.
    pub fn config(&self) -> &CoreConfig {
        &self.config
    }

    /// One sentence for each limit that construction lowered.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Offsets of a plan.
    pub fn layout(&self) -> &PlanLayout {
        &self.layout
    }

    /// Name of the policy.
    pub fn policy_name(&self) -> &'static str {
        self.policy.name()
    }

    /// A door for other threads.
    pub fn inbox(&self) -> Inbox {
        Inbox::new(Arc::clone(&self.shared))
    }

    /// Block tables, `[max_num_seqs, max_blocks_per_seq]`, at an address that never changes. A CPU
    /// reads them in place between `plan` and the next `plan` or `commit`.
    pub fn block_tables(&self) -> &[i32] {
        let rows = self.config.max_num_seqs as usize;
        &self.kv.block_tables()[..rows * self.config.max_blocks_per_seq() as usize]
    }

    /// Where the core stands.
    pub fn state(&self) -> Lifecycle {
        self.lifecycle
    }

    /// Plan nothing until [`resume`](Self::resume); steps in flight may be committed, K and V stay.
    pub fn pause(&mut self) {
        if self.lifecycle == Lifecycle::Running {
            self.set_lifecycle(Lifecycle::Paused);
        }
    }

    /// Plan again, and take requests again.
    pub fn resume(&mut self) {
        if matches!(self.lifecycle, Lifecycle::Paused | Lifecycle::Draining) {
            self.set_lifecycle(Lifecycle::Running);
        }
    }

    /// Refuse new requests; what was accepted goes on to its end.
    pub fn drain(&mut self) {
        if self.lifecycle != Lifecycle::Closed {
            self.set_lifecycle(Lifecycle::Draining);
        }
    }

    /// End every request with `abort` and plan nothing ever again. Steps in flight may still be
    /// committed; their results count for nothing.
    pub fn close(&mut self) {
        if self.lifecycle == Lifecycle::Closed {
            return;
        }
        self.set_lifecycle(Lifecycle::Closed);
        self.intake(self.last_now);
        let ids: Vec<RequestId> = self.requests.iter().map(|(_, state)| state.request.id).collect();
        for id in ids {
            self.abort_now(id);
        }
        self.settle_ended();
        self.close_transfers();
        self.publish();
    }

    fn set_lifecycle(&mut self, lifecycle: Lifecycle) {
        self.lifecycle = lifecycle;
        self.shared.state().lifecycle = lifecycle;
        self.shared.wake();
    }

    /// Forget every cached prefix (new weights, say), with requests running: what was shared before
    /// can never be matched again.
    pub fn reset_prefix_cache(&mut self) {
        if planted(Fault::EpochIgnored) {
            return;
        }
        self.kv.reset();
        self.claims.clear();
        for name in &mut self.names {
            name.claim = 0;
        }
        self.publish();
    }

    /// Whether anything waits, runs, is in flight, or lies in the inbox or among the outputs.
    pub fn has_work(&self) -> bool {
        !self.requests.is_empty()
            || !self.flights.is_empty()
            || !self.outputs.is_empty()
            || self.has_unlisted_transfers()
            || !self.shared.state().commands.is_empty()
    }

    /// Exchange the outputs gathered since the last call for `into`, which is cleared.
    pub fn take_outputs(&mut self, into: &mut StepOutputs) {
        into.clear();
        std::mem::swap(&mut self.outputs, into);
    }

    /// Counters and gauges.
    pub fn stats(&self) -> Stats {
        let counts = self.kv.counts();
        Stats {
            num_running: self.service.len() as u64,
            num_waiting: self.waiting.len() as u64,
            num_queued_tokens: self.num_queued_tokens,
            num_steps_in_flight: self.flights.len() as u64,
            num_evicted_blocks: self.kv.num_evicted_blocks(),
            free: counts.free as u64,
            held: counts.held as u64,
            cached: counts.cached as u64,
            capacity: counts.capacity as u64,
            ..self.stats
        }
    }

    /// What happened to a request, as far as the ring reaches, oldest first.
    pub fn timeline(&self, id: RequestId) -> Vec<TimelineEvent> {
        self.shared.timeline_of(id)
    }

    /// Every block that a prefix can be matched in.
    pub fn snapshot(&self) -> Vec<BlockInfo> {
        self.kv.snapshot()
    }

    /// Block events since the last call, if the configuration asks for them.
    pub fn take_block_events(&mut self, into: &mut Vec<BlockEvent>) {
        self.kv.take_events(into);
    }

    pub(crate) fn note(&mut self, seq: SeqId, kind: EventKind) {
        let step = StepId(self.next_step.0 - 1);
        self.events.push(TimelineEvent { seq, step, at: self.last_now, kind });
    }

    pub(crate) fn emit_entry(&mut self, entry: &Entry) {
        self.outputs.push(entry);
    }

    /// Let the other threads see how things stand.
    pub(crate) fn publish(&mut self) {
        let stats = self.stats();
        let mut shared = self.shared.state();
        shared.stats = stats;
        shared.num_queued_requests = self.num_queued_requests;
        for id in self.ended.drain(..) {
            shared.ids.remove(&id);
        }
        let room = shared.retired.capacity() - shared.retired.len();
        let kept = self.retired.len().min(room);
        shared.retired.extend(self.retired.drain(..kept));
        drop(shared);
        self.retired.clear();
        self.shared.absorb(&mut self.events, &mut self.step_records);
    }

    /// How many more steps may be planned, as an error if none.
    pub(crate) fn check_can_plan(&self, words: usize) -> Result<(), StepError> {
        if self.lifecycle == Lifecycle::Closed {
            return Err(StepError::Closed);
        }
        let needed = self.layout.words;
        if words < needed {
            return Err(StepError::ArenaTooSmall { words, needed });
        }
        let (in_flight, limit) = (self.flights.len(), self.config.max_num_steps_in_flight as usize);
        if in_flight >= limit {
            return Err(StepError::TooManyInFlight { in_flight, limit });
        }
        Ok(())
    }
}

impl Flight {
    fn sized(config: &CoreConfig) -> Self {
        Self {
            slots: Vec::with_capacity(config.max_num_seqs as usize),
            outputs: Vec::with_capacity(config.max_num_output_rows as usize),
            ..Self::default()
        }
    }

    pub(crate) fn clear(&mut self) {
        self.slots.clear();
        self.outputs.clear();
        (self.num_tokens, self.num_decode_rows, self.num_preempted, self.num_rows) = (0, 0, 0, 0);
    }
}

/// The KV manager keeps a table for each row slot, and behind them one for each transfer.
fn with_transfer_slots(config: &CoreConfig) -> CoreConfig {
    CoreConfig { max_num_seqs: config.max_num_seqs + config.max_num_tickets, ..config.clone() }
}

#[cfg(test)]
mod tests;
