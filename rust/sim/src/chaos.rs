//! A scenario, driven at random until everything has ended.

use fastserve_base::{CoreConfig, RequestId, StepError, StepId};
use fastserve_engine::{Lifecycle, Results};

use crate::generate::Workload;
use crate::ledger::Place;
use crate::policy::PolicyChoice;
use crate::rng::Rng;
use crate::sim::Sim;
use crate::violation::{Check, ensure};

/// Calls after which a run that has not ended counts as stuck.
const MAX_TICKS: u32 = 500_000;

/// How often what goes wrong, in percent of the calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rates {
    /// A request arrives.
    pub arrive: u32,
    /// Most that arrive at once.
    pub burst: u32,
    /// A request is aborted, whatever its state.
    pub abort: u32,
    /// The text side ends a sequence.
    pub cut: u32,
    /// A step fails.
    pub fail: u32,
    /// An output row comes back as an error.
    pub error_row: u32,
    /// The prefix cache is reset.
    pub reset: u32,
    /// The core is paused.
    pub pause: u32,
    /// A call is made out of turn.
    pub misuse: u32,
    /// A request is one that must be refused.
    pub bad_request: u32,
    /// A request goes on from another's tokens.
    pub again: u32,
    /// A commit comes later than it could.
    pub commit_late: u32,
    /// A copy to or from another tier is asked for.
    pub transfer: u32,
    /// The core is drained.
    pub drain: u32,
    /// The core is closed.
    pub close: u32,
}

/// Everything a run depends on.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// The seed of the workload and of luck.
    pub seed: u64,
    /// Limits.
    pub config: CoreConfig,
    /// Order of service.
    pub policy: PolicyChoice,
    /// Luck.
    pub rates: Rates,
    /// Requests that arrive, the refused ones included.
    pub num_requests: u32,
    /// Whether `Core::check` is called after every call. Without it, all that is noticed is noticed
    /// from outside.
    pub self_checks: bool,
}

/// A scenario on its way.
pub struct Chaos {
    /// The core under watch.
    pub sim: Sim,
    rates: Rates,
    rng: Rng,
    workload: Workload,
    to_come: u32,
    next_id: u64,
}

impl Chaos {
    /// Nothing has happened yet.
    pub fn new(scenario: &Scenario) -> Self {
        let mut sim = Sim::new(scenario.config.clone(), scenario.policy);
        sim.self_checks = scenario.self_checks;
        Self {
            workload: Workload::new(scenario.seed, &sim.config),
            sim,
            rates: scenario.rates,
            rng: Rng::new(scenario.seed).stream(4),
            to_come: scenario.num_requests,
            next_id: 0,
        }
    }

    /// Go on until everything has ended.
    ///
    /// # Errors
    ///
    /// The first violation.
    pub fn run(&mut self) -> Check {
        for _ in 0..MAX_TICKS {
            if self.to_come == 0 && self.sim.is_done() {
                return self.sim.check_end();
            }
            self.sim.now += self.rng.below(40);
            self.arrivals()?;
            self.bad_luck()?;
            self.work()?;
        }
        ensure!(
            false,
            "stuck",
            "{} requests live after {MAX_TICKS} calls",
            self.sim.ledger.live.len()
        );
        Ok(())
    }

    fn arrivals(&mut self) -> Check {
        if self.to_come == 0 || !self.rng.chance(self.rates.arrive) {
            return Ok(());
        }
        for _ in 0..self.rng.range(1..self.rates.burst + 1).min(self.to_come) {
            self.to_come -= 1;
            self.arrive()?;
        }
        if self.sim.core.state() == Lifecycle::Closed {
            self.to_come = 0;
        }
        Ok(())
    }

    fn arrive(&mut self) -> Check {
        let id = match self.rng.below(20) {
            0 => self.rng.below(self.next_id + 1), // Often in use.
            1 => self.rng.bits(),
            _ => self.next_id,
        };
        self.next_id = self.next_id.max(id.min(1 << 20)) + 1;
        let now = self.sim.now;
        let mut request = self.workload.request(id, &self.sim.config, now);
        if self.rng.chance(self.rates.again) {
            let longest = self.sim.config.max_model_len as usize - 1;
            request = self.workload.next_turn(request, &self.sim.ledger, longest);
        }
        if self.rng.chance(self.rates.bad_request) {
            request = self.workload.bad_request(request, &self.sim.config);
        }
        self.sim.submit(request).map(|_| ())
    }

    fn bad_luck(&mut self) -> Check {
        let rates = self.rates;
        if self.rng.chance(rates.abort) {
            let id = self.some_request();
            self.sim.abort(id)?;
        }
        if self.rng.chance(rates.cut) && !self.sim.ledger.seqs.is_empty() {
            let newest = self.sim.ledger.seqs.len() as u64;
            let seq = (newest - 1 - self.rng.below(newest.min(12))) as usize;
            let state = &self.sim.ledger.seqs[seq];
            let (id, known) = (state.id, state.num_outputs() as u32);
            let kept = self.rng.range(0..known + 1);
            // A later request may have the id by now.
            let named = self.sim.ledger.find(id.request.0, id.index).unwrap_or(seq);
            if self.sim.ledger.seqs[named].place != Place::Unborn {
                self.sim.cut(id, kept)?;
            }
        }
        if self.rng.chance(rates.reset) {
            self.sim.reset()?;
        }
        match self.sim.core.state() {
            Lifecycle::Running if self.rng.chance(rates.pause) => {
                self.sim.lifecycle(Lifecycle::Paused)?;
            }
            Lifecycle::Paused if self.rng.chance(30) => {
                self.sim.lifecycle(Lifecycle::Running)?;
            }
            Lifecycle::Running if self.rng.chance(rates.drain) && self.rng.chance(20) => {
                self.sim.lifecycle(Lifecycle::Draining)?;
            }
            Lifecycle::Draining if self.rng.chance(5) => {
                self.sim.lifecycle(Lifecycle::Running)?;
            }
            Lifecycle::Closed => {}
            _ if self.rng.chance(rates.close) && self.rng.chance(10) => {
                self.sim.lifecycle(Lifecycle::Closed)?;
            }
            _ => {}
        }
        if self.rng.chance(rates.misuse) {
            self.misuse()?;
        }
        self.transfers()
    }

    /// Copies to and from another tier begin and end.
    fn transfers(&mut self) -> Check {
        if self.rng.chance(self.rates.transfer) && !self.sim.ledger.seqs.is_empty() {
            self.begin_transfer()?;
        }
        let open = self.sim.tier.open.len();
        if open > 0 && self.rng.chance(20) {
            let at = self.rng.below(open as u64) as usize;
            let ok = !self.rng.chance(25);
            self.sim.complete(at, ok)?;
        }
        Ok(())
    }

    fn begin_transfer(&mut self) -> Check {
        let newest = self.sim.ledger.seqs.len() as u64;
        let seq = (newest - 1 - self.rng.below(newest.min(40))) as usize;
        let state = &self.sim.ledger.seqs[seq];
        let request = &self.sim.ledger.record_of(seq).request;
        if !request.spans.is_empty() {
            return Ok(()); // Prefixes are named by their tokens alone.
        }
        let len = self.rng.range(1..state.num_known as u32 + 1) as usize;
        let (namespace, tokens) = (request.namespace, state.stream.tokens[..len].to_vec());
        let block_size = self.sim.device.block_size;
        if let Some(places) = self.sim.tier.places_of(namespace, &tokens, block_size) {
            return self.sim.fetch((namespace, &tokens), &places);
        }
        let blocks = (len / block_size) as u32;
        let first = self.rng.range(0..blocks / 2 + 1) as usize;
        let num_places = self.rng.range(0..blocks + 1) as usize;
        self.sim.offload((namespace, &tokens), first, num_places)
    }

    /// The id of a request, live or ended or neither.
    fn some_request(&mut self) -> u64 {
        let known = self.sim.ledger.requests.len() as u64;
        if known == 0 || self.rng.chance(3) {
            return self.rng.bits();
        }
        let number = known - 1 - self.rng.below(known.min(10));
        self.sim.ledger.requests[number as usize].request.id.0
    }

    /// Plan, commit or fail.
    fn work(&mut self) -> Check {
        let limit = self.sim.config.max_num_steps_in_flight as usize;
        let in_flight = self.sim.flights.len();
        let may_plan = in_flight < limit && self.sim.core.state() != Lifecycle::Closed;
        let plans = in_flight == 0 || self.rng.chance(self.rates.commit_late + 10);
        if may_plan && plans && self.sim.plan()? {
            return Ok(());
        }
        if self.rng.chance(self.rates.fail) {
            let num_lost = self.rng.below(in_flight as u64 + 1) as usize;
            return self.sim.fail(num_lost);
        }
        let error_row = self.rates.error_row;
        let rng = &mut self.rng;
        self.sim.commit(|_| rng.chance(error_row))
    }

    /// Calls out of turn are refused, and change nothing.
    fn misuse(&mut self) -> Check {
        let before = self.sim.core.stats();
        let oldest = self.sim.flights.front().map(|flight| flight.step);
        let newest = self.sim.flights.back().map_or(7, |flight| flight.step + 1);
        let step = StepId(if self.rng.chance(50) { newest } else { oldest.unwrap_or(1) });
        let num_outputs = self.sim.flights.front().map_or(0, |flight| flight.outputs.len());
        let in_turn = oldest == Some(step.0);
        let len = num_outputs + usize::from(in_turn);
        let (counts, tokens) = (vec![1; len], vec![0; len]);
        let results = Results { counts: &counts, tokens: &tokens };
        let answer = self.sim.core.commit(step, self.sim.now, results);
        let as_due = matches!(
            (&answer, in_turn),
            (Err(StepError::OutOfOrder { .. }), false)
                | (Err(StepError::WrongResultLength { .. }), true)
        );
        ensure!(as_due, "errors", "commit of step {} out of turn answers {answer:?}", step.0);
        if in_turn && num_outputs > 0 {
            let tokens = vec![self.sim.config.vocab_size as i32; num_outputs];
            let counts = vec![1; num_outputs];
            let results = Results { counts: &counts, tokens: &tokens };
            let answer = self.sim.core.commit(step, self.sim.now, results);
            ensure!(
                matches!(answer, Err(StepError::BadResult { .. })),
                "errors",
                "commit of tokens that do not exist answers {answer:?}"
            );
        } else if !in_turn {
            let answer = self.sim.core.fail(step, self.sim.now);
            ensure!(answer.is_err(), "errors", "fail of step {} answers {answer:?}", step.0);
        }
        let answer = self.sim.core.plan(self.sim.now, &mut [0; 8]);
        ensure!(answer.is_err(), "errors", "plan into eight words answers {answer:?}");
        let _ = self.sim.core.timeline(RequestId(self.rng.below(20)));
        let after = self.sim.core.stats();
        ensure!(before == after, "errors", "a refused call changed {before:?} to {after:?}");
        Ok(())
    }
}
