//! Fixed-capacity pool of KV-cache blocks.
//!
//! ```text
//!             take                 release (last use)
//!   Free ────────────▶ Held(n) ──────────────────────▶ Free
//!    ▲                  │   ▲
//!    │ evict    release │   │ retain (prefix hit)
//!    └───── Cached ◀────┘   │
//!             └─────────────┘
//! ```
//!
//! The pool knows states and counts, not prefixes: whoever releases a block says whether it is worth
//! keeping, and whoever needs room says which block to evict.
//!
//! # Invariants
//!
//! Checked by [`BlockPool::check`].
//!
//! 1. Conservation: every block is in exactly one of `Free`, `Held`, `Cached`.
//! 2. `free` lists each `Free` block once, and nothing else.
//! 3. `Held` carries the number of uses of the block, which is never zero.
//!
//! # Cost
//!
//! Everything is O(1). Nothing allocates after `new`.

use std::num::NonZeroU32;

use fastserve_base::BlockId;

/// What a block is to the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockState {
    /// Holds nothing.
    Free,
    /// In use by this many.
    Held(NonZeroU32),
    /// Used by nobody, kept for a later match.
    Cached {
        /// Value of the logical counter when its last use ended.
        last_use: u64,
    },
}

/// A [`BlockState`] in eight bytes: 0, the number of uses, or the last use with the top bit set.
///
/// Adopting or closing a long sequence touches as many states as it has blocks, so their size counts.
#[derive(Debug, Clone, Copy)]
struct PackedState(u64);

impl PackedState {
    const FREE: Self = Self(0);
    const CACHED: u64 = 1 << 63;

    #[inline]
    fn new(state: BlockState) -> Self {
        match state {
            BlockState::Free => Self::FREE,
            BlockState::Held(uses) => Self(u64::from(uses.get())),
            BlockState::Cached { last_use } => Self(Self::CACHED | last_use),
        }
    }

    #[inline]
    fn get(self) -> BlockState {
        if self.0 & Self::CACHED != 0 {
            return BlockState::Cached { last_use: self.0 & !Self::CACHED };
        }
        NonZeroU32::new(self.0 as u32).map_or(BlockState::Free, BlockState::Held)
    }
}

/// States of all blocks, and a list of the free ones.
#[derive(Clone)]
pub(crate) struct BlockPool {
    states: Vec<PackedState>,
    free: Vec<BlockId>,
    num_cached: usize,
}

impl BlockPool {
    /// `capacity` free blocks. Low ids go first.
    pub(crate) fn new(capacity: u32) -> Self {
        Self {
            states: vec![PackedState::FREE; capacity as usize],
            free: (0..capacity).rev().map(BlockId).collect(),
            num_cached: 0,
        }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.states.len()
    }

    pub(crate) fn num_free(&self) -> usize {
        self.free.len()
    }

    pub(crate) fn num_cached(&self) -> usize {
        self.num_cached
    }

    #[inline]
    pub(crate) fn state(&self, block: BlockId) -> BlockState {
        self.states[block.index()].get()
    }

    #[inline]
    pub(crate) fn set_state(&mut self, block: BlockId, state: BlockState) {
        self.states[block.index()] = PackedState::new(state);
    }

    /// Uses of `block`: 0 unless it is held.
    #[inline]
    pub(crate) fn num_uses(&self, block: BlockId) -> u32 {
        match self.state(block) {
            BlockState::Held(uses) => uses.get(),
            BlockState::Free | BlockState::Cached { .. } => 0,
        }
    }

    /// When the last use of `block` ended, if it is cached.
    #[inline]
    pub(crate) fn last_use(&self, block: BlockId) -> Option<u64> {
        match self.state(block) {
            BlockState::Cached { last_use } => Some(last_use),
            BlockState::Free | BlockState::Held(_) => None,
        }
    }

    /// The block freed last, now with one use. `None` if no block is free.
    pub(crate) fn take(&mut self) -> Option<BlockId> {
        let block = self.free.pop()?;
        self.set_state(block, BlockState::Held(NonZeroU32::MIN));
        Some(block)
    }

    /// Begin a use of a block that is held or cached.
    #[inline]
    pub(crate) fn retain(&mut self, block: BlockId) {
        let uses = match self.state(block) {
            BlockState::Held(uses) => uses.checked_add(1).expect("more uses than sequences"),
            BlockState::Cached { .. } => {
                self.num_cached -= 1;
                NonZeroU32::MIN
            }
            BlockState::Free => panic!("{block:?} is free and cannot be retained"),
        };
        self.set_state(block, BlockState::Held(uses));
    }

    /// End a use of a held block. After the last it becomes cached, last used at `keep`, or free.
    #[inline]
    pub(crate) fn release(&mut self, block: BlockId, keep: Option<u64>) {
        let state = self.state(block);
        let BlockState::Held(uses) = state else {
            panic!("{block:?} is not held and cannot be released: {state:?}")
        };
        let rest = NonZeroU32::new(uses.get() - 1).map(BlockState::Held);
        let unused = || keep.map(|last_use| BlockState::Cached { last_use });
        let state = rest.or_else(unused).unwrap_or(BlockState::Free);
        self.set_state(block, state);
        match state {
            BlockState::Held(_) => {}
            BlockState::Cached { .. } => self.num_cached += 1,
            BlockState::Free => self.free.push(block),
        }
    }

    /// Make a cached block free.
    pub(crate) fn evict(&mut self, block: BlockId) {
        let state = self.state(block);
        assert!(matches!(state, BlockState::Cached { .. }), "{block:?} is not cached: {state:?}");
        self.set_state(block, BlockState::Free);
        self.num_cached -= 1;
        self.free.push(block);
    }

    /// Panic if an invariant of the module header is broken. O(capacity).
    pub(crate) fn check(&self) {
        let count = |want: fn(BlockState) -> bool| {
            self.states.iter().filter(|state| want(state.get())).count()
        };
        let num_free = count(|state| matches!(state, BlockState::Free));
        let num_cached = count(|state| matches!(state, BlockState::Cached { .. }));
        assert_eq!(num_free, self.free.len(), "free count");
        assert_eq!(num_cached, self.num_cached, "cached count");
        let mut listed = vec![false; self.states.len()];
        for &block in &self.free {
            assert_eq!(self.state(block), BlockState::Free, "{block:?} listed free");
            assert!(!listed[block.index()], "{block:?} listed free twice");
            listed[block.index()] = true;
        }
    }
}

#[cfg(test)]
mod tests;
