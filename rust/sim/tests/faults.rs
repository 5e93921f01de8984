//! Each planted fault is noticed within a hundred seeds: the simulator's own test.
//!
//! Run with `--features faults`. A panic of the core counts as noticed: it is a check that stays on.
#![cfg(feature = "faults")]
#![allow(clippy::print_stdout, reason = "the table of what noticed what")]

use std::panic::{AssertUnwindSafe, catch_unwind};

use fastserve_base::fault::{ALL, Fault, plant};
use fastserve_sim::{run, scenario};

const NUM_SEEDS: u64 = 100;

/// The first seed that notices `fault`, and what it says.
fn notice(fault: Fault) -> Option<(u64, u32, String)> {
    plant(Some(fault));
    let found = (0..NUM_SEEDS).find_map(|seed| {
        // Faults of steps in flight need several; the others show with any number.
        let steps_in_flight = [1, 2, 4][seed as usize % 3];
        let outcome =
            catch_unwind(AssertUnwindSafe(|| run(&scenario(seed, steps_in_flight)).outcome));
        match outcome {
            Ok(Ok(_)) => None,
            Ok(Err(failure)) => {
                let line = failure.to_string().lines().next().unwrap_or_default().to_owned();
                Some((seed, steps_in_flight, line))
            }
            Err(_) => Some((seed, steps_in_flight, "the core panicked".to_owned())),
        }
    });
    plant(None);
    found
}

#[test]
fn every_planted_fault_is_noticed() {
    let mut unnoticed = Vec::new();
    for fault in ALL {
        match notice(fault) {
            Some((_, _, line)) => println!("{:28} {line}", format!("{fault:?}")),
            None => unnoticed.push(fault),
        }
    }
    assert!(unnoticed.is_empty(), "not noticed in {NUM_SEEDS} seeds: {unnoticed:?}");
}

#[test]
fn without_a_fault_the_same_seeds_pass() {
    for seed in 0..NUM_SEEDS {
        let outcome = run(&scenario(seed, [1, 2, 4][seed as usize % 3])).outcome;
        assert!(
            outcome.is_ok(),
            "{}",
            outcome.err().map_or(String::new(), |failure| failure.to_string())
        );
    }
}
