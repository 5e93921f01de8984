//! Which cached block goes first: an indexed heap of the evictable ones.
//!
//! Ordered by the logical counter at the end of the last use, then by block id, so that the order is
//! total and a replay evicts the same blocks. Every block's place in the heap is known, so that a
//! block that is used again leaves it in O(log n). Four children a node: half the levels of a binary
//! heap, and the four keys are neighbours in memory.
//!
//! # Invariants
//!
//! Checked by [`Lru::check`].
//!
//! 1. No key is smaller than its parent's.
//! 2. `places[block]` is where `heap` has the block, and absent for every other block.

use std::num::NonZeroU32;

use fastserve_base::BlockId;

const ARITY: usize = 4;

/// What the heap is ordered by. Smallest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    last_use: u64,
    block: BlockId,
}

/// A position in the heap, plus one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place(NonZeroU32);

impl Place {
    fn new(index: usize) -> Self {
        Self(NonZeroU32::MIN.saturating_add(index as u32))
    }

    fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

/// Evictable blocks, longest unused first. Nothing allocates after `new`.
#[derive(Clone)]
pub(crate) struct Lru {
    heap: Vec<Key>,
    places: Vec<Option<Place>>,
}

impl Lru {
    /// Empty, with room for blocks `0..capacity`.
    pub(crate) fn new(capacity: u32) -> Self {
        Self { heap: Vec::with_capacity(capacity as usize), places: vec![None; capacity as usize] }
    }

    pub(crate) fn contains(&self, block: BlockId) -> bool {
        self.places[block.index()].is_some()
    }

    /// The block to evict next.
    pub(crate) fn first(&self) -> Option<BlockId> {
        self.heap.first().map(|key| key.block)
    }

    /// Add a block that is not in the heap.
    pub(crate) fn insert(&mut self, block: BlockId, last_use: u64) {
        assert!(!self.contains(block), "{block:?} is in the heap already");
        let key = Key { last_use, block };
        self.heap.push(key);
        self.sift_up(self.heap.len() - 1, key);
    }

    /// Take out a block, if it is there.
    pub(crate) fn remove(&mut self, block: BlockId) {
        let Some(place) = self.places[block.index()].take() else {
            return;
        };
        let last = self.heap.pop().expect("a block with a place is in the heap");
        if last.block != block {
            self.replace(place.index(), last);
        }
    }

    /// Exchange the first block for one that is not in the heap.
    ///
    /// As `remove` and `insert`, but cheap when the new one is nearly the first: as when a leaf goes
    /// and its parent, equally old, is the next.
    pub(crate) fn replace_first(&mut self, block: BlockId, last_use: u64) {
        assert!(!self.contains(block), "{block:?} is in the heap already");
        let first = self.first().expect("a first block to replace");
        self.places[first.index()] = None;
        self.replace(0, Key { last_use, block });
    }

    /// Forget every block.
    pub(crate) fn clear(&mut self) {
        self.heap.clear();
        self.places.fill(None);
    }

    /// Put `key` where `index` was, then restore the order.
    fn replace(&mut self, index: usize, key: Key) {
        if index > 0 && key < self.heap[(index - 1) / ARITY] {
            self.sift_up(index, key);
        } else {
            self.sift_down(index, key);
        }
    }

    fn sift_up(&mut self, mut index: usize, key: Key) {
        while index > 0 {
            let parent = (index - 1) / ARITY;
            if self.heap[parent] <= key {
                break;
            }
            self.put(index, self.heap[parent]);
            index = parent;
        }
        self.put(index, key);
    }

    fn sift_down(&mut self, mut index: usize, key: Key) {
        loop {
            let first = index * ARITY + 1;
            let end = (first + ARITY).min(self.heap.len());
            let Some(least) = (first..end).min_by_key(|&child| self.heap[child]) else {
                break;
            };
            if key <= self.heap[least] {
                break;
            }
            self.put(index, self.heap[least]);
            index = least;
        }
        self.put(index, key);
    }

    fn put(&mut self, index: usize, key: Key) {
        self.heap[index] = key;
        self.places[key.block.index()] = Some(Place::new(index));
    }

    /// Panic if an invariant of the module header is broken, or if the heap is not exactly the blocks
    /// for which `want` gives a last use. O(capacity).
    pub(crate) fn check(&self, want: impl Fn(BlockId) -> Option<u64>) {
        for (index, key) in self.heap.iter().enumerate().skip(1) {
            assert!(self.heap[(index - 1) / ARITY] < *key, "heap order at {index}");
        }
        for (block, place) in self.places.iter().enumerate() {
            let block = BlockId(block as u32);
            let key = place.map(|place| self.heap[place.index()]);
            let wanted = want(block).map(|last_use| Key { last_use, block });
            assert_eq!(key, wanted, "place of {block:?} in the heap");
        }
        let num_placed = self.places.iter().flatten().count();
        assert_eq!(num_placed, self.heap.len(), "blocks in the heap");
    }
}

#[cfg(test)]
mod tests;
