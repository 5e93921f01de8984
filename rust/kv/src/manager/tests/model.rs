//! A manager that is too simple to be wrong: every prefix is a list, every search a scan.
//!
//! It does not say which of the free blocks an allocation takes; it is told, and checks that they were
//! free. Everything else it knows.

use fastserve_base::{Namespace, Span, StepId, Token};

/// All that a block of a sequence is equal by, from the sequence's start to the block's end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Prefix {
    pub(super) namespace: Namespace,
    pub(super) tokens: Vec<Token>,
    pub(super) spans: Vec<Span>,
}

/// What a sequence computes.
#[derive(Debug, Clone)]
pub(super) struct Content {
    pub(super) namespace: Namespace,
    pub(super) tokens: Vec<Token>,
    pub(super) spans: Vec<Span>,
}

impl Content {
    /// The first `num_tokens` tokens. `None` if there are not as many.
    pub(super) fn prefix(&self, num_tokens: usize) -> Option<Prefix> {
        let tokens = self.tokens.get(..num_tokens)?.to_vec();
        let spans = self.spans.iter().filter(|span| (span.start as usize) < num_tokens);
        Some(Prefix { namespace: self.namespace, tokens, spans: spans.copied().collect() })
    }
}

#[derive(Debug, Clone)]
pub(super) struct Node {
    pub(super) block: u32,
    pub(super) prefix: Prefix,
    pub(super) step: StepId,
    pub(super) last_use: u64,
}

#[derive(Debug, Clone)]
pub(super) struct Seq {
    pub(super) content: Content,
    pub(super) blocks: Vec<u32>,
    pub(super) num_shared: usize,
    pub(super) is_broken: bool,
}

#[derive(Debug, Clone)]
pub(super) struct Model {
    pub(super) num_blocks: u32,
    pub(super) block_size: usize,
    pub(super) enable_prefix_caching: bool,
    pub(super) nodes: Vec<Node>,
    pub(super) seqs: Vec<Option<Seq>>,
    pub(super) now: u64,
    pub(super) num_evicted: u64,
}

impl Model {
    pub(super) fn num_uses(&self, block: u32) -> usize {
        let tables = self.seqs.iter().flatten().flat_map(|seq| &seq.blocks);
        tables.filter(|held| **held == block).count()
    }

    pub(super) fn node(&self, prefix: &Prefix) -> Option<&Node> {
        self.nodes.iter().find(|node| node.prefix == *prefix)
    }

    pub(super) fn is_node(&self, block: u32) -> bool {
        self.nodes.iter().any(|node| node.block == block)
    }

    pub(super) fn cached(&self) -> Vec<&Node> {
        self.nodes.iter().filter(|node| self.num_uses(node.block) == 0).collect()
    }

    pub(super) fn free(&self) -> Vec<u32> {
        let is_free = |block: &u32| self.num_uses(*block) == 0 && !self.is_node(*block);
        (0..self.num_blocks).filter(is_free).collect()
    }

    /// Nodes that follow the first `index` blocks of `content`, within `max_tokens` tokens.
    pub(super) fn matched(&self, content: &Content, index: usize, max_tokens: usize) -> Vec<u32> {
        let size = self.block_size;
        let ends = (index + 1..).map(|end| end * size).take_while(|end| *end <= max_tokens);
        let nodes = ends.map_while(|end| self.node(&content.prefix(end)?));
        nodes.map(|node| node.block).collect()
    }

    /// Whether some node's path goes through this one.
    fn has_child(&self, node: &Node) -> bool {
        let len = node.prefix.tokens.len();
        self.nodes.iter().any(|other| {
            let other = &other.prefix;
            let Prefix { namespace, tokens, spans } = other.clone();
            let prefix = Content { namespace, tokens, spans }.prefix(len);
            other.tokens.len() > len && prefix.as_ref() == Some(&node.prefix)
        })
    }

    /// Make room for `n` blocks: evict as many cached leaves as are missing, oldest first.
    pub(super) fn make_room(&mut self, n: usize) {
        for _ in self.free().len()..n {
            let leaves = self.cached().into_iter().filter(|node| !self.has_child(node));
            let oldest = leaves.min_by_key(|node| (node.last_use, node.block)).expect("a leaf");
            let block = oldest.block;
            self.nodes.retain(|node| node.block != block);
            self.num_evicted += 1;
        }
    }

    pub(super) fn share(&mut self, slot: usize, num_full: usize, step: StepId) {
        let seq = self.seqs[slot].clone().expect("open");
        if seq.is_broken || !self.enable_prefix_caching {
            return;
        }
        for index in seq.num_shared..num_full {
            let prefix = seq.content.prefix((index + 1) * self.block_size).expect("known tokens");
            let block = seq.blocks[index];
            let equal = self.node(&prefix).map(|node| node.block);
            let above = seq.content.prefix(index * self.block_size).expect("known tokens");
            let step = self.node(&above).map_or(step, |parent| step.max(parent.step));
            if equal.is_none() {
                self.nodes.push(Node { block, prefix, step, last_use: 0 });
            }
            let seq = self.seqs[slot].as_mut().expect("open");
            if equal.is_some_and(|equal| equal != block) {
                seq.is_broken = true;
                return;
            }
            seq.num_shared += 1;
        }
    }

    pub(super) fn close(&mut self, slot: usize) {
        self.now += 1;
        let seq = self.seqs[slot].take().expect("open");
        for block in seq.blocks {
            let is_unused = self.num_uses(block) == 0;
            for node in self.nodes.iter_mut().filter(|node| node.block == block && is_unused) {
                node.last_use = self.now;
            }
        }
    }

    pub(super) fn step_failed(&mut self, from: StepId) {
        self.nodes.retain(|node| node.step < from);
        let nodes: Vec<u32> = self.nodes.iter().map(|node| node.block).collect();
        for seq in self.seqs.iter_mut().flatten() {
            let shared = &seq.blocks[..seq.num_shared];
            seq.num_shared = shared.iter().take_while(|block| nodes.contains(block)).count();
        }
    }

    pub(super) fn reset(&mut self) {
        self.nodes.clear();
        for seq in self.seqs.iter_mut().flatten() {
            seq.is_broken = true;
            seq.num_shared = 0;
        }
    }
}
