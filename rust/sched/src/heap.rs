//! A binary heap of numbered items that can also remove from its middle.
//!
//! Items are small integers (`0..items`), each at most once. `positions` says where each stands, so
//! that `remove` is O(log n). Nothing allocates while the items fit what was reserved.

/// Where an item that is not in the heap stands.
const ABSENT: u32 = u32::MAX;

/// Smallest key first.
#[derive(Debug, Clone)]
pub struct IndexedHeap<K> {
    entries: Vec<(K, u32)>,
    positions: Vec<u32>,
}

impl<K: Ord + Copy> IndexedHeap<K> {
    /// A heap for items `0..items`; more can come, at the cost of an allocation.
    pub fn with_capacity(items: usize) -> Self {
        Self { entries: Vec::with_capacity(items), positions: vec![ABSENT; items] }
    }

    /// Items in the heap.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether the heap is empty.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The item with the smallest key.
    pub fn peek(&self) -> Option<(K, u32)> {
        self.entries.first().copied()
    }

    /// Whether `item` is in the heap.
    pub fn contains(&self, item: u32) -> bool {
        self.positions.get(item as usize).is_some_and(|&position| position != ABSENT)
    }

    /// The key of `item`, if it is in the heap.
    pub fn key(&self, item: u32) -> Option<K> {
        self.contains(item).then(|| self.entries[self.positions[item as usize] as usize].0)
    }

    /// Every item, in no order that means anything.
    pub fn items(&self) -> impl Iterator<Item = u32> {
        self.entries.iter().map(|&(_, item)| item)
    }

    /// Add an item that is not in the heap.
    pub fn push(&mut self, key: K, item: u32) {
        let index = item as usize;
        if index >= self.positions.len() {
            self.positions.resize(index + 1, ABSENT);
        }
        assert_eq!(self.positions[index], ABSENT, "item {item} is in the heap");
        self.entries.push((key, item));
        self.rise(self.entries.len() - 1);
    }

    /// Take the item with the smallest key.
    pub fn pop(&mut self) -> Option<(K, u32)> {
        let first = self.peek()?;
        self.take(0);
        Some(first)
    }

    /// Take `item` out, wherever it stands. False: it was not there.
    pub fn remove(&mut self, item: u32) -> bool {
        if !self.contains(item) {
            return false;
        }
        self.take(self.positions[item as usize] as usize);
        true
    }

    fn take(&mut self, at: usize) {
        let (_, item) = self.entries.swap_remove(at);
        self.positions[item as usize] = ABSENT;
        if at < self.entries.len() {
            let settled = self.rise(at);
            self.sink(settled);
        }
    }

    fn rise(&mut self, mut at: usize) -> usize {
        let entry = self.entries[at];
        while at > 0 {
            let parent = (at - 1) / 2;
            if self.entries[parent].0 <= entry.0 {
                break;
            }
            self.put(at, self.entries[parent]);
            at = parent;
        }
        self.put(at, entry);
        at
    }

    fn sink(&mut self, mut at: usize) {
        let entry = self.entries[at];
        loop {
            let left = 2 * at + 1;
            if left >= self.entries.len() {
                break;
            }
            let right = left + 1;
            let child =
                if right < self.entries.len() && self.entries[right].0 < self.entries[left].0 {
                    right
                } else {
                    left
                };
            if entry.0 <= self.entries[child].0 {
                break;
            }
            self.put(at, self.entries[child]);
            at = child;
        }
        self.put(at, entry);
    }

    fn put(&mut self, at: usize, entry: (K, u32)) {
        self.entries[at] = entry;
        self.positions[entry.1 as usize] = at as u32;
    }

    /// Panic if the heap order or a position is broken.
    pub fn check(&self) {
        for (at, &(key, item)) in self.entries.iter().enumerate() {
            assert_eq!(self.positions[item as usize] as usize, at, "position of item {item}");
            assert!(at == 0 || self.entries[(at - 1) / 2].0 <= key, "heap order at {at}");
        }
        let placed = self.positions.iter().filter(|&&position| position != ABSENT).count();
        assert_eq!(placed, self.entries.len(), "positions of items that are not in the heap");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::catch_unwind;

    #[test]
    fn check_notices_what_is_broken() {
        let broken = |change: fn(&mut IndexedHeap<u64>)| {
            catch_unwind(|| {
                let mut heap = IndexedHeap::with_capacity(4);
                for item in 0..4 {
                    heap.push(u64::from(item), item);
                }
                change(&mut heap);
                heap.check();
            })
            .err()
            .and_then(|panic| panic.downcast::<String>().ok())
        };
        let starts = |text: Option<Box<String>>, with: &str| {
            assert!(text.as_ref().is_some_and(|text| text.contains(with)), "{text:?}, not {with}");
        };
        assert_eq!(broken(|_| ()), None);
        starts(broken(|heap| heap.positions[2] = 1), "position of item 2");
        starts(broken(|heap| heap.entries[0].0 = 9), "heap order at 1");
        starts(
            broken(|heap| {
                heap.entries.pop();
            }),
            "positions of items that are not in the heap",
        );
    }
}
