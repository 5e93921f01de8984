//! How long a request may take: the bound on starvation, and whoever breaks it.
//!
//! The first sequence in the order of service is never preempted, and gets at least one token in every
//! step, unless it waits for a step in flight. So it ends within as many steps as it may have tokens.
//! Before a request is first, those before it must have been: all that were live when it was accepted,
//! and all that were accepted until it aged. Hence
//!
//! ```text
//! steps until it ends <= (k + 1) * (sum over those sequences and its own of most tokens) + rework
//! ```
//!
//! not counting steps during which a copy to or from another tier holds blocks or is waited for,
//! with `k` steps in flight, and `max_model_len` of rework for each step that failed meanwhile. Where
//! nothing ages and the order is not that of arrival there is no bound, as the configuration says.

use std::collections::BTreeMap;

use fastserve_base::{CoreConfig, PolicyKind};

use crate::ledger::Ledger;
use crate::policy::PolicyChoice;
use crate::violation::{Check, ensure};

/// When a request is due.
#[derive(Debug, Clone, Copy)]
struct Due {
    since: u64,
    steps: u64,
}

/// The bounds of all live requests.
#[derive(Debug, Clone)]
pub struct Patience {
    due: BTreeMap<usize, Due>,
    by_arrival: bool,
    ages: bool,
    factor: u64,
    rework: u64,
}

impl Patience {
    /// Nothing is due.
    pub fn new(config: &CoreConfig, policy: PolicyChoice) -> Self {
        let is_fcfs = config.scheduling_policy == PolicyKind::Fcfs;
        Self {
            due: BTreeMap::new(),
            by_arrival: policy == PolicyChoice::Config && is_fcfs,
            ages: config.max_wait.is_some(),
            factor: u64::from(config.max_num_steps_in_flight) + 1,
            rework: u64::from(config.max_model_len),
        }
    }

    /// The newest request of `ledger` was accepted.
    pub fn accept(&mut self, ledger: &Ledger, step: u64) {
        let number = ledger.requests.len() - 1;
        let limit = |&seq: &usize| ledger.seqs[seq].stream.limit() as u64;
        let all: u64 = ledger.live_seqs.iter().map(limit).sum();
        let own: u64 = ledger.requests[number].seqs().map(|seq| limit(&seq)).sum();
        if !self.by_arrival {
            for (&other, due) in &mut self.due {
                let first = &ledger.seqs[ledger.requests[other].first_seq];
                if !first.aged {
                    due.steps += self.factor * own;
                }
            }
        }
        if self.by_arrival || self.ages {
            self.due.insert(number, Due { since: step, steps: self.factor * all });
        }
    }

    /// The steps in flight failed.
    pub fn failed(&mut self, ledger: &Ledger) {
        self.due.retain(|number, _| ledger.requests[*number].num_live > 0);
        for due in self.due.values_mut() {
            due.steps += self.factor * self.rework;
        }
    }

    /// A step was committed; `step` is the last one planned. `excused`: it does not count.
    ///
    /// # Errors
    ///
    /// A request that is overdue.
    pub fn step(&mut self, ledger: &Ledger, step: u64, excused: bool) -> Check {
        self.due.retain(|number, _| ledger.requests[*number].num_live > 0);
        for due in self.due.values_mut() {
            due.steps += u64::from(excused);
        }
        for (&number, due) in &self.due {
            ensure!(
                step - due.since <= due.steps,
                "starvation",
                "r{} lives for {} steps, the bound is {}",
                ledger.requests[number].request.id.0,
                step - due.since,
                due.steps
            );
        }
        Ok(())
    }
}
