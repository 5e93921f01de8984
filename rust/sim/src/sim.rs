//! One core and everything that watches it.
//!
//! Each method does one thing to the core, as an engine would, and then checks all that can be told
//! from outside. The first violation ends the run. [`chaos`](crate::chaos) drives it at random;
//! `tests/named.rs` by hand.

use std::collections::VecDeque;

use fastserve_base::{
    CoreConfig, FinishReason, Namespace, Nanos, OutputKind, Request, RequestError, RequestId, SeqId,
    StepId, Token,
};
use fastserve_engine::{
    Candidate, Core, EventKind, Inbox, Lifecycle, PlanSizes, Policy, Results, Stats, StepOutputs,
    TimelineEvent, Transfer, TransferError,
};
use fastserve_sched::PlanView;

use crate::blocks::BlockWatch;
use crate::check::counters::queued;
use crate::check::order::{check_idle, check_victims};
use crate::check::results::{Entry, ResultsCheck, check_effect, entries};
use crate::check::{Counters, Flight, FlightOutput, PlanCheck};
use crate::device::Device;
use crate::ledger::{Ledger, Place, Seq};
use crate::patience::Patience;
use crate::rng::mix;
use crate::trace::{Blocks, Event, Trace};
use crate::transfers::{self, Direction, Tier};
use crate::violation::{Check, ensure};

/// Which policy orders the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PolicyChoice {
    /// What the configuration names.
    Config,
    /// A random rank for each request.
    Random {
        /// Seed of the ranks.
        seed: u64,
    },
}

impl PolicyChoice {
    fn rank(self, config: &CoreConfig, request: &Request) -> i64 {
        match (self, config.scheduling_policy) {
            (Self::Random { seed }, _) => random_rank(seed, request.id),
            (Self::Config, fastserve_base::PolicyKind::Fcfs) => 0,
            (Self::Config, fastserve_base::PolicyKind::Priority) => i64::from(request.priority),
        }
    }
}

fn random_rank(seed: u64, id: RequestId) -> i64 {
    (mix(seed, id.0) % 8) as i64 - 4
}

struct RandomPolicy {
    seed: u64,
}

impl Policy for RandomPolicy {
    fn name(&self) -> &'static str {
        "random"
    }

    fn rank(&mut self, candidate: &Candidate) -> i64 {
        random_rank(self.seed, candidate.request)
    }
}

/// A core under watch.
pub struct Sim {
    /// The core.
    pub core: Core,
    /// Its door.
    pub inbox: Inbox,
    /// Limits in force.
    pub config: CoreConfig,
    /// What is known of sequences.
    pub ledger: Ledger,
    /// The shadow of the device.
    pub device: Device,
    /// What is counted.
    pub counters: Counters,
    /// Another tier to copy blocks to and from.
    pub tier: Tier,
    /// Steps in flight, oldest first.
    pub flights: VecDeque<Flight>,
    /// The time.
    pub now: Nanos,
    policy: PolicyChoice,
    patience: Patience,
    blocks: BlockWatch,
    epoch: u32,
    last_step: u64,
    num_queued: u64,
    arena: Vec<i32>,
    outputs: StepOutputs,
}

impl Sim {
    /// A core of that configuration, which must be a good one.
    pub fn new(config: CoreConfig, policy: PolicyChoice) -> Self {
        let core = match policy {
            PolicyChoice::Config => Core::new(config),
            PolicyChoice::Random { seed } => {
                Core::with_policy(config, Box::new(RandomPolicy { seed }))
            }
        }
        .expect("a good configuration");
        let config = core.config().clone();
        Self {
            inbox: core.inbox(),
            ledger: Ledger::default(),
            device: Device::new(&config),
            counters: Counters::default(),
            tier: Tier::default(),
            flights: VecDeque::new(),
            now: 0,
            policy,
            patience: Patience::new(&config, policy),
            blocks: BlockWatch::new(&config),
            epoch: 0,
            last_step: 0,
            num_queued: 0,
            arena: vec![0; core.layout().words],
            outputs: StepOutputs::default(),
            core,
            config,
        }
    }

    /// Submit a request. `Ok(None)`: accepted. A refusal must be the one that is due.
    ///
    /// # Errors
    ///
    /// A violation.
    pub fn submit(&mut self, trace: &mut Trace, request: Request) -> Check<Option<RequestError>> {
        let expected = self.refusal(&request);
        let id = request.id.0;
        let answer = self.inbox.submit(request.clone());
        let code = answer.as_ref().err().map(RequestError::code);
        ensure!(
            code == expected,
            "errors",
            "submit of r{id} answers {code:?}, want {expected:?}"
        );
        let Err(error) = answer else {
            let (prompt, n) = (request.prompt.len() as u32, request.num_sequences);
            let max_tokens = request.max_tokens;
            trace.push(self.last_step, Event::Submit { request: id, prompt, max_tokens, n });
            let rank = self.policy.rank(&self.config, &request);
            let (vocab, len) = (self.config.vocab_size, self.config.max_model_len);
            self.ledger.accept(request, rank, vocab, len, self.last_step);
            self.patience.accept(&self.ledger, self.last_step);
            self.settle(trace)?;
            return Ok(None);
        };
        trace.push(self.last_step, Event::Refuse { request: id, code: error.code() });
        self.settle(trace)?;
        Ok(Some(error))
    }

    /// The refusal that is due, if one is.
    fn refusal(&self, request: &Request) -> Option<&'static str> {
        let config = &self.config;
        let prompt = request.prompt.len();
        if prompt == 0 {
            return Some("empty_prompt");
        }
        let in_range = request.max_tokens >= 1
            && (1..=config.max_num_sequences_per_request).contains(&request.num_sequences)
            && request.min_tokens <= request.max_tokens
            && request.sampling.len() <= config.max_sampling_words as usize;
        if !in_range {
            return Some("out_of_range");
        }
        let mut ids = request.prompt.iter().chain(&request.stop_token_ids);
        if ids.any(|&token| token >= config.vocab_size) {
            return Some("token_out_of_range");
        }
        if prompt >= config.max_model_len as usize {
            return Some("context_length_exceeded");
        }
        let mut end = 0;
        for span in &request.spans {
            if span.start < end || span.start >= span.end || span.end as usize > prompt {
                return Some("bad_span");
            }
            end = span.end;
        }
        if matches!(self.core.state(), Lifecycle::Draining | Lifecycle::Closed) {
            return Some("not_accepting");
        }
        if self.ledger.live.contains_key(&request.id.0) {
            return Some("duplicate_request");
        }
        let (requests, tokens) = queued(&self.ledger, false);
        if requests >= config.max_num_queued_requests as usize {
            return Some("queue_full");
        }
        (tokens > 0 && tokens + prompt as u64 > config.max_num_queued_tokens)
            .then_some("queue_tokens_full")
    }

    /// Abort a request, live or not.
    ///
    /// # Errors
    ///
    /// A violation.
    pub fn abort(&mut self, trace: &mut Trace, request: u64) -> Check {
        let live = self.ledger.live.get(&request).copied();
        let answer = self.inbox.abort(RequestId(request));
        ensure!(
            answer == live.is_some(),
            "errors",
            "abort of r{request} answers {answer}, live is {}",
            live.is_some()
        );
        if let Some(number) = live {
            self.ledger.requests[number].abort_pending = true;
        }
        trace.push(self.last_step, Event::Abort { request });
        self.settle(trace)
    }

    /// End a sequence as the text side does on a stop string.
    ///
    /// # Errors
    ///
    /// A violation.
    pub fn cut(&mut self, trace: &mut Trace, id: SeqId, kept: u32) -> Check {
        let live = self.ledger.live.contains_key(&id.request.0);
        let answer = self.inbox.finish(id, FinishReason::Stop, kept);
        ensure!(answer == live, "errors", "finish of {id:?} answers {answer}, live is {live}");
        if let Some(seq) = self.ledger.find(id.request.0, id.index) {
            let abort = self.ledger.record_of(seq).abort_pending;
            let state = &mut self.ledger.seqs[seq];
            if !state.has_ended() && !abort && state.cut.is_none() {
                state.cut = Some((FinishReason::Stop, kept));
            }
        }
        trace.push(self.last_step, Event::Cut { seq: id, kept });
        self.settle(trace)
    }

    /// Plan a step. False: there was nothing to run.
    ///
    /// # Errors
    ///
    /// A violation.
    pub fn plan(&mut self, trace: &mut Trace) -> Check<bool> {
        self.take_over();
        let before: Vec<usize> = self.running();
        let sizes = match self.core.plan(self.now, &mut self.arena) {
            Ok(sizes) => sizes,
            Err(error) => {
                ensure!(false, "errors", "plan answers {error}");
                unreachable!()
            }
        };
        self.endings(trace, None)?;
        check_effect(&self.ledger)?;
        self.age();
        let victims = self.victims();
        for &victim in &victims {
            self.ledger.seqs[victim].num_preemptions += 1;
            self.counters.num_preemptions += 1;
            self.put_back(victim);
            let (seq, by) = (self.ledger.seqs[victim].id, self.preempted_by(victim));
            trace.push(self.last_step + 1, Event::Preempt { seq, by });
        }
        let stayed: Vec<usize> = before
            .into_iter()
            .filter(|&seq| matches!(self.ledger.seqs[seq].place, Place::Running(_)))
            .collect();
        check_victims(&mut self.ledger, &stayed, &victims)?;
        if !sizes.is_step() {
            ensure!(sizes == PlanSizes::default(), "plan", "an empty plan with {sizes:?}");
            if self.core.state() != Lifecycle::Paused {
                ensure!(!self.tier.has_unlisted(), "copies", "an empty plan lists no copy");
                if self.tier.open.is_empty() {
                    check_idle(&self.ledger, &self.device, self.flights.len())?;
                }
            }
            self.settle(trace)?;
            return Ok(false);
        }
        ensure!(
            self.core.state() != Lifecycle::Paused,
            "plan",
            "a step was planned while the core is paused"
        );
        self.check_plan(trace, sizes, stayed)?;
        self.settle(trace)?;
        Ok(true)
    }

    /// Who was preempted by the plan just made.
    fn victims(&self) -> Vec<usize> {
        if self.core.stats().num_preemptions == self.counters.num_preemptions {
            return Vec::new();
        }
        let is_preemption = |kind: &EventKind| matches!(kind, EventKind::Preempted { .. });
        self.news(is_preemption, |seq| seq.num_preemptions)
    }

    fn preempted_by(&self, seq: usize) -> u32 {
        let id = self.ledger.seqs[seq].id;
        let by = |event: &TimelineEvent| match event.kind {
            EventKind::Preempted { by, .. } if event.seq == id => Some(by),
            _ => None,
        };
        self.core.timeline(id.request).iter().rev().find_map(by).unwrap_or(u32::MAX)
    }

    /// What the plan takes over from the inbox.
    fn take_over(&mut self) {
        let is_fresh = |&number: &usize| self.ledger.requests[number].queued.is_none();
        let mut fresh: Vec<usize> = self.ledger.live.values().copied().filter(is_fresh).collect();
        fresh.sort_unstable();
        for number in fresh {
            self.ledger.requests[number].queued = Some((self.num_queued, self.now));
            self.num_queued += 1;
        }
    }

    /// Who goes ahead of all that came later, from this plan on.
    fn age(&mut self) {
        if self.core.state() == Lifecycle::Paused {
            return;
        }
        let Some(max_wait) = self.config.max_wait else { return };
        for &seq in &self.ledger.live_seqs {
            let since = self.ledger.record_of(seq).queued.map_or(self.now, |(_, since)| since);
            let state = &mut self.ledger.seqs[seq];
            let waits = matches!(state.place, Place::Waiting | Place::Leaving(_));
            state.aged |= waits && self.now - since >= max_wait;
        }
    }

    fn running(&self) -> Vec<usize> {
        let runs = |&seq: &usize| matches!(self.ledger.seqs[seq].place, Place::Running(_));
        self.ledger.live_seqs.iter().copied().filter(runs).collect()
    }

    fn check_plan(&mut self, trace: &mut Trace, sizes: PlanSizes, stayed: Vec<usize>) -> Check {
        self.device.busy.fill(false);
        let mut check = PlanCheck {
            config: &self.config,
            view: PlanView::new(self.core.layout(), &self.arena),
            sizes,
            block_tables: self.core.block_tables(),
            epoch: self.epoch,
            ledger: &mut self.ledger,
            device: &mut self.device,
            tier: &mut self.tier,
            counters: &mut self.counters,
            trace,
            stayed,
            rows: Vec::new(),
            assigned: Vec::new(),
            edits_under_flight: Vec::new(),
        };
        let flight = check.run(self.last_step)?;
        self.last_step = sizes.step.0;
        self.counters.num_steps_in_flight += 1;
        self.flights.push_back(flight);
        Ok(())
    }

    /// Commit the oldest step in flight with what the model says, but for the output rows that
    /// `is_error` picks.
    ///
    /// # Errors
    ///
    /// A violation.
    pub fn commit(
        &mut self,
        trace: &mut Trace,
        mut is_error: impl FnMut(&FlightOutput) -> bool,
    ) -> Check {
        let Some(flight) = self.flights.pop_front() else { return Ok(()) };
        let failed: Vec<bool> = flight.outputs.iter().map(&mut is_error).collect();
        let (counts, tokens) = results(&flight.outputs, &failed);
        let results = Results { counts: &counts, tokens: &tokens };
        trace.push(self.last_step, Event::Commit { step: flight.step });
        if let Err(error) = self.core.commit(StepId(flight.step), self.now, results) {
            ensure!(false, "errors", "commit of step {} answers {error}", flight.step);
        }
        self.counters.num_steps += 1;
        self.counters.num_steps_in_flight -= 1;
        self.device.done = flight.step;
        let found = self.take_entries()?;
        let mut check = ResultsCheck {
            ledger: &mut self.ledger,
            counters: &mut self.counters,
            trace,
            step: self.last_step,
        };
        check.commit(&flight.outputs, &failed, &found)?;
        self.patience.step(&self.ledger, self.last_step, !self.tier.open.is_empty())?;
        self.settle(trace)
    }

    /// The oldest step in flight fails, and all the others with it.
    ///
    /// # Errors
    ///
    /// A violation.
    pub fn fail(&mut self, trace: &mut Trace) -> Check {
        let Some(oldest) = self.flights.front().map(|flight| flight.step) else { return Ok(()) };
        let steps = self.flights.len() as u32;
        trace.push(self.last_step, Event::Fail { step: oldest, steps });
        let before = self.running();
        if let Err(error) = self.core.fail(StepId(oldest), self.now) {
            ensure!(false, "errors", "fail of step {oldest} answers {error}");
        }
        self.counters.num_failed_steps += u64::from(steps);
        self.counters.num_steps_in_flight = 0;
        let mut planned: Vec<usize> = Vec::new();
        for flight in self.flights.drain(..) {
            self.device.poison(flight.step);
            planned.extend(flight.seqs);
        }
        self.device.done = self.last_step;
        self.tier.failed(oldest);
        let is_rollback = |kind: &EventKind| matches!(kind, EventKind::RolledBack { .. });
        let rolled_back = self.news(is_rollback, |seq| seq.num_rollbacks);
        for &seq in &rolled_back {
            self.counters.num_rollbacks += 1;
            self.ledger.seqs[seq].num_rollbacks += 1;
            self.ledger.seqs[seq].num_failures += 1;
            self.put_back(seq);
        }
        for seq in before.into_iter().filter(|seq| planned.contains(seq)) {
            ensure!(
                rolled_back.contains(&seq),
                "rollback",
                "{} was planned in a step that failed and was not rolled back",
                self.ledger.name(seq)
            );
        }
        self.patience.failed(&self.ledger);
        self.endings(trace, Some(self.config.max_num_step_failures))?;
        self.settle(trace)
    }

    /// A running sequence goes back to the queue; its slot is released by a later plan.
    fn put_back(&mut self, seq: usize) {
        let state = &mut self.ledger.seqs[seq];
        if let Place::Running(slot) = state.place {
            state.place = Place::Leaving(slot);
        }
    }

    /// Running sequences whose timeline has more events of a kind than were counted. Relies on a ring
    /// large enough for the run.
    fn news(&self, wanted: impl Fn(&EventKind) -> bool, counted: impl Fn(&Seq) -> u32) -> Vec<usize> {
        let has_news = |&seq: &usize| {
            let state = &self.ledger.seqs[seq];
            let timeline = self.core.timeline(state.id.request);
            // The id may have belonged to a request that has ended.
            let queued = |event: &TimelineEvent| matches!(event.kind, EventKind::Queued { .. });
            let first = timeline.iter().rposition(queued).unwrap_or(0);
            let events = timeline[first..].iter().filter(|event| event.seq == state.id);
            events.filter(|event| wanted(&event.kind)).count() as u32 > counted(state)
        };
        self.running().into_iter().filter(has_news).collect()
    }

    /// Ask for the blocks of a prefix, from `first_block` on, to be copied to another tier.
    ///
    /// # Errors
    ///
    /// A violation. A refusal is none.
    pub fn offload(
        &mut self,
        trace: &mut Trace,
        (namespace, tokens): (Namespace, &[Token]),
        first_block: usize,
        blocks: usize,
    ) -> Check {
        let places = self.tier.fresh_places(blocks);
        let before = self.core.stats();
        let answer = self.core.offload(namespace, tokens, first_block, &places);
        self.begun(trace, answer, Direction::Out, (namespace, tokens), &places, before)
    }

    /// Ask for the blocks of a prefix to be copied from the other tier, which has them at `places`.
    ///
    /// # Errors
    ///
    /// A violation. A refusal is none.
    pub fn fetch(
        &mut self,
        trace: &mut Trace,
        (namespace, tokens): (Namespace, &[Token]),
        places: &[u32],
    ) -> Check {
        let before = self.core.stats();
        let answer = self.core.fetch(namespace, tokens, places);
        let first = answer.as_ref().map_or(0, |transfer| transfer.first_block as usize);
        let wanted = places.get(first..).unwrap_or_default();
        self.begun(trace, answer, Direction::In, (namespace, tokens), wanted, before)
    }

    fn begun(
        &mut self,
        trace: &mut Trace,
        answer: Result<Transfer, TransferError>,
        direction: Direction,
        (namespace, tokens): (Namespace, &[Token]),
        places: &[u32],
        before: Stats,
    ) -> Check {
        let Ok(transfer) = answer else {
            let after = self.core.stats();
            ensure!(before == after, "errors", "a refused copy changed {before:?} to {after:?}");
            return self.settle(trace);
        };
        let (ticket, blocks) = (transfer.ticket.0, transfer.num_blocks);
        ensure!(
            blocks > 0 && self.core.is_open(transfer.ticket),
            "copies",
            "{transfer:?} copies nothing, or is not open"
        );
        let prefixes = transfers::prefixes(namespace, tokens);
        self.tier.begin(transfer, direction, prefixes, places, self.epoch);
        trace.push(self.last_step, Event::Transfer { ticket, direction, blocks });
        self.settle(trace)
    }

    /// Complete a copy, by its place among the open ones.
    ///
    /// # Errors
    ///
    /// A violation.
    pub fn complete(&mut self, trace: &mut Trace, at: usize, ok: bool) -> Check {
        let open = &self.tier.open[at];
        let (ticket, due) = (open.ticket, open.is_listed() && self.core.is_open(open.ticket));
        let answer = self.core.complete(ticket, ok);
        ensure!(
            answer == due,
            "copies",
            "complete of ticket {} answers {answer}, want {due}",
            ticket.0
        );
        if answer {
            trace.push(self.last_step, Event::Complete { ticket: ticket.0, ok });
            self.tier.complete(at, ok, &mut self.device, self.epoch)?;
        }
        self.settle(trace)
    }

    /// Forget every cached prefix.
    ///
    /// # Errors
    ///
    /// A violation.
    pub fn reset(&mut self, trace: &mut Trace) -> Check {
        self.core.reset_prefix_cache();
        self.epoch += 1;
        self.tier.reset();
        trace.push(self.last_step, Event::Call { what: "reset_prefix_cache" });
        self.settle(trace)
    }

    /// Change the lifecycle. `Running` resumes.
    ///
    /// # Errors
    ///
    /// A violation.
    pub fn lifecycle(&mut self, trace: &mut Trace, to: Lifecycle) -> Check {
        match to {
            Lifecycle::Running => self.core.resume(),
            Lifecycle::Paused => self.core.pause(),
            Lifecycle::Draining => self.core.drain(),
            Lifecycle::Closed => {
                self.take_over();
                let live: Vec<usize> = self.ledger.live.values().copied().collect();
                for number in live {
                    self.ledger.requests[number].abort_pending = true;
                }
                self.core.close();
                self.endings(trace, None)?;
                check_effect(&self.ledger)?;
            }
        }
        ensure!(
            self.core.state() == to,
            "lifecycle",
            "{} was asked for, the core is {}",
            to.name(),
            self.core.state().name()
        );
        trace.push(self.last_step, Event::Call { what: to.name() });
        self.settle(trace)
    }

    fn take_entries(&mut self) -> Check<Vec<Entry>> {
        self.core.take_outputs(&mut self.outputs);
        entries(&self.outputs)
    }

    fn endings(&mut self, trace: &mut Trace, may_fail: Option<u32>) -> Check {
        let found = self.take_entries()?;
        let mut check = ResultsCheck {
            ledger: &mut self.ledger,
            counters: &mut self.counters,
            trace,
            step: self.last_step,
        };
        check.endings(&found, may_fail)
    }

    /// After every call: the core's own checks, conservation, counters, block events.
    fn settle(&mut self, trace: &mut Trace) -> Check {
        self.core.check();
        self.tier.given_up(|ticket| self.core.is_open(ticket));
        self.tier.settle(self.device.done);
        self.counters.transfers = self.tier.counts;
        let stats = self.core.stats();
        let Stats { free, held, cached, capacity, .. } = stats;
        trace.settle(Blocks { free, held, cached });
        ensure!(
            free + held + cached == capacity && capacity == u64::from(self.config.num_blocks),
            "conservation",
            "{free} free + {held} held + {cached} cached blocks of {capacity}"
        );
        self.counters.check(&stats, &self.ledger)?;
        self.blocks.check(&mut self.core, &self.device)
    }

    /// Whether all that was accepted has ended and nothing is in flight.
    pub fn is_done(&self) -> bool {
        self.ledger.live.is_empty()
            && self.flights.is_empty()
            && self.tier.open.is_empty()
            && !self.core.has_work()
    }

    /// The end of a run: everything has ended, and nothing is left behind.
    ///
    /// # Errors
    ///
    /// What is.
    pub fn check_end(&self) -> Check {
        let stats = self.core.stats();
        ensure!(
            self.ledger.live.is_empty(),
            "lost request",
            "requests {:?} never ended",
            self.ledger.live.keys().collect::<Vec<_>>()
        );
        ensure!(!self.core.has_work(), "idle", "the core is idle and says it has work");
        ensure!(
            stats.held == 0 && stats.free + stats.cached == stats.capacity,
            "conservation",
            "idle with {} blocks held",
            stats.held
        );
        ensure!(
            stats.num_running + stats.num_waiting + stats.num_queued_tokens == 0,
            "counters",
            "idle with {stats:?}"
        );
        Ok(())
    }
}

/// What a runner reports for a step.
fn results(outputs: &[FlightOutput], failed: &[bool]) -> (Vec<i32>, Vec<i32>) {
    let count = |(output, &failed): (&FlightOutput, &bool)| {
        if failed { -1 } else { i32::from(output.kind == OutputKind::Sample) }
    };
    let counts = outputs.iter().zip(failed).map(count).collect();
    let tokens = outputs.iter().map(|output| output.token as i32).collect();
    (counts, tokens)
}
