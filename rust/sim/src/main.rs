//! `fastserve-sim`: run seeds, say what happened, exit with 1 if a contract was broken.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command line prints")]

use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

use fastserve_sim::check::Counters;
use fastserve_sim::{Summary, run, scenario};

const USAGE: &str = "\
Run the scheduler on simulated workloads with faults injected, and check every contract.

Usage: fastserve-sim [--seed N | --seeds A..B] [--steps-in-flight K] [--trace] [--quiet]

  --seed N              one seed (default 0)
  --seeds A..B          seeds A to B - 1
  --steps-in-flight K   steps planned ahead of their commit, 1 to 8 (default: 1, 2 and 4)
  --trace               print every event: step, free, held and cached blocks, event
  --quiet               print failures only
";

struct Options {
    seeds: std::ops::Range<u64>,
    steps_in_flight: Vec<u32>,
    trace: bool,
    quiet: bool,
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Option<Options>, String> {
    let mut options =
        Options { seeds: 0..1, steps_in_flight: vec![1, 2, 4], trace: false, quiet: false };
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word} wants a value"));
        let number = |text: &str| {
            text.parse::<u64>().map_err(|_| format!("{text} is not a number, as {word} wants"))
        };
        match word.as_str() {
            "--seed" => {
                let seed = number(&value()?)?;
                options.seeds = seed..seed + 1;
            }
            "--seeds" => {
                let text = value()?;
                let (first, end) =
                    text.split_once("..").ok_or_else(|| format!("{text}: want A..B"))?;
                options.seeds = number(first)?..number(end)?;
            }
            "--steps-in-flight" => {
                let steps = number(&value()?)?;
                if !(1..=8).contains(&steps) {
                    return Err(format!("--steps-in-flight {steps}: want 1 to 8"));
                }
                options.steps_in_flight = vec![steps as u32];
            }
            "--trace" => options.trace = true,
            "--quiet" => options.quiet = true,
            "--help" | "-h" => return Ok(None),
            _ => return Err(format!("unknown argument {word}")),
        }
    }
    Ok(Some(options))
}

fn main() -> ExitCode {
    let options = match parse(std::env::args().skip(1)) {
        Ok(Some(options)) => options,
        Ok(None) => {
            print!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("{error}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match run_all(&options, &mut io::stdout().lock()) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(num_failures) => {
            eprintln!("{num_failures} runs broke a contract");
            ExitCode::FAILURE
        }
        // Whoever read the output went away (`| head`): no panic, and the code a shell expects.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => ExitCode::from(141),
        Err(error) => {
            eprintln!("cannot print: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Run every seed. Returns how many runs broke a contract.
fn run_all(options: &Options, out: &mut impl Write) -> io::Result<u64> {
    let mut num_failures = 0;
    for &steps in &options.steps_in_flight {
        let mut total = Total::default();
        for seed in options.seeds.clone() {
            let run = run(&scenario(seed, steps));
            if options.trace {
                writeln!(out, "{}", run.trace.tail(usize::MAX))?;
            }
            match run.outcome {
                Ok(summary) => total.add(&summary),
                Err(failure) => {
                    num_failures += 1;
                    writeln!(out, "{failure}\n")?;
                }
            }
        }
        if !options.quiet {
            writeln!(out, "{steps} in flight: {total}")?;
        }
    }
    Ok(num_failures)
}

/// What all runs did together.
#[derive(Default)]
struct Total {
    num_runs: u64,
    num_requests: u64,
    num_seqs: u64,
    sum: Counters,
}

impl Total {
    fn add(&mut self, summary: &Summary) {
        self.num_runs += 1;
        self.num_requests += summary.num_requests;
        self.num_seqs += summary.num_seqs;
        self.sum.add(&summary.counters);
    }
}

impl std::fmt::Display for Total {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { num_runs, num_requests, num_seqs, sum } = self;
        let [_, stop, length, abort, error] = sum.num_finished;
        write!(
            f,
            "{num_runs} seeds passed; {num_requests} requests, {num_seqs} sequences \
             ({stop} stop, {length} length, {abort} abort, {error} error by injected faults)\n  \
             {} steps, {} failed; {} tokens, {} recomputed, {} of {} looked up were cached\n  \
             {} preemptions, {} rollbacks, {} forks, {} blocks copied, {} offloaded, {} fetched",
            sum.num_steps,
            sum.num_failed_steps,
            sum.num_scheduled_tokens,
            sum.num_recomputed_tokens,
            sum.prefix_cache_hits,
            sum.prefix_cache_queries,
            sum.num_preemptions,
            sum.num_rollbacks,
            sum.num_forks,
            sum.num_copied_blocks,
            sum.transfers.num_offloaded_blocks,
            sum.transfers.num_fetched_blocks,
        )
    }
}
