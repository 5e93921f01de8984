//! One core and everything that watches it.
//!
//! Each method does one thing to the core, as an engine would, and then checks all that can be told
//! from outside. The first violation ends the run. [`chaos`](crate::chaos) drives it at random;
//! `tests/named` by hand.

mod calls;
mod requests;

use std::collections::VecDeque;

use fastserve_base::{CoreConfig, Nanos, OutputKind, StepId};
use fastserve_engine::{
    Core, EventKind, Inbox, Lifecycle, PlanSizes, Results, Stats, StepOutputs, TimelineEvent,
};
use fastserve_sched::PlanView;

use crate::blocks::BlockWatch;
use crate::check::explain::{check_inbox, check_record, check_timeline};
use crate::check::order::{check_idle, check_victims};
use crate::check::results::{Entry, ResultsCheck, check_effect, entries};
use crate::check::{Counters, Flight, FlightOutput, PlanCheck};
use crate::device::Device;
use crate::ledger::{Ledger, Place, Seq};
use crate::patience::Patience;
use crate::policy::{PolicyChoice, RandomPolicy};
use crate::trace::{Blocks, Event, Trace};
use crate::transfers::Tier;
use crate::violation::{Check, ensure};

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
    /// What happened.
    pub trace: Trace,
    /// The time.
    pub now: Nanos,
    /// Whether [`Core::check`] is called after every call.
    pub self_checks: bool,
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
            trace: Trace::default(),
            now: 0,
            self_checks: true,
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

    /// Plan a step. False: there was nothing to run.
    ///
    /// # Errors
    ///
    /// A violation.
    pub fn plan(&mut self) -> Check<bool> {
        self.take_over();
        let before: Vec<usize> = self.running();
        let evicted = self.core.stats().num_evicted_blocks;
        let sizes = match self.core.plan(self.now, &mut self.arena) {
            Ok(sizes) => sizes,
            Err(error) => {
                ensure!(false, "errors", "plan answers {error}");
                unreachable!()
            }
        };
        self.endings(None)?;
        check_effect(&self.ledger)?;
        self.age();
        let victims = self.victims();
        for &victim in &victims {
            self.ledger.seqs[victim].num_preemptions += 1;
            self.counters.num_preemptions += 1;
            self.put_back(victim);
            let (seq, by) = (self.ledger.seqs[victim].id, self.preempted_by(victim));
            self.trace.push(self.last_step + 1, Event::Preempt { seq, by });
        }
        let stayed: Vec<usize> = before
            .into_iter()
            .filter(|&seq| matches!(self.ledger.seqs[seq].place, Place::Running(_)))
            .collect();
        check_victims(&mut self.ledger, &stayed, &victims)?;
        let stats = self.core.stats();
        ensure!(
            stats.num_evicted_blocks == evicted || stats.free == 0 || !victims.is_empty(),
            "eviction",
            "{} blocks were evicted while {} are free",
            stats.num_evicted_blocks - evicted,
            stats.free
        );
        if !sizes.is_step() {
            ensure!(sizes == PlanSizes::default(), "plan", "an empty plan with {sizes:?}");
            if self.core.state() != Lifecycle::Paused {
                ensure!(!self.tier.has_unlisted(), "copies", "an empty plan lists no copy");
                if self.tier.open.is_empty() {
                    check_idle(&self.ledger, &self.device, self.flights.len())?;
                }
            }
            self.settle()?;
            return Ok(false);
        }
        ensure!(
            self.core.state() != Lifecycle::Paused,
            "plan",
            "a step was planned while the core is paused"
        );
        self.check_plan(sizes, stayed)?;
        if let Some(flight) = self.flights.back_mut() {
            flight.num_preempted = victims.len() as u32;
            flight.planned_at = self.now;
        }
        if let Some(flight) = self.flights.back() {
            self.blocks.check_matches(&self.core, &self.device, &self.ledger, flight)?;
        }
        self.settle()?;
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
            let is_born = !matches!(state.place, Place::Unborn);
            state.aged |= is_born && self.now - since >= max_wait;
        }
    }

    fn running(&self) -> Vec<usize> {
        let runs = |&seq: &usize| matches!(self.ledger.seqs[seq].place, Place::Running(_));
        self.ledger.live_seqs.iter().copied().filter(runs).collect()
    }

    fn check_plan(&mut self, sizes: PlanSizes, stayed: Vec<usize>) -> Check {
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
            trace: &mut self.trace,
            stayed,
            rows: Vec::new(),
            assigned: Vec::new(),
            edits: Vec::new(),
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
    pub fn commit(&mut self, mut is_error: impl FnMut(&FlightOutput) -> bool) -> Check {
        let Some(flight) = self.flights.pop_front() else { return Ok(()) };
        let failed: Vec<bool> = flight.outputs.iter().map(&mut is_error).collect();
        let (counts, tokens) = results(&flight.outputs, &failed);
        let results = Results { counts: &counts, tokens: &tokens };
        self.trace.push(self.last_step, Event::Commit { step: flight.step });
        if let Err(error) = self.core.commit(StepId(flight.step), self.now, results) {
            ensure!(false, "errors", "commit of step {} answers {error}", flight.step);
        }
        self.counters.num_steps += 1;
        self.counters.num_steps_in_flight -= 1;
        self.device.done = flight.step;
        check_record(&self.inbox, &flight, self.now, false)?;
        let found = self.take_entries()?;
        self.results_check().commit(&flight.outputs, &failed, &found)?;
        self.patience.step(&self.ledger, self.last_step, !self.tier.open.is_empty())?;
        self.settle()
    }

    /// The oldest step in flight fails, and all the others with it. The newest `num_lost` plans
    /// never reached the device.
    ///
    /// # Errors
    ///
    /// A violation.
    pub fn fail(&mut self, num_lost: usize) -> Check {
        let Some(oldest) = self.flights.front().map(|flight| flight.step) else { return Ok(()) };
        let steps = self.flights.len() as u32;
        self.trace.push(self.last_step, Event::Fail { step: oldest, steps });
        let before = self.running();
        if let Err(error) = self.core.fail(StepId(oldest), self.now) {
            ensure!(false, "errors", "fail of step {oldest} answers {error}");
        }
        self.counters.num_failed_steps += u64::from(steps);
        self.counters.num_steps_in_flight = 0;
        let mut planned: Vec<usize> = Vec::new();
        for flight in self.flights.iter().rev().take(num_lost) {
            self.device.lose(&flight.changes);
        }
        for flight in self.flights.drain(..) {
            check_record(&self.inbox, &flight, self.now, true)?;
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
        self.endings(Some(self.config.max_num_step_failures))?;
        self.settle()
    }

    /// A running sequence goes back to the queue; its slot is released by a later plan.
    fn put_back(&mut self, seq: usize) {
        let block_size = self.cached_block_size();
        self.counters.unseen += self.ledger.lose_sight(seq, self.last_step, block_size) as u64;
        let state = &mut self.ledger.seqs[seq];
        if let Place::Running(slot) = state.place {
            state.place = Place::Leaving(slot);
        }
    }

    /// Tokens per block, 0 where nothing is cached.
    fn cached_block_size(&self) -> usize {
        if self.config.enable_prefix_caching { self.device.block_size } else { 0 }
    }

    /// Running sequences whose timeline has more events of a kind than were counted. Relies on a ring
    /// large enough for the run.
    fn news(
        &self,
        wanted: impl Fn(&EventKind) -> bool,
        counted: impl Fn(&Seq) -> u32,
    ) -> Vec<usize> {
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

    fn results_check(&mut self) -> ResultsCheck<'_> {
        ResultsCheck {
            block_size: self.cached_block_size(),
            ledger: &mut self.ledger,
            counters: &mut self.counters,
            trace: &mut self.trace,
            step: self.last_step,
        }
    }

    fn take_entries(&mut self) -> Check<Vec<Entry>> {
        self.core.take_outputs(&mut self.outputs);
        entries(&self.outputs)
    }

    fn endings(&mut self, may_fail: Option<u32>) -> Check {
        let found = self.take_entries()?;
        self.results_check().endings(&found, may_fail)
    }

    /// After every call: the core's own checks, conservation, counters, block events.
    fn settle(&mut self) -> Check {
        if self.self_checks {
            self.core.check();
        }
        self.tier.given_up(|ticket| self.core.is_open(ticket));
        self.tier.settle(self.device.done);
        self.counters.transfers = self.tier.counts;
        let stats = self.core.stats();
        let Stats { free, held, cached, capacity, .. } = stats;
        self.trace.settle(Blocks { free, held, cached });
        ensure!(
            free + held + cached == capacity && capacity == u64::from(self.config.num_blocks),
            "conservation",
            "{free} free + {held} held + {cached} cached blocks of {capacity}"
        );
        let block_size = self.cached_block_size();
        let lag = |&seq: &usize| {
            self.ledger.seqs[seq].may_have_matched(self.last_step, block_size) as u64
        };
        let lag: u64 = self.ledger.live_seqs.iter().map(lag).sum();
        self.counters.check(&stats, &self.ledger, lag)?;
        check_inbox(&self.inbox, &stats, &self.ledger)?;
        for number in std::mem::take(&mut self.ledger.ended) {
            let timeline = self.core.timeline(self.ledger.requests[number].request.id);
            check_timeline(&self.ledger, number, &timeline)?;
        }
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
