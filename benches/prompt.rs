//! A 4,096-token prompt through match and admission, at three hit rates.
//!
//! Unit: microseconds a prompt. The pool is full and its tree holds 100,000 blocks. `prompt` is a
//! whole `plan` of an otherwise idle core: intake, match, retaining the hit, a fresh block (each an
//! eviction) for every 16 tokens of the rest, putting those into the tree, and writing the plan's
//! words for every token to compute. `match` is the lookup alone, `admit` match, retaining and the
//! fresh blocks, both through the KV manager. `submit` happens on the caller's thread.

#![allow(clippy::print_stdout, reason = "a bench prints its results")]

mod common;

use std::hint::black_box;
use std::time::Instant;

use common::{Counting, Random, VOCAB, allocations, percentile};
use fastserve::base::{CoreConfig, Namespace, Request, RequestId, RowSlot, StepId};
use fastserve::engine::{Core, Results, StepOutputs};
use fastserve::kv::{KvManager, SeqKey};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const BLOCK_SIZE: usize = 16;
const TREE_BLOCKS: usize = 100_000;
const PROMPT: usize = 4096;
const NUM_PROMPTS: usize = TREE_BLOCKS * BLOCK_SIZE / PROMPT;
const NUM_SAMPLES: usize = 2000;

fn config() -> CoreConfig {
    CoreConfig {
        block_size: BLOCK_SIZE as u32,
        num_blocks: TREE_BLOCKS as u32,
        max_model_len: 2 * PROMPT as u32,
        max_num_seqs: 64,
        max_num_batched_tokens: 2 * PROMPT as u32,
        vocab_size: VOCAB,
        ..CoreConfig::default()
    }
}

/// An idle core whose pool is full of cached prompts.
struct Load {
    core: Core,
    arena: Vec<i32>,
    outputs: StepOutputs,
    random: Random,
    cached: Vec<Vec<u32>>,
    next_id: u64,
}

impl Load {
    fn new() -> Self {
        let core = Core::new(config()).expect("the configuration is good");
        let mut load = Self {
            arena: vec![0; core.layout().words],
            core,
            outputs: StepOutputs::with_capacity(256),
            random: Random(7),
            cached: Vec::new(),
            next_id: 0,
        };
        while load.core.stats().free > 0 {
            let prompt = load.random.tokens(PROMPT);
            load.serve(prompt);
        }
        load
    }

    /// Submit, plan and commit one prompt; nanoseconds of submit and plan.
    fn serve(&mut self, prompt: Vec<u32>) -> (u64, u64) {
        self.next_id += 1;
        self.remember(prompt.clone());
        let inbox = self.core.inbox();
        let request = Request::new(RequestId(self.next_id), prompt, 1);
        let begin = Instant::now();
        inbox.submit(request).expect("the request is good");
        let submitted = begin.elapsed();
        let begin = Instant::now();
        let sizes = self.core.plan(self.next_id, &mut self.arena).expect("a step can be planned");
        let planned = begin.elapsed();
        assert_eq!((sizes.num_rows, sizes.num_outputs), (1, 1));
        let results = Results { counts: &[1], tokens: &[0] };
        self.core.commit(sizes.step, self.next_id, results).expect("the results fit");
        self.core.take_outputs(&mut self.outputs);
        (submitted.as_nanos() as u64, planned.as_nanos() as u64)
    }

    /// Hits are drawn from the younger half: the older is being evicted.
    fn remember(&mut self, prompt: Vec<u32>) {
        self.cached.push(prompt);
        if self.cached.len() > NUM_PROMPTS / 2 {
            self.cached.remove(0);
        }
    }

    /// A prompt of which `percent` are cached.
    fn prompt(&mut self, percent: usize) -> Vec<u32> {
        let hit = PROMPT * percent / 100;
        let which = self.random.below(self.cached.len() as u32) as usize;
        let mut prompt = self.cached[which][..hit].to_vec();
        prompt.extend(self.random.tokens(PROMPT - hit));
        if percent == 100 {
            // One more token, so that every cached block can be matched.
            prompt.push(self.random.below(VOCAB));
        }
        prompt
    }
}

fn measure_admission(percent: usize) {
    let mut load = Load::new();
    let (mut submits, mut plans) = (Vec::new(), Vec::new());
    let before = load.core.stats();
    let mut allocated = 0;
    for _ in 0..NUM_SAMPLES {
        let prompt = load.prompt(percent);
        let count = allocations();
        let (submit, plan) = load.serve(prompt);
        allocated += allocations() - count;
        submits.push(submit as f64 / 1000.0);
        plans.push(plan as f64 / 1000.0);
    }
    let after = load.core.stats();
    let hits = after.prefix_cache_hits - before.prefix_cache_hits;
    let queries = after.prefix_cache_queries - before.prefix_cache_queries;
    println!(
        "{{\"bench\": \"prompt\", \"hit_percent\": {percent}, \"tokens\": {PROMPT}, \
         \"us\": {:.2}, \"p99_us\": {:.2}, \"hit_rate\": {:.3}, \"allocations_per_prompt\": {:.1}, \"tree_blocks\": {}}}",
        percentile(&mut plans, 50.0),
        percentile(&mut plans, 99.0),
        hits as f64 / queries as f64,
        allocated as f64 / NUM_SAMPLES as f64,
        after.cached,
    );
    if percent == 0 {
        println!(
            "{{\"bench\": \"submit\", \"tokens\": {PROMPT}, \"us\": {:.2}, \"p99_us\": {:.2}}}",
            percentile(&mut submits, 50.0),
            percentile(&mut submits, 99.0),
        );
    }
}

/// The lookup alone, and with what admission does to blocks.
fn measure_match(percent: usize) {
    let mut load = Load::new();
    let mut kv = KvManager::new(&config());
    let slot = RowSlot(0);
    let key = SeqKey { namespace: Namespace::default(), spans: &[] };
    let blocks = PROMPT / BLOCK_SIZE;
    let mut step = 0;
    let mut cache = |kv: &mut KvManager, prompt: &[u32]| {
        step += 1;
        kv.share(slot, key, prompt, blocks, StepId(step));
        kv.step_committed(StepId(step));
        kv.close(slot);
    };
    while kv.counts().free > 0 {
        let prompt = load.random.tokens(PROMPT);
        kv.open(slot, key.namespace);
        kv.allocate(slot, blocks).expect("the pool holds them");
        cache(&mut kv, &prompt);
    }
    for prompt in &load.cached {
        kv.open(slot, key.namespace);
        kv.allocate(slot, blocks).expect("the pool holds them");
        cache(&mut kv, prompt);
    }
    let (mut matches, mut admissions) = (Vec::new(), Vec::new());
    for _ in 0..NUM_SAMPLES {
        let prompt = load.prompt(percent);
        let begin = Instant::now();
        let probe = black_box(kv.probe(key, black_box(&prompt), prompt.len() - 1));
        let looked_up = begin.elapsed();
        kv.open(slot, key.namespace);
        kv.adopt(slot);
        kv.allocate(slot, blocks - probe.num_blocks as usize).expect("the pool holds them");
        admissions.push(begin.elapsed().as_nanos() as f64 / 1000.0);
        matches.push(looked_up.as_nanos() as f64 / 1000.0);
        assert_eq!(probe.num_blocks as usize, blocks * percent / 100);
        cache(&mut kv, &prompt);
        load.remember(prompt);
    }
    kv.check();
    for (bench, samples) in [("match", &mut matches), ("admit", &mut admissions)] {
        println!(
            "{{\"bench\": \"{bench}\", \"hit_percent\": {percent}, \"tokens\": {PROMPT}, \"us\": {:.2}, \
             \"p99_us\": {:.2}}}",
            percentile(samples, 50.0),
            percentile(samples, 99.0),
        );
    }
}

fn main() {
    for percent in [0, 75, 100] {
        measure_match(percent);
    }
    for percent in [0, 75, 100] {
        measure_admission(percent);
    }
}
