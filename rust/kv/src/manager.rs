//! Block tables of the running sequences, over one pool and one prefix tree.
//!
//! This file is about blocks: opening and closing sequences, giving them fresh blocks, forks. What
//! sequences share, and until when, is in `sharing`; what can be seen and checked is in `inspect`.
//!
//! # Invariants
//!
//! Checked by [`KvManager::check`].
//!
//! 1. A block has as many uses as it has places in the tables of open slots.
//! 2. The first `num_shared` blocks of a slot are nodes of the tree, each the parent of the next, the
//!    first one in the slot's namespace.
//! 3. Tables that have a block in common agree on all before it.
//! 4. Whoever holds a node holds its ancestors. So what is below a cached node is cached, and every
//!    cached block can be evicted, leaves first.
//! 5. Cached blocks are nodes, free blocks are not. A cached node was used no earlier than its
//!    children. What can be evicted at once, the cached leaves, is in the heap of `lru`.
//!
//! # Cost
//!
//! `allocate` is O(n), and O(log blocks) for each eviction; `close` and `fork` are O(blocks of the
//! slot).

mod inspect;
mod prefetch;
mod sharing;

use fastserve_base::fault::{Fault, planted};
use fastserve_base::{BlockId, CoreConfig, Namespace, RowSlot, Span, StepId};

use crate::events::EventLog;
use crate::lru::Lru;
use crate::pool::BlockPool;
use crate::tree::PrefixTree;

/// What a sequence's blocks are keyed by, beside its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SeqKey<'a> {
    /// Who may share the blocks.
    pub namespace: Namespace,
    /// Stretches whose meaning is not their tokens, sorted by start, not overlapping.
    pub spans: &'a [Span],
}

/// What a match found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Probe {
    /// Blocks matched.
    pub num_blocks: u32,
    /// Of them, blocks in state cached: adopting makes them held, so
    /// [`available`](KvManager::available) falls by this many.
    pub num_cached: u32,
}

/// Blocks in each state. `free + held + cached == capacity`, always.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockCounts {
    /// Blocks that hold nothing.
    pub free: usize,
    /// Blocks in the table of at least one sequence.
    pub held: usize,
    /// Blocks that no sequence uses, kept for a later match.
    pub cached: usize,
    /// Blocks in the pool.
    pub capacity: usize,
}

/// More blocks were asked for than are free or cached. Nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{requested} blocks wanted, {free} are free and {cached} cached; end or preempt a sequence"
)]
pub struct OutOfBlocks {
    /// Blocks asked for.
    pub requested: usize,
    /// Blocks free.
    pub free: usize,
    /// Blocks cached, all of them evictable.
    pub cached: usize,
}

/// A row slot, as the manager sees it. Closed slots are all zero.
#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    namespace: Namespace,
    num_blocks: u32,
    num_shared: u32,
    is_open: bool,
    is_broken: bool,
}

/// What the last probe found, until a block changes.
#[derive(Debug, Clone, Copy)]
struct LastProbe {
    /// The running sequence that it extends, if any.
    slot: Option<RowSlot>,
    tail: Option<BlockId>,
    next_hash: Option<u64>,
}

/// Block pool, prefix tree and block tables as one.
///
/// A row slot is *open* from [`open`](Self::open) to [`close`](Self::close). Its table's first
/// [`num_shared`](Self::num_shared) blocks are in the tree, one below the other; the rest are its own
/// (or its forks'). Its chain is *broken* when it may share no more blocks: it computed a block that
/// the tree already had, or the cache was reset under it. It keeps working; only its later blocks are
/// not cached.
///
/// Calls that break a rule stated at the call panic: they are bugs of the caller.
#[derive(Clone)]
pub struct KvManager {
    pool: BlockPool,
    tree: PrefixTree,
    lru: Lru,
    slots: Vec<Slot>,
    /// `[max_num_seqs, max_blocks_per_seq]`.
    tables: Vec<i32>,
    max_blocks_per_seq: usize,
    enable_prefix_caching: bool,
    /// Counts closes: the time that `lru` goes by.
    clock: u64,
    last_committed: StepId,
    num_evicted: u64,
    /// Blocks that the last probe matched.
    path: Vec<BlockId>,
    last_probe: Option<LastProbe>,
    events: Option<EventLog>,
}

impl KvManager {
    /// Everything free, nothing cached. `config` is validated.
    pub fn new(config: &CoreConfig) -> Self {
        let max_blocks_per_seq = config.max_blocks_per_seq() as usize;
        let max_num_seqs = config.max_num_seqs as usize;
        Self {
            pool: BlockPool::new(config.num_blocks),
            tree: PrefixTree::new(config),
            lru: Lru::new(config.num_blocks),
            slots: vec![Slot::default(); max_num_seqs],
            tables: vec![0; max_num_seqs * max_blocks_per_seq],
            max_blocks_per_seq,
            enable_prefix_caching: config.enable_prefix_caching,
            clock: 0,
            last_committed: StepId(0),
            num_evicted: 0,
            path: Vec::with_capacity(max_blocks_per_seq),
            last_probe: None,
            events: config.enable_block_events.then(|| EventLog::new(config.num_blocks)),
        }
    }

    /// Start a sequence in `slot` with an empty table. The slot must not be open.
    pub fn open(&mut self, slot: RowSlot, namespace: Namespace) {
        let state = &mut self.slots[slot.index()];
        assert!(!state.is_open, "{slot:?} is open already");
        *state = Slot { namespace, is_open: true, ..Slot::default() };
    }

    /// Append `n` fresh blocks to the table of `slot`, or change nothing.
    ///
    /// Takes free blocks first, then evicts exactly as many cached ones as are missing: leaves of the
    /// tree, longest unused first. The table has room for them (`max_blocks_per_seq`).
    ///
    /// # Errors
    ///
    /// [`OutOfBlocks`] if fewer than `n` blocks are free or cached.
    pub fn allocate(&mut self, slot: RowSlot, n: usize) -> Result<(), OutOfBlocks> {
        self.want_available(n)?;
        if n > 1 {
            self.prefetch_evictions(n);
        }
        for _ in 0..n {
            let block = self.take_block();
            self.append(slot, block);
        }
        Ok(())
    }

    /// Give `to`, open and empty in the same namespace, the whole table of `from`: one more use of
    /// each block.
    ///
    /// Before either writes into a block that both use, it calls
    /// [`copy_on_write`](Self::copy_on_write).
    pub fn fork(&mut self, from: RowSlot, to: RowSlot) {
        let source = self.open_slot(from);
        let target = self.open_slot(to);
        assert_eq!(target.num_blocks, 0, "blocks of {to:?}, which is to be a fork");
        assert_eq!(target.namespace, source.namespace, "namespace of {to:?}");
        self.last_probe = None;
        for index in 0..source.num_blocks as usize {
            let block = self.block(from, index);
            self.pool.retain(block);
            self.append(to, block);
        }
        self.slots[to.index()] = source;
    }

    /// Make the block at `index` of `slot` its own, before the sequence writes into it.
    ///
    /// If others use the block too, a fresh one takes its place in the table, and the answer is
    /// `(source, destination)` of the copy to make before the step's writes. The block is not in the
    /// tree: a shared block is never written again. It is the last of the table that others use.
    ///
    /// # Errors
    ///
    /// [`OutOfBlocks`] if a fresh block is needed and none is free or cached.
    pub fn copy_on_write(
        &mut self,
        slot: RowSlot,
        index: usize,
    ) -> Result<Option<(BlockId, BlockId)>, OutOfBlocks> {
        let num_blocks = self.open_slot(slot).num_blocks as usize;
        assert!(index < num_blocks, "{slot:?} has {num_blocks} blocks, none at {index}");
        let source = self.block(slot, index);
        assert!(!self.tree.contains(source), "{source:?} is shared and must not be written");
        if self.pool.num_uses(source) == 1 || planted(Fault::CopyOnWriteSkipped) {
            return Ok(None);
        }
        self.want_available(1)?;
        let destination = self.take_block();
        self.pool.release(source, None);
        self.tables[slot.index() * self.max_blocks_per_seq + index] = destination.0 as i32;
        Ok(Some((source, destination)))
    }

    /// End the sequence in `slot`: one use less of each of its blocks.
    ///
    /// A block that nobody uses any more becomes cached if it is in the tree, otherwise free. All
    /// blocks cached by one close are equally old. Blocks named by a step in flight must not be
    /// closed before that step has committed.
    pub fn close(&mut self, slot: RowSlot) {
        let state = self.open_slot(slot);
        self.last_probe = None;
        self.clock += 1;
        let num_shared = state.num_shared as usize;
        for index in (num_shared..state.num_blocks as usize).rev() {
            let block = self.block(slot, index);
            let keep = self.tree.contains(block).then_some(self.clock);
            self.pool.release(block, keep);
            self.insert_if_evictable(block);
        }
        for index in (0..num_shared).rev() {
            self.pool.release(self.block(slot, index), Some(self.clock));
        }
        // The others have the next one as a child.
        if let Some(tail) = self.tail(slot) {
            self.insert_if_evictable(tail);
        }
        self.slots[slot.index()] = Slot::default();
    }

    /// The slot, which the caller says is open.
    fn open_slot(&self, slot: RowSlot) -> Slot {
        let state = self.slots[slot.index()];
        assert!(state.is_open, "{slot:?} is not open");
        state
    }

    fn block(&self, slot: RowSlot, index: usize) -> BlockId {
        BlockId(self.tables[slot.index() * self.max_blocks_per_seq + index] as u32)
    }

    /// Put a block that is held on its behalf at the end of the table of `slot`.
    fn append(&mut self, slot: RowSlot, block: BlockId) {
        let state = &mut self.slots[slot.index()];
        let index = state.num_blocks as usize;
        assert!(state.is_open, "{slot:?} is not open");
        assert!(
            index < self.max_blocks_per_seq,
            "the table of {slot:?} is full with {index} blocks"
        );
        self.tables[slot.index() * self.max_blocks_per_seq + index] = block.0 as i32;
        state.num_blocks += 1;
    }

    fn want_available(&self, requested: usize) -> Result<(), OutOfBlocks> {
        let (free, cached) = (self.pool.num_free(), self.pool.num_cached());
        if requested > free + cached {
            return Err(OutOfBlocks { requested, free, cached });
        }
        Ok(())
    }

    /// A fresh block with one use, of those that are available.
    fn take_block(&mut self) -> BlockId {
        self.last_probe = None;
        if self.pool.num_free() == 0 {
            self.evict();
        }
        self.pool.take().expect("a block was available")
    }

    /// Free the cached leaf that was unused for longest.
    fn evict(&mut self) {
        let leaf = self.lru.first().expect("a cached block has a leaf below it");
        let parent = self.forget(leaf);
        self.pool.evict(leaf);
        self.num_evicted += 1;
        match parent.and_then(|parent| Some((parent, self.evictable_since(parent)?))) {
            Some((parent, last_use)) => self.lru.replace_first(parent, last_use),
            None => self.lru.remove(leaf),
        }
    }

    /// Take a leaf out of the tree. Returns its parent.
    fn forget(&mut self, leaf: BlockId) -> Option<BlockId> {
        if let Some(events) = &mut self.events {
            events.removed(leaf);
        }
        self.tree.remove(leaf)
    }

    /// When the last use of `block` ended, if it is a cached leaf.
    fn evictable_since(&self, block: BlockId) -> Option<u64> {
        self.pool.last_use(block).filter(|_| self.tree.is_leaf(block))
    }

    fn insert_if_evictable(&mut self, block: BlockId) {
        if let Some(last_use) = self.evictable_since(block) {
            self.lru.insert(block, last_use);
        }
    }
}

#[cfg(test)]
mod tests;
