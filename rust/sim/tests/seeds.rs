//! 500 seeds pass every checker, with 1, 2 and 4 steps in flight.
//!
//! Split so that they run beside each other. More seeds by hand, and one again with its trace:
//!
//! ```text
//! cargo run --release -p fastserve-sim -- --seeds 0..20000 --quiet
//! cargo run -p fastserve-sim -- --seed 7041 --steps-in-flight 2 --trace
//! ```

use std::ops::Range;

use fastserve_sim::check::Counters;
use fastserve_sim::{run, scenario};

/// Run seeds; the first that fails is shown whole.
fn pass(seeds: Range<u64>, steps_in_flight: u32) -> Counters {
    let mut total = Counters::default();
    for seed in seeds {
        match run(&scenario(seed, steps_in_flight)).outcome {
            Ok(summary) => total.add(&summary.counters),
            Err(failure) => panic!("{failure}"),
        }
    }
    total
}

/// A quiet run proves little: every kind of trouble has to have happened, and often.
fn assert_eventful(total: &Counters) {
    for (what, count, least) in [
        ("steps", total.num_steps, 20_000),
        ("failed steps", total.num_failed_steps, 200),
        ("preemptions", total.num_preemptions, 200),
        ("rollbacks", total.num_rollbacks, 200),
        ("recomputed tokens", total.num_recomputed_tokens, 2_000),
        ("cached tokens", total.prefix_cache_hits, 10_000),
        ("forks", total.num_forks, 200),
        ("copied blocks", total.num_copied_blocks, 50),
        ("offloaded blocks", total.transfers.num_offloaded_blocks, 50),
        ("fetched blocks", total.transfers.num_fetched_blocks, 5),
        ("failed copies", total.transfers.num_failed_transfers, 5),
        ("stops", total.num_finished[1], 500),
        ("aborts", total.num_finished[3], 500),
        ("errors", total.num_finished[4], 200),
    ] {
        assert!(count >= least, "{what}: {count}, want at least {least}");
    }
}

macro_rules! seeds {
    ($($name:ident: $seeds:expr, $steps_in_flight:literal;)*) => {
        $(
            #[test]
            fn $name() {
                assert_eventful(&pass($seeds, $steps_in_flight));
            }
        )*
    };
}

seeds! {
    seeds_0_to_249_with_1_step_in_flight: 0..250, 1;
    seeds_250_to_499_with_1_step_in_flight: 250..500, 1;
    seeds_0_to_249_with_2_steps_in_flight: 0..250, 2;
    seeds_250_to_499_with_2_steps_in_flight: 250..500, 2;
    seeds_0_to_249_with_4_steps_in_flight: 0..250, 4;
    seeds_250_to_499_with_4_steps_in_flight: 250..500, 4;
}

#[test]
fn a_seed_replays_everything() {
    for seed in [0, 17, 41] {
        let traces = [0, 1].map(|_| run(&scenario(seed, 2)).trace.tail(usize::MAX));
        assert!(traces[0].lines().count() > 100, "seed {seed} is too short to tell");
        assert_eq!(traces[0], traces[1], "seed {seed}");
    }
}
