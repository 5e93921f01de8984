//! Prompts through the prefix tree, at fixed hit rates and the tree's steady size.
//!
//! Unit: prompt tokens per second, match, retain, allocate, share and release together. The pool is
//! filled first, so that each prompt evicts as many blocks as it adds; a bench that starts empty
//! measures the filling instead.

#![allow(clippy::print_stdout, reason = "a bench prints its results")]

mod common;

use std::time::Instant;

use common::{Random, VOCAB, percentile};
use fastserve::base::{CoreConfig, Namespace, RowSlot, StepId};
use fastserve::kv::{KvManager, SeqKey};

const BLOCK_SIZE: usize = 16;
const TREE_BLOCKS: usize = 65_536;
const PROMPT: usize = 2048;
const NUM_PROMPTS: usize = 4000;

struct Tree {
    kv: KvManager,
    random: Random,
    recent: Vec<Vec<u32>>,
    step: u64,
}

impl Tree {
    fn warmed(hit_percent: usize) -> Self {
        let config = CoreConfig {
            block_size: BLOCK_SIZE as u32,
            num_blocks: TREE_BLOCKS as u32,
            max_model_len: 2 * PROMPT as u32,
            max_num_seqs: 8,
            vocab_size: VOCAB,
            ..CoreConfig::default()
        };
        let mut tree =
            Self { kv: KvManager::new(&config), random: Random(3), recent: Vec::new(), step: 0 };
        while tree.kv.counts().free > 0 {
            let prompt = tree.draw(hit_percent);
            tree.serve(&prompt);
        }
        tree
    }

    fn draw(&mut self, hit_percent: usize) -> Vec<u32> {
        let hit = if self.recent.is_empty() { 0 } else { PROMPT * hit_percent / 100 };
        let mut prompt = Vec::with_capacity(PROMPT);
        if hit > 0 {
            let which = self.random.below(self.recent.len() as u32) as usize;
            prompt.extend_from_slice(&self.recent[which][..hit]);
        }
        prompt.extend(self.random.tokens(PROMPT - hit));
        if self.recent.len() == 128 {
            self.recent.remove(0);
        }
        self.recent.push(prompt.clone());
        prompt
    }

    /// One prompt, as the engine serves it. Returns the blocks matched.
    fn serve(&mut self, prompt: &[u32]) -> usize {
        let slot = RowSlot(0);
        let key = SeqKey { namespace: Namespace::default(), spans: &[] };
        self.step += 1;
        let probe = self.kv.probe(key, prompt, prompt.len() - 1);
        self.kv.open(slot, key.namespace);
        self.kv.adopt(slot);
        let blocks = prompt.len() / BLOCK_SIZE;
        let fresh = blocks - probe.num_blocks as usize;
        self.kv.allocate(slot, fresh).expect("the pool holds one prompt");
        self.kv.share(slot, key, prompt, blocks, StepId(self.step));
        self.kv.step_committed(StepId(self.step));
        self.kv.close(slot);
        probe.num_blocks as usize
    }
}

fn main() {
    for hit_percent in [0, 50, 95] {
        let mut tree = Tree::warmed(hit_percent);
        let evicted = tree.kv.num_evicted_blocks();
        let mut samples = Vec::with_capacity(NUM_PROMPTS);
        let mut matched = 0;
        for _ in 0..NUM_PROMPTS {
            let prompt = tree.draw(hit_percent);
            let begin = Instant::now();
            matched += tree.serve(&prompt);
            samples.push(begin.elapsed().as_nanos() as f64);
        }
        tree.kv.check();
        let blocks = (NUM_PROMPTS * PROMPT / BLOCK_SIZE) as f64;
        let median = percentile(&mut samples, 50.0);
        println!(
            "{{\"bench\": \"tree\", \"hit_percent\": {hit_percent}, \"mtokens_per_s\": {:.1}, \
             \"us_per_prompt\": {:.2}, \"p99_us\": {:.2}, \"hit_rate\": {:.3}, \
             \"evictions_per_prompt\": {:.1}}}",
            PROMPT as f64 * 1e3 / median,
            median / 1000.0,
            percentile(&mut samples, 99.0) / 1000.0,
            matched as f64 / blocks,
            (tree.kv.num_evicted_blocks() - evicted) as f64 / NUM_PROMPTS as f64,
        );
    }
}
