//! Asking memory ahead for what a call is going to touch. Nothing here changes anything, or answers.
//!
//! In a pool of millions of blocks each table entry, node and child link is a load that waits for
//! memory, and one block's loads wait for each other. Asked for ahead, those of many blocks wait
//! together.

use fastserve_base::{RowSlot, Token};
use prefetch_index::prefetch_index;

use super::{KvManager, SeqKey};
use crate::tree::PrefixTree;

impl KvManager {
    /// The place of block `index` in the table of `slot`.
    #[inline]
    pub fn prefetch_table(&self, slot: RowSlot, index: usize) {
        prefetch_index(&self.tables, slot.index() * self.max_blocks_per_seq + index);
    }

    /// The node that the next block of `slot` would hang from. Wants the table in the cache.
    #[inline]
    pub fn prefetch_tail(&self, slot: RowSlot) {
        if let Some(tail) = self.tail(slot) {
            self.tree.prefetch_node(tail);
        }
    }

    /// What [`share`](Self::share) touches. Wants the table, the tail and the tokens in the cache.
    #[inline]
    pub fn prefetch_share(
        &self,
        slot: RowSlot,
        key: SeqKey<'_>,
        tokens: &[Token],
        num_full: usize,
    ) {
        let state = self.slots[slot.index()];
        if state.is_broken {
            return;
        }
        let mut place = self.tree.place(self.tail(slot), key.namespace);
        for index in state.num_shared as usize..num_full.min(state.num_blocks as usize) {
            let Some(block) = self.tree.key(place, key, tokens, index) else { return };
            let own = self.block(slot, index);
            self.tree.prefetch_insertion(own, &block);
            place = PrefixTree::place_after(own, &block);
        }
    }

    /// What the evictions for `n` fresh blocks touch, as far as they take one path back to its root.
    pub fn prefetch_evictions(&self, n: usize) {
        let mut next = self.lru.first();
        for _ in self.pool.num_free()..n {
            let Some(leaf) = next else { return };
            next = self.tree.prefetch_removal(leaf);
        }
    }
}
