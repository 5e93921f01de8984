//! Prefix tree over whole blocks: a node is a block, its path from the root a prefix.
//!
//! ```text
//!   links[block]       parent and spans, all that a match reads beside the tokens
//!   tokens[block, ..]  the block's tokens
//!   nodes[block]       chain hash, writing step, number of children
//!   namespaces[block]  who may share a first block, and so all below it
//!   children           chain hash → block, for all links of the tree at once
//! ```
//!
//! The node of block *b* is entry *b* of every array, so the tree is sized by the pool and a block is a
//! node or is not. The hash finds a candidate; parent, tokens, spans and, for a first block, the
//! namespace decide. The rest of a path has its namespace from its first block.
//!
//! # Invariants
//!
//! Checked by [`PrefixTree::check`].
//!
//! 1. The parent of a node is a node, written by the same step or before.
//! 2. `num_children` counts the nodes with that parent.
//! 3. No two nodes have the same key, and every node is found under its key.
//! 4. A node's hash is the chain hash of its key.
//!
//! # Cost
//!
//! A match hashes a batch of blocks, looks all of them up, then compares: none of the three waits
//! for memory more than once a batch. Inserting and removing are O(1).

use std::num::NonZeroU32;

use fastserve_base::fault::{Fault, planted};
use fastserve_base::{BlockId, CoreConfig, Namespace, Span, StepId, Token};
use prefetch_index::prefetch_index;

use crate::SeqKey;
use crate::hash::ChainHasher;
use crate::spans::{SpanArena, SpanList, overlapping};
use crate::table::ChildTable;

/// Blocks that a match hashes and looks up at once: few at first, for what matches little.
const FIRST_BATCH: usize = 8;
const BATCH: usize = 128;

/// Bytes that come from memory together.
const CACHE_LINE: usize = 64;

/// What a node hangs from: the root, or a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Parent(NonZeroU32);

impl Parent {
    const ROOT: Self = Self(NonZeroU32::MAX);

    fn new(block: Option<BlockId>) -> Self {
        block.map_or(Self::ROOT, |block| Self(NonZeroU32::MIN.saturating_add(block.0)))
    }

    fn block(self) -> Option<BlockId> {
        (self != Self::ROOT).then(|| BlockId(self.0.get() - 1))
    }
}

/// The part of a block's key beside its tokens. `parent` is `None` for a block that is not a node.
#[derive(Debug, Clone, Copy, Default)]
struct Link {
    parent: Option<Parent>,
    spans: SpanList,
}

/// What is known of a node that a match does not need.
#[derive(Debug, Clone, Copy, Default)]
struct Node {
    hash: u64,
    step: StepId,
    num_children: u32,
}

/// Where a block would stand: the end of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    /// Last block of the path, `None` at the root.
    pub(crate) tail: Option<BlockId>,
    /// Chain hash of the path.
    hash: u64,
}

/// All that makes a block the same as another, and the hash that finds it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockKey<'a> {
    pub(crate) parent: Option<BlockId>,
    pub(crate) namespace: Namespace,
    pub(crate) tokens: &'a [Token],
    pub(crate) spans: &'a [Span],
    pub(crate) hash: u64,
}

/// Whole-block prefixes. Nothing allocates after `new`, except for spans.
#[derive(Clone)]
pub(crate) struct PrefixTree {
    block_size: usize,
    hasher: ChainHasher,
    links: Vec<Link>,
    nodes: Vec<Node>,
    tokens: Vec<Token>,
    /// Where the tokens of block 0 begin, so that a block of 16 is one cache line.
    first_token: usize,
    namespaces: Vec<Namespace>,
    children: ChildTable,
    spans: SpanArena,
}

impl PrefixTree {
    /// Empty, with room for every block of the pool.
    pub(crate) fn new(config: &CoreConfig) -> Self {
        let (num_blocks, block_size) = (config.num_blocks as usize, config.block_size as usize);
        let tokens = vec![0; num_blocks * block_size + CACHE_LINE / size_of::<Token>()];
        let first_token = tokens.as_ptr().align_offset(CACHE_LINE);
        Self {
            block_size,
            hasher: ChainHasher::new(config.hash_seed, block_size),
            links: vec![Link::default(); num_blocks],
            nodes: vec![Node::default(); num_blocks],
            first_token: first_token.min(tokens.len() - num_blocks * block_size),
            tokens,
            namespaces: vec![Namespace(0); num_blocks],
            children: ChildTable::new(config.num_blocks),
            spans: SpanArena::new(num_blocks),
        }
    }

    /// Keep only these bits of every hash, so that blocks collide.
    #[cfg(test)]
    pub(crate) fn set_hash_mask(&mut self, mask: u64) {
        self.hasher.mask = mask;
    }

    /// Whether `block` is a node.
    #[inline]
    pub(crate) fn contains(&self, block: BlockId) -> bool {
        self.links[block.index()].parent.is_some()
    }

    /// Whether `block` is a node without children.
    #[inline]
    pub(crate) fn is_leaf(&self, block: BlockId) -> bool {
        self.contains(block) && self.nodes[block.index()].num_children == 0
    }

    /// The node before `block`, `None` for a first block (and for a block that is not a node).
    pub(crate) fn parent(&self, block: BlockId) -> Option<BlockId> {
        self.links[block.index()].parent?.block()
    }

    /// Step that writes `block`, or the latest one that writes its path.
    pub(crate) fn step(&self, block: BlockId) -> StepId {
        self.nodes[block.index()].step
    }

    /// Who may share `block`, a first block.
    #[inline]
    pub(crate) fn namespace(&self, block: BlockId) -> Namespace {
        self.namespaces[block.index()]
    }

    /// Ask memory for what it takes to put a block below `block`.
    #[inline]
    pub(crate) fn prefetch_node(&self, block: BlockId) {
        prefetch_index(&self.nodes, block.index());
        prefetch_index(&self.links, block.index());
    }

    /// Ask memory for what it takes to remove `block`. Returns its parent.
    #[inline]
    pub(crate) fn prefetch_removal(&self, block: BlockId) -> Option<BlockId> {
        self.children.prefetch(self.nodes[block.index()].hash);
        self.parent(block)
    }

    /// Ask memory for what it takes to make `block` a node with this key.
    #[inline]
    pub(crate) fn prefetch_insertion(&self, block: BlockId, key: &BlockKey<'_>) {
        self.children.prefetch(key.hash);
        self.prefetch_node(block);
        prefetch_index(&self.tokens, self.first_token + block.index() * self.block_size);
    }

    /// Where a sequence goes on whose path ends with `tail`.
    #[inline]
    pub(crate) fn place(&self, tail: Option<BlockId>, namespace: Namespace) -> Place {
        let hash =
            tail.map_or_else(|| self.hasher.root(namespace), |tail| self.nodes[tail.index()].hash);
        Place { tail, hash }
    }

    /// Where a sequence goes on after `block` with this key, which need not be a node yet.
    #[inline]
    pub(crate) fn place_after(block: BlockId, key: &BlockKey<'_>) -> Place {
        Place { tail: Some(block), hash: key.hash }
    }

    /// Key of block `index` of a sequence, were it at `place`. `None` if `tokens` ends before it does.
    #[inline]
    pub(crate) fn key<'a>(
        &self,
        place: Place,
        seq: SeqKey<'a>,
        tokens: &'a [Token],
        index: usize,
    ) -> Option<BlockKey<'a>> {
        let tokens = tokens.get(index * self.block_size..(index + 1) * self.block_size)?;
        let spans = overlapping(seq.spans, index, tokens);
        let hash = self.hash(place.hash, tokens, spans);
        Some(BlockKey { parent: place.tail, namespace: seq.namespace, tokens, spans, hash })
    }

    /// Append to `path` the blocks that follow `place` and hold the whole blocks of `tokens` from
    /// block `index` on, as far as the tree has them. Returns where that ends.
    pub(crate) fn match_path(
        &self,
        place: Place,
        seq: SeqKey<'_>,
        tokens: &[Token],
        index: usize,
        path: &mut Vec<BlockId>,
    ) -> Place {
        let rest = tokens.get(index * self.block_size..).unwrap_or_default();
        // The sizes that engines use: a constant lets the compiler unroll hashing and comparing.
        match self.block_size {
            // Most often: a sequence that has just filled a block, and knows no more.
            size if rest.len() < size => place,
            8 => self.match_blocks(8, place, seq, rest, index, path),
            16 => self.match_blocks(16, place, seq, rest, index, path),
            32 => self.match_blocks(32, place, seq, rest, index, path),
            any => self.match_blocks(any, place, seq, rest, index, path),
        }
    }

    /// [`match_path`](Self::match_path) for `rest`, the tokens from block `index` on.
    #[expect(clippy::inline_always, reason = "see match_path")]
    #[inline(always)]
    fn match_blocks(
        &self,
        block_size: usize,
        mut place: Place,
        seq: SeqKey<'_>,
        mut rest: &[Token],
        mut index: usize,
        path: &mut Vec<BlockId>,
    ) -> Place {
        let mut hashes = [0; BATCH];
        let mut candidates = [None; BATCH];
        let mut likely = [false; BATCH];
        let mut batch_size = FIRST_BATCH;
        while rest.len() >= block_size {
            let (batch, after) = rest.split_at(rest.len().min(batch_size * block_size));
            let blocks = batch.chunks_exact(block_size);
            (rest, batch_size) = (after, BATCH.min(batch_size * 4));

            let mut hash = place.hash;
            for (i, tokens) in blocks.clone().enumerate() {
                hash = self.hash(hash, tokens, overlapping(seq.spans, index + i, tokens));
                hashes[i] = hash;
            }
            self.children.find_first(&hashes[..blocks.len()], &mut candidates);
            // A word of every candidate before the whole of any: these loads wait for memory
            // together, where the comparisons below, which branch on what they find, would queue.
            let mut parent = place.tail;
            for ((tokens, candidate), likely) in blocks.clone().zip(&candidates).zip(&mut likely) {
                let Some(block) = *candidate else { break };
                let is_child = self.links[block.index()].parent == Some(Parent::new(parent));
                *likely = is_child & (self.tokens(block, block_size)[0] == tokens[0]);
                parent = Some(block);
            }
            let found = candidates.iter().zip(&likely).zip(&hashes);
            for (tokens, ((&candidate, &likely), &hash)) in blocks.zip(found) {
                let Some(candidate) = candidate else { return place };
                let spans = overlapping(seq.spans, index, tokens);
                let (parent, namespace) = (place.tail, seq.namespace);
                let key = BlockKey { parent, namespace, tokens, spans, hash };
                let block = if likely && self.holds(candidate, &key) {
                    candidate
                } else {
                    let Some(other) = self.find(&key) else { return place };
                    other
                };
                path.push(block);
                place = Place { tail: Some(block), hash };
                index += 1;
            }
        }
        place
    }

    /// The node with this key.
    #[inline]
    pub(crate) fn find(&self, key: &BlockKey<'_>) -> Option<BlockId> {
        self.children.find(key.hash).find(|&block| self.holds(block, key))
    }

    /// Make `block` a node, written by `step`. There is none with this key.
    pub(crate) fn insert(&mut self, block: BlockId, key: &BlockKey<'_>, step: StepId) {
        let step = key.parent.map_or(step, |parent| {
            let parent = &mut self.nodes[parent.index()];
            parent.num_children += 1;
            step.max(parent.step)
        });
        assert!(!self.contains(block), "{block:?} is a node already");
        let spans = self.spans.store(key.spans);
        self.links[block.index()] = Link { parent: Some(Parent::new(key.parent)), spans };
        self.nodes[block.index()] = Node { hash: key.hash, step, num_children: 0 };
        if key.parent.is_none() {
            self.namespaces[block.index()] = key.namespace;
        }
        let first = self.first_token + block.index() * self.block_size;
        self.tokens[first..first + self.block_size].copy_from_slice(key.tokens);
        self.children.insert(key.hash, block);
    }

    /// Take out a leaf. Returns its parent, unless that is the root.
    pub(crate) fn remove(&mut self, leaf: BlockId) -> Option<BlockId> {
        let link = std::mem::take(&mut self.links[leaf.index()]);
        let parent = link.parent.expect("a node to remove").block();
        let node = &self.nodes[leaf.index()];
        assert_eq!(node.num_children, 0, "children of {leaf:?}");
        self.children.remove(node.hash, leaf);
        self.spans.release(link.spans);
        let parent = parent?;
        self.nodes[parent.index()].num_children -= 1;
        Some(parent)
    }

    /// Take out every node. O(capacity).
    pub(crate) fn clear(&mut self) {
        self.links.fill(Link::default());
        self.nodes.fill(Node::default());
        self.children.clear();
        self.spans.clear();
    }

    /// Whether `block` has exactly this key.
    #[expect(clippy::inline_always, reason = "see match_path")]
    #[inline(always)]
    fn holds(&self, block: BlockId, key: &BlockKey<'_>) -> bool {
        let link = self.links[block.index()];
        link.parent == Some(Parent::new(key.parent))
            && (key.parent.is_some()
                || self.namespace(block) == key.namespace
                || planted(Fault::NamespaceIgnored))
            && (same_tokens(
                significant(self.tokens(block, key.tokens.len())),
                significant(key.tokens),
            ) || planted(Fault::HashTakenForEquality))
            && (self.spans.equals(link.spans, key.spans) || planted(Fault::SpanDigestIgnored))
    }

    #[expect(clippy::inline_always, reason = "see match_path")]
    #[inline(always)]
    fn hash(&self, parent: u64, tokens: &[Token], spans: &[Span]) -> u64 {
        let spans = if planted(Fault::SpanDigestIgnored) { &[] } else { spans };
        self.hasher.next(parent, significant(tokens), spans)
    }

    /// Tokens of a node. The caller gives the block size, where it may know it as a constant.
    #[inline]
    fn tokens(&self, block: BlockId, block_size: usize) -> &[Token] {
        &self.tokens[self.first_token + block.index() * block_size..][..block_size]
    }

    /// Panic if an invariant of the module header is broken. O(capacity).
    pub(crate) fn check(&self) {
        let all = (0..self.nodes.len() as u32).map(BlockId);
        let mut num_children = vec![0; self.nodes.len()];
        let (mut num_nodes, mut num_spans) = (0, 0);
        for block in all.filter(|&block| self.contains(block)) {
            let spans: Vec<Span> =
                self.spans.iter(self.links[block.index()].spans).copied().collect();
            let parent = self.parent(block);
            if let Some(parent) = parent {
                assert!(self.contains(parent), "parent of {block:?} is a node");
                assert!(self.step(parent) <= self.step(block), "step of {block:?}");
                num_children[parent.index()] += 1;
            }
            let (namespace, tokens) = (self.namespace(block), self.tokens(block, self.block_size));
            let hash = self.hash(self.place(parent, namespace).hash, tokens, &spans);
            assert_eq!(self.nodes[block.index()].hash, hash, "chain hash of {block:?}");
            let key = BlockKey { parent, namespace, tokens, spans: &spans, hash };
            assert_eq!(self.find(&key), Some(block), "node found under its key");
            num_nodes += 1;
            num_spans += spans.len();
        }
        for (node, num_children) in self.nodes.iter().zip(num_children) {
            assert_eq!(node.num_children, num_children, "number of children");
        }
        assert_eq!(self.children.count(), num_nodes, "links");
        assert_eq!(self.spans.num_live(), num_spans, "spans");
    }
}

/// The tokens of a block that its key holds: all of them.
#[inline]
fn significant(tokens: &[Token]) -> &[Token] {
    if planted(Fault::PartialBlockMatched) { &tokens[..tokens.len().div_ceil(2)] } else { tokens }
}

/// Equality without branches but the loop's, which the compiler turns into a few wide instructions.
#[expect(clippy::inline_always, reason = "see match_path")]
#[inline(always)]
fn same_tokens(a: &[Token], b: &[Token]) -> bool {
    a.iter().zip(b).fold(0, |differences, (a, b)| differences | (a ^ b)) == 0
}

#[cfg(test)]
mod tests;
