//! Hundreds of seeds pass every checker, with 1, 2 and 4 steps in flight.

use fastserve_sim::{run, scenario};

const NUM_SEEDS: u64 = 500;

/// Run every seed; panic with the whole story of those that break a contract.
fn all_pass(steps_in_flight: u32) {
    let failures: Vec<String> = (0..NUM_SEEDS)
        .filter_map(|seed| run(&scenario(seed, steps_in_flight)).outcome.err())
        .map(|failure| failure.to_string())
        .collect();
    assert!(
        failures.is_empty(),
        "{} of {NUM_SEEDS} seeds:\n{}",
        failures.len(),
        failures.join("\n\n")
    );
}

#[test]
fn one_step_in_flight() {
    all_pass(1);
}

#[test]
fn two_steps_in_flight() {
    all_pass(2);
}

#[test]
fn four_steps_in_flight() {
    all_pass(4);
}

/// A seed is the whole of a run: the same one tells the same story twice.
#[test]
fn a_seed_replays() {
    for seed in 0..20 {
        let [first, second] = [0, 1].map(|_| run(&scenario(seed, 2)).trace.tail(usize::MAX));
        assert_eq!(first, second, "seed {seed}");
        assert!(!first.is_empty(), "seed {seed} did nothing");
    }
}
