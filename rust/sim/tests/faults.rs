//! The simulator notices when the core is wrong: each planted fault is caught within 100 seeds.
//!
//! A fault is active in one thread only, so the tests of this file can run beside each other. With
//! `--nocapture` the table says which checker caught what:
//!
//! ```text
//! cargo test -p fastserve-sim --features faults --test faults -- --nocapture
//! ```
#![cfg(feature = "faults")]
#![expect(clippy::print_stdout, reason = "the table is for people")]

use fastserve_base::fault::{ALL, Fault, plant};
use fastserve_sim::{Failure, Scenario, run, scenario};

const SEEDS: u64 = 100;

/// The first failure within [`SEEDS`] seeds, with 1, 2 and 4 steps in flight in turn.
fn first_failure(self_checks: bool) -> Option<Box<Failure>> {
    (0..SEEDS).find_map(|seed| {
        let scenario = scenario(seed, [1, 2, 4][seed as usize % 3]);
        run(&Scenario { self_checks, ..scenario }).outcome.err()
    })
}

/// Run the seeds under every fault, print what each trips, and return those that nobody notices.
fn unnoticed(self_checks: bool) -> Vec<Fault> {
    // A planted fault may well trip the core's own assertions: no backtrace for each.
    std::panic::set_hook(Box::new(|_| {}));
    let mut missed = Vec::new();
    for fault in ALL {
        plant(Some(fault));
        let failure = first_failure(self_checks);
        plant(None);
        let Some(failure) = failure else {
            missed.push(fault);
            continue;
        };
        let what = failure.violation.to_string();
        let line = what.lines().next().unwrap_or_default();
        println!("{:<30} seed {:>2}  {line}", format!("{fault:?}"), failure.scenario.seed);
    }
    let _ = std::panic::take_hook();
    missed
}

#[test]
fn nothing_is_caught_where_nothing_is_planted() {
    plant(None);
    if let Some(failure) = first_failure(true) {
        panic!("{failure}");
    }
}

#[test]
fn every_fault_is_caught_within_100_seeds() {
    assert_eq!(unnoticed(true), [], "with {SEEDS} seeds each");
}

/// The same, from outside alone: plans, outputs and stats give every fault away.
#[test]
fn every_fault_is_caught_without_the_core_checking_itself() {
    assert_eq!(unnoticed(false), [], "with {SEEDS} seeds each");
}
