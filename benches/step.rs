//! plan + commit of a step of decode rows, the pool full.
//!
//! Unit: microseconds a step. The load is stationary: a tenth of the rows are short requests of 10
//! tokens, so that 1 % of all rows finish and are replaced in every step; the others are long, and
//! make the mean context. All contents are distinct. The pool is filled with cached blocks first, so
//! every allocation evicts. Prefix caching and timelines are on. Submitting happens between steps, on
//! what would be another thread, and is not timed.
//!
//! One JSON line a case: the median, the 99th percentile and the worst step, the allocations that plan
//! and commit made in all timed steps together, and the instructions of a step. These are counted by
//! valgrind, where there is one, and where filling the pool below it takes no minutes: in the smaller
//! cases, and in those asked for by `--rows`.

#![allow(clippy::print_stdout, reason = "a bench prints its results")]

mod common;

use std::time::Instant;

use common::{Counting, Random, VOCAB, allocations, instructions, percentile};
use fastserve::base::{CoreConfig, Request, RequestId};
use fastserve::engine::{Core, Inbox, Results, StepOutputs};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const BLOCK_SIZE: u32 = 16;
const NUM_STEPS: usize = 400;
/// Tokens in use up to which instructions are counted without being asked for.
const MAX_COUNTED_TOKENS: usize = 1 << 20;
/// With 9 of its 10 output tokens computed, a short request fills a block to the last slot.
const SHORT_PROMPT: usize = 7;
const SHORT_OUTPUT: u32 = 10;

struct Load {
    core: Core,
    inbox: Inbox,
    arena: Vec<i32>,
    counts: Vec<i32>,
    tokens: Vec<i32>,
    outputs: StepOutputs,
    random: Random,
    next_id: u64,
    num_short: usize,
    now: u64,
}

impl Load {
    fn new(rows: usize, context: usize, num_steps: usize) -> Self {
        let num_short = (rows / 10).max(1);
        let num_long = rows - num_short;
        let long_prompt = (context * rows / num_long).next_multiple_of(BLOCK_SIZE as usize);
        let max_model_len = 2 * long_prompt + num_steps + 1024;
        let live_blocks = num_long * (3 * long_prompt / 2 + num_steps + 64) / BLOCK_SIZE as usize;
        let config = CoreConfig {
            block_size: BLOCK_SIZE,
            num_blocks: (live_blocks + live_blocks / 8 + 8 * rows) as u32,
            max_model_len: max_model_len as u32,
            max_num_seqs: rows as u32,
            max_num_batched_tokens: (2 * rows).max(8192) as u32,
            max_num_output_rows: rows as u32,
            vocab_size: VOCAB,
            max_num_queued_requests: 2 * rows as u32,
            max_num_queued_tokens: u64::MAX,
            ..CoreConfig::default()
        };
        let core = Core::new(config).expect("the configuration is good");
        let mut load = Self {
            inbox: core.inbox(),
            arena: vec![0; core.layout().words],
            counts: vec![1; rows],
            tokens: vec![0; rows],
            outputs: StepOutputs::with_capacity(2 * rows),
            random: Random(1),
            next_id: 0,
            num_short,
            now: 0,
            core,
        };
        load.fill_pool(long_prompt);
        for row in 0..num_long {
            // Half to one and a half of the mean, evenly.
            let prompt = long_prompt / 2 + long_prompt * row / num_long;
            load.submit(prompt, u32::MAX);
        }
        load.run_until_idle_queue();
        for short in 0..num_short {
            load.submit(SHORT_PROMPT, 1 + (short % SHORT_OUTPUT as usize) as u32);
        }
        load.run_until_idle_queue();
        for _ in 0..3 * SHORT_OUTPUT {
            load.step();
        }
        load
    }

    /// Cached blocks of ended requests, until no block is free.
    fn fill_pool(&mut self, prompt: usize) {
        while self.core.stats().free > 0 {
            for _ in 0..8 {
                self.submit(prompt, 1);
            }
            while self.core.stats().num_running + self.inbox.stats().num_waiting > 0 {
                self.step_without_refill();
            }
        }
    }

    fn submit(&mut self, prompt: usize, max_tokens: u32) {
        self.next_id += 1;
        let tokens = self.random.tokens(prompt);
        let request = Request::new(RequestId(self.next_id), tokens, max_tokens);
        self.inbox.submit(request).expect("the request is good");
    }

    fn run_until_idle_queue(&mut self) {
        while self.inbox.stats().num_waiting > 0 {
            self.step_without_refill();
        }
    }

    /// Plan and commit once; nanoseconds of both together.
    fn step_without_refill(&mut self) -> u64 {
        for token in &mut self.tokens {
            *token = self.random.below(VOCAB) as i32;
        }
        let begin = Instant::now();
        self.plan_and_commit();
        let nanos = begin.elapsed().as_nanos() as u64;
        self.core.take_outputs(&mut self.outputs);
        nanos
    }

    /// What is measured. [`instructions`] counts what happens below this name.
    #[inline(never)]
    fn plan_and_commit(&mut self) {
        self.now += 10_000_000;
        let sizes = self.core.plan(self.now, &mut self.arena).expect("a step can be planned");
        if sizes.num_rows == 0 {
            return;
        }
        let outputs = sizes.num_outputs as usize;
        let results = Results { counts: &self.counts[..outputs], tokens: &self.tokens[..outputs] };
        self.now += 10_000_000;
        self.core.commit(sizes.step, self.now, results).expect("the results fit");
    }

    /// A step, and new short requests for those that finished in it.
    fn step(&mut self) -> u64 {
        let nanos = self.step_without_refill();
        let finished = self.outputs.finish_reasons.iter().filter(|&&code| code != 0).count();
        for _ in 0..finished {
            self.submit(SHORT_PROMPT, SHORT_OUTPUT);
        }
        nanos
    }
}

fn measure(rows: usize, context: usize, num_steps: usize, instructions: Option<u64>) {
    let mut load = Load::new(rows, context, num_steps);
    let evicted = load.core.stats().num_evicted_blocks;
    let mut samples = Vec::with_capacity(num_steps);
    let mut allocated = 0;
    for _ in 0..num_steps {
        let before = allocations();
        let nanos = load.step_without_refill();
        allocated += allocations() - before;
        samples.push(nanos as f64 / 1000.0);
        let finished = load.outputs.finish_reasons.iter().filter(|&&code| code != 0).count();
        for _ in 0..finished {
            load.submit(SHORT_PROMPT, SHORT_OUTPUT);
        }
    }
    load.core.check();
    let stats = load.core.stats();
    assert_eq!(stats.num_preemptions, 0, "the load is stationary");
    assert_eq!(stats.free, 0, "every allocation evicts");
    let evicted = (stats.num_evicted_blocks - evicted) as f64 / num_steps as f64;
    let median = percentile(&mut samples, 50.0);
    let instructions = instructions.map_or_else(|| "null".to_owned(), |count| count.to_string());
    println!(
        "{{\"bench\": \"step\", \"rows\": {rows}, \"context\": {context}, \"us\": {median:.2}, \
         \"instructions\": {instructions}, \"p99_us\": {:.2}, \"worst_us\": {:.2}, \"ns_per_row\": {:.1}, \"ceiling_us\": {:.2}, \
         \"allocations\": {allocated}, \"evictions_per_step\": {evicted:.1}, \
         \"short_rows\": {}, \"steps\": {num_steps}}}",
        percentile(&mut samples, 99.0),
        percentile(&mut samples, 100.0),
        median * 1000.0 / rows as f64,
        0.15 * rows as f64 + 5.0,
        load.num_short,
    );
}

/// The value after `name` on the command line.
fn argument(name: &str) -> Option<usize> {
    let value = std::env::args().skip_while(|argument| argument != name).nth(1)?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name} takes a number, not {value:?}")))
}

/// Instructions of a step of this case, if they are to be counted and can be.
fn count(rows: usize, context: usize, asked: bool) -> Option<u64> {
    let counted = std::env::args().any(|argument| argument == instructions::COUNTED);
    if counted || !(asked || rows * context <= MAX_COUNTED_TOKENS) {
        return None;
    }
    let case = [("--rows", rows), ("--context", context)];
    let arguments: Vec<_> =
        case.iter().flat_map(|(name, value)| [(*name).to_owned(), value.to_string()]).collect();
    instructions::of_a_step("plan_and_commit", &arguments)
}

fn main() {
    let (only_rows, only_context) = (argument("--rows"), argument("--context"));
    let num_steps = argument("--steps").unwrap_or(NUM_STEPS);
    for rows in [64, 256, 1024, 4096] {
        for context in [1024, 8192, 32_768] {
            if only_rows.is_none_or(|only| only == rows)
                && only_context.is_none_or(|only| only == context)
            {
                let instructions = count(rows, context, only_rows.is_some());
                measure(rows, context, num_steps, instructions);
            }
        }
    }
}
