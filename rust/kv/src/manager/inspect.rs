//! What can be seen of the manager without changing it, and the proof that it is sound.

use fastserve_base::{BlockId, RowSlot};

use super::{BlockCounts, KvManager};
use crate::pool::BlockState;
use crate::{BlockEvent, BlockInfo, CacheTier};

impl KvManager {
    /// Block tables, `[max_num_seqs, max_blocks_per_seq]`, at an address that never changes.
    ///
    /// A row's entries past [`num_blocks_of`](Self::num_blocks_of) mean nothing.
    pub fn block_tables(&self) -> &[i32] {
        &self.tables
    }

    /// Blocks in the table of `slot`. 0 for a slot that is not open.
    pub fn num_blocks_of(&self, slot: RowSlot) -> usize {
        self.slots[slot.index()].num_blocks as usize
    }

    /// The blocks of `slot`, in order.
    pub fn table(&self, slot: RowSlot) -> &[i32] {
        &self.tables[slot.index() * self.max_blocks_per_seq..][..self.num_blocks_of(slot)]
    }

    /// Leading blocks of `slot` that are in the tree.
    pub fn num_shared(&self, slot: RowSlot) -> usize {
        self.slots[slot.index()].num_shared as usize
    }

    /// Whether `slot` shares no more blocks until it is closed.
    pub fn is_broken(&self, slot: RowSlot) -> bool {
        self.slots[slot.index()].is_broken
    }

    /// Whether `slot` is between `open` and `close`.
    pub fn is_open(&self, slot: RowSlot) -> bool {
        self.slots[slot.index()].is_open
    }

    /// Blocks that [`allocate`](Self::allocate) can give: free and cached together.
    pub fn available(&self) -> usize {
        self.pool.num_free() + self.pool.num_cached()
    }

    /// Blocks in each state.
    pub fn counts(&self) -> BlockCounts {
        let (free, cached) = (self.pool.num_free(), self.pool.num_cached());
        let capacity = self.pool.capacity();
        BlockCounts {
            free,
            held: capacity - free - cached,
            cached,
            capacity,
        }
    }

    /// Cached blocks evicted to make room, since construction.
    pub fn num_evicted_blocks(&self) -> u64 {
        self.num_evicted
    }

    /// Leading blocks, at most `limit`, that the tables of `a` and `b` have in common.
    ///
    /// O(log blocks) where both share through the tree, O(blocks) after that.
    pub fn num_shared_leading(&self, a: RowSlot, b: RowSlot, limit: usize) -> usize {
        let limit = limit.min(self.num_blocks_of(a)).min(self.num_blocks_of(b));
        let (left, right) = (&self.table(a)[..limit], &self.table(b)[..limit]);
        if left.first() != right.first() {
            return 0;
        }
        // Equal nodes have equal paths, so in this part one comparison tells of all before it.
        let num_nodes = self.num_shared(a).min(self.num_shared(b)).min(limit);
        let (mut equal, mut end) = (0, num_nodes);
        while equal < end {
            let middle = end - (end - equal) / 2;
            if left[middle - 1] == right[middle - 1] {
                equal = middle;
            } else {
                end = middle - 1;
            }
        }
        if equal < num_nodes {
            return equal;
        }
        equal
            + left[equal..]
                .iter()
                .zip(&right[equal..])
                .take_while(|(a, b)| a == b)
                .count()
    }

    /// Move the events since the last call into `into`, which is cleared first.
    ///
    /// Empty unless `enable_block_events`. A block is reported when the step that writes it is
    /// planned; if that step fails, its removal is reported too.
    pub fn take_events(&mut self, into: &mut Vec<BlockEvent>) {
        into.clear();
        if let Some(events) = &mut self.events {
            events.take(into);
        }
    }

    /// Every block of the prefix tree, parents before children. O(capacity).
    pub fn snapshot(&self) -> Vec<BlockInfo> {
        let mut listed = vec![false; self.pool.capacity()];
        let mut infos = Vec::new();
        let mut path = Vec::new();
        for block in self.blocks() {
            let mut next = self.tree.contains(block).then_some(block);
            while let Some(node) = next.filter(|node| !listed[node.index()]) {
                listed[node.index()] = true;
                path.push(node);
                next = self.tree.parent(node);
            }
            infos.extend(path.drain(..).rev().map(|node| self.info(node)));
        }
        infos
    }

    fn info(&self, block: BlockId) -> BlockInfo {
        BlockInfo {
            block,
            parent: self.tree.parent(block),
            namespace: self.tree.namespace(block),
            num_uses: self.pool.num_uses(block),
            hash: self.events.as_ref().map(|events| events.hash(block)),
            tier: CacheTier::Device,
        }
    }

    pub(super) fn blocks(&self) -> impl Iterator<Item = BlockId> + use<> {
        (0..self.pool.capacity() as u32).map(BlockId)
    }

    /// Panic if an invariant is broken. O(capacity + slots × blocks).
    pub fn check(&self) {
        self.pool.check();
        self.tree.check();
        self.lru.check(|block| self.evictable_since(block));
        let mut num_uses = vec![0; self.pool.capacity()];
        for slot in (0..self.slots.len() as u32).map(RowSlot) {
            self.check_slot(slot);
            for &block in self.table(slot) {
                num_uses[block as usize] += 1;
            }
        }
        for block in self.blocks() {
            assert_eq!(
                self.pool.num_uses(block),
                num_uses[block.index()],
                "uses of {block:?}"
            );
            self.check_block(block);
        }
    }

    fn check_slot(&self, slot: RowSlot) {
        let state = self.slots[slot.index()];
        assert!(state.num_shared <= state.num_blocks, "{slot:?}: {state:?}");
        assert!(
            state.is_open || state.num_blocks == 0,
            "closed {slot:?}: {state:?}"
        );
        let mut parent = None;
        for &block in &self.table(slot)[..state.num_shared as usize] {
            let block = BlockId(block as u32);
            assert!(self.tree.contains(block), "{block:?} of {slot:?} is a node");
            assert_eq!(
                self.tree.parent(block),
                parent,
                "parent of {block:?} of {slot:?}"
            );
            assert_eq!(
                self.tree.namespace(block),
                state.namespace,
                "{block:?} of {slot:?}"
            );
            parent = Some(block);
        }
    }

    fn check_block(&self, block: BlockId) {
        let is_node = self.tree.contains(block);
        match self.pool.state(block) {
            BlockState::Free => assert!(!is_node, "free {block:?} is not a node"),
            BlockState::Cached { .. } => assert!(is_node, "cached {block:?} is a node"),
            BlockState::Held(_) => {}
        }
        let Some(parent) = self.tree.parent(block) else {
            return;
        };
        match (self.pool.state(block), self.pool.state(parent)) {
            (_, BlockState::Held(_)) => {}
            (BlockState::Cached { last_use }, BlockState::Cached { last_use: parents }) => {
                assert!(
                    last_use <= parents,
                    "{block:?} was used after its parent {parent:?}"
                );
            }
            (state, parents) => panic!("{block:?} is {state:?}, its parent {parent:?} {parents:?}"),
        }
    }
}
