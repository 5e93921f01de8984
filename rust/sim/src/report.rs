//! The outcome of a run, for people.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::chaos::{Chaos, Scenario};
use crate::check::Counters;
use crate::trace::Trace;
use crate::violation::Violation;

/// Lines of the trace that a failure shows.
const TAIL: usize = 40;

/// What a run that passed did.
#[derive(Debug, Clone, Copy, Default)]
pub struct Summary {
    /// Requests accepted.
    pub num_requests: u64,
    /// Sequences.
    pub num_seqs: u64,
    /// What was counted.
    pub counters: Counters,
}

/// A run that broke a contract.
#[derive(Debug, Clone)]
pub struct Failure {
    /// What was run.
    pub scenario: Scenario,
    /// What was broken.
    pub violation: Violation,
    /// The last lines of its trace.
    pub tail: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Scenario { seed, config, policy, rates, num_requests, .. } = &self.scenario;
        let in_flight = config.max_num_steps_in_flight;
        writeln!(f, "seed {seed} with {in_flight} steps in flight: {}", self.violation)?;
        writeln!(f, "{num_requests} requests, policy {policy:?}, {rates:?}")?;
        writeln!(f, "{config:?}")?;
        writeln!(f, "{}", self.tail)?;
        write!(
            f,
            "again: cargo run -p fastserve-sim -- --seed {seed} --steps-in-flight {in_flight} --trace"
        )
    }
}

/// A run that has ended.
#[derive(Debug)]
pub struct Run {
    /// Everything that happened.
    pub trace: Trace,
    /// How it ended.
    pub outcome: Result<Summary, Box<Failure>>,
}

/// Run a scenario to its end. A panic of the core is a violation too.
pub fn run(scenario: &Scenario) -> Run {
    let mut chaos = Chaos::new(scenario);
    let outcome = catch_unwind(AssertUnwindSafe(|| chaos.run()));
    let trace = std::mem::take(&mut chaos.sim.trace);
    let violation = match outcome {
        Ok(Ok(())) => {
            let summary = Summary {
                num_requests: chaos.sim.ledger.requests.len() as u64,
                num_seqs: chaos.sim.ledger.seqs.len() as u64,
                counters: chaos.sim.counters,
            };
            return Run { trace, outcome: Ok(summary) };
        }
        Ok(Err(violation)) => violation,
        Err(panic) => Violation { checker: "panic", what: panic_text(panic.as_ref()) },
    };
    let tail = trace.tail(TAIL);
    let failure = Failure { scenario: scenario.clone(), violation, tail };
    Run { trace, outcome: Err(Box::new(failure)) }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()))
        .unwrap_or_else(|| "a panic without text".to_owned())
}
