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

    /// Uses of the block at `index` of `slot`: more than one, and others hold it too.
    pub fn num_uses(&self, slot: RowSlot, index: usize) -> u32 {
        self.pool.num_uses(BlockId(self.table(slot)[index] as u32))
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
        BlockCounts { free, held: capacity - free - cached, cached, capacity }
    }

    /// Cached blocks evicted to make room, since construction.
    pub fn num_evicted_blocks(&self) -> u64 {
        self.num_evicted
    }

    /// Leading blocks, at most `limit`, that the tables of `a` and `b` have in common. O(log blocks).
    pub fn num_shared_leading(&self, a: RowSlot, b: RowSlot, limit: usize) -> usize {
        let (a, b) = (self.table(a), self.table(b));
        let (mut num_equal, mut end) = (0, limit.min(a.len()).min(b.len()));
        // Most often the tables part at once, or not at all.
        if end > 0 && a[0] == b[0] {
            num_equal = if a[end - 1] == b[end - 1] { end } else { 1 };
        }
        // Tables that share a block agree on all before it.
        while 0 < num_equal && num_equal < end {
            let middle = usize::midpoint(num_equal, end);
            if a[middle] == b[middle] {
                num_equal = middle + 1;
            } else {
                end = middle;
            }
        }
        num_equal
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
        let mut namespaces = vec![None; self.pool.capacity()];
        let mut infos = Vec::new();
        let mut path = Vec::new();
        for block in self.blocks().filter(|&block| self.tree.contains(block)) {
            let mut next = Some(block);
            while let Some(node) = next.filter(|node| namespaces[node.index()].is_none()) {
                path.push(node);
                next = self.tree.parent(node);
            }
            for node in path.drain(..).rev() {
                let parent = self.tree.parent(node);
                let namespace = parent
                    .and_then(|parent| namespaces[parent.index()])
                    .unwrap_or_else(|| self.tree.namespace(node));
                namespaces[node.index()] = Some(namespace);
                infos.push(BlockInfo {
                    block: node,
                    parent,
                    namespace,
                    num_uses: self.pool.num_uses(node),
                    hash: self.events.as_ref().map(|events| events.hash(node)),
                    tier: CacheTier::Device,
                });
            }
        }
        infos
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
        let mut before = vec![None; self.pool.capacity()];
        for slot in (0..self.slots.len() as u32).map(RowSlot) {
            self.check_slot(slot);
            let mut previous = None;
            for &block in self.table(slot) {
                num_uses[block as usize] += 1;
                let known = before[block as usize].get_or_insert(previous);
                assert_eq!(*known, previous, "block before {block} in the table of {slot:?}");
                previous = Some(block);
            }
        }
        for block in self.blocks() {
            assert_eq!(self.pool.num_uses(block), num_uses[block.index()], "uses of {block:?}");
            self.check_block(block);
        }
    }

    fn check_slot(&self, slot: RowSlot) {
        let state = self.slots[slot.index()];
        assert!(state.num_shared <= state.num_blocks, "{slot:?}: {state:?}");
        assert!(state.is_open || state.num_blocks == 0, "closed {slot:?}: {state:?}");
        let mut parent = None;
        for &block in &self.table(slot)[..state.num_shared as usize] {
            let block = BlockId(block as u32);
            assert!(self.tree.contains(block), "{block:?} of {slot:?} is a node");
            assert_eq!(self.tree.parent(block), parent, "parent of {block:?} of {slot:?}");
            if parent.is_none() {
                assert_eq!(self.tree.namespace(block), state.namespace, "namespace of {block:?}");
            }
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
                assert!(last_use <= parents, "{block:?} was used after its parent {parent:?}");
            }
            (state, parents) => panic!("{block:?} is {state:?}, its parent {parent:?} {parents:?}"),
        }
    }
}
