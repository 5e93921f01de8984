//! Child links of the whole tree: one open-addressing table from chain hash to block.
//!
//! Linear probing at a load of at most one half. A removed entry leaves no tombstone: the entries
//! after it move back, so that lookups stay as short as if it had never been there. An entry keeps
//! the upper half of the hash, which gives both the place where the search for it starts and most of
//! the certainty that it is the right one.
//!
//! Equal hashes may stand side by side; the caller looks at the blocks and chooses.

use std::iter;
use std::num::NonZeroU32;

use fastserve_base::BlockId;
use prefetch_index::prefetch_index;

/// A block's number plus one, so that an empty entry takes no more room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Number(NonZeroU32);

impl Number {
    fn new(block: BlockId) -> Self {
        Self(NonZeroU32::MIN.saturating_add(block.0))
    }

    fn block(self) -> BlockId {
        BlockId(self.0.get() - 1)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    tag: u32,
    number: Option<Number>,
}

impl Entry {
    const EMPTY: Self = Self { tag: 0, number: None };
}

/// Blocks by chain hash. Nothing allocates after `new`.
#[derive(Clone)]
pub(crate) struct ChildTable {
    entries: Vec<Entry>,
    /// Bits of the tag below those that number the entries.
    shift: u32,
}

impl ChildTable {
    /// Empty, with room for `capacity` blocks.
    pub(crate) fn new(capacity: u32) -> Self {
        let num_entries = (capacity as usize * 2).next_power_of_two();
        assert!((2..=1 << 31).contains(&num_entries), "capacity={capacity}: want 1 to 2^30");
        Self { entries: vec![Entry::EMPTY; num_entries], shift: 32 - num_entries.ilog2() }
    }

    /// Blocks with this hash, or one that differs in the lower half only. Most often one or none.
    #[inline]
    pub(crate) fn find(&self, hash: u64) -> impl Iterator<Item = BlockId> {
        let tag = tag(hash);
        let mut index = self.home(tag);
        iter::from_fn(move || {
            loop {
                let entry = self.entries[index];
                let number = entry.number?;
                index = self.after(index);
                if entry.tag == tag {
                    return Some(number.block());
                }
            }
        })
    }

    /// Ask memory for the place where a search for `hash` starts.
    #[inline]
    pub(crate) fn prefetch(&self, hash: u64) {
        prefetch_index(&self.entries, self.home(tag(hash)));
    }

    /// The first that [`find`](Self::find) gives, for many hashes.
    #[inline]
    pub(crate) fn find_first(&self, hashes: &[u64], found: &mut [Option<BlockId>]) {
        // Where each search starts, before any goes on: these loads wait for memory together, where
        // the searches, which branch on what they find, would queue. Most end there.
        for (&hash, found) in hashes.iter().zip(&mut *found) {
            let entry = self.entries[self.home(tag(hash))];
            *found = entry.number.filter(|_| entry.tag == tag(hash)).map(Number::block);
        }
        for (&hash, found) in hashes.iter().zip(found) {
            *found = found.or_else(|| self.find(hash).next());
        }
    }

    /// Add a block that is not in the table.
    pub(crate) fn insert(&mut self, hash: u64, block: BlockId) {
        let tag = tag(hash);
        let mut index = self.home(tag);
        while self.entries[index].number.is_some() {
            index = self.after(index);
        }
        self.entries[index] = Entry { tag, number: Some(Number::new(block)) };
    }

    /// Take out a block that was inserted under this hash.
    pub(crate) fn remove(&mut self, hash: u64, block: BlockId) {
        let mut hole = self.home(tag(hash));
        while self.entries[hole].number != Some(Number::new(block)) {
            assert!(self.entries[hole].number.is_some(), "{block:?} is not in the table");
            hole = self.after(hole);
        }
        let mut index = self.after(hole);
        while self.entries[index].number.is_some() {
            let start = self.home(self.entries[index].tag);
            if self.distance(start, index) >= self.distance(hole, index) {
                self.entries[hole] = self.entries[index];
                hole = index;
            }
            index = self.after(index);
        }
        self.entries[hole] = Entry::EMPTY;
    }

    /// Forget every block.
    pub(crate) fn clear(&mut self) {
        self.entries.fill(Entry::EMPTY);
    }

    /// Number of blocks in the table. O(capacity).
    pub(crate) fn count(&self) -> usize {
        self.entries.iter().filter(|entry| entry.number.is_some()).count()
    }

    /// Where the search for a tag starts.
    #[inline]
    fn home(&self, tag: u32) -> usize {
        (tag >> self.shift) as usize
    }

    #[inline]
    fn after(&self, index: usize) -> usize {
        (index + 1) & (self.entries.len() - 1)
    }

    /// Steps from one index on to another, around the end of the table.
    fn distance(&self, from: usize, to: usize) -> usize {
        to.wrapping_sub(from) & (self.entries.len() - 1)
    }
}

#[inline]
fn tag(hash: u64) -> u32 {
    (hash >> 32) as u32
}

#[cfg(test)]
mod tests;
