//! The waiting sequences, in the policy's order, with ageing.
//!
//! Two heaps hold the same sequences: one in the order of service, one, of those that have not aged,
//! in the order of arrival. Time enters as `now`; a sequence ages when it has waited for `max_wait`,
//! and from then on goes ahead of all that came later.

use fastserve_base::Nanos;
use fastserve_base::fault::{Fault, planted};

use crate::heap::IndexedHeap;
use crate::policy::OrderKey;

/// A key of the ageing heap: order of arrival, then when the wait began.
type Arrival = ((u64, u32), Nanos);

/// Waiting sequences, by number.
#[derive(Debug, Clone)]
pub struct WaitQueue {
    by_order: IndexedHeap<OrderKey>,
    by_arrival: IndexedHeap<Arrival>,
    max_wait: Option<Nanos>,
}

impl WaitQueue {
    /// A queue with room for sequences `0..sequences` before anything grows.
    pub fn new(sequences: usize, max_wait: Option<Nanos>) -> Self {
        Self {
            by_order: IndexedHeap::with_capacity(sequences),
            by_arrival: IndexedHeap::with_capacity(sequences),
            max_wait,
        }
    }

    /// Sequences waiting.
    pub fn len(&self) -> usize {
        self.by_order.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.by_order.is_empty()
    }

    /// Put `sequence` to wait; its wait began at `since`.
    pub fn push(&mut self, key: OrderKey, since: Nanos, sequence: u32) {
        self.by_order.push(key, sequence);
        if self.max_wait.is_some() && !key.has_aged() {
            self.by_arrival.push((key.arrival_order(), since), sequence);
        }
    }

    /// The sequence to serve next.
    pub fn peek(&self) -> Option<(OrderKey, u32)> {
        self.by_order.peek()
    }

    /// Take the sequence to serve next.
    pub fn pop(&mut self) -> Option<(OrderKey, u32)> {
        let next = self.by_order.pop()?;
        self.by_arrival.remove(next.1);
        Some(next)
    }

    /// Take `sequence` out. False: it does not wait.
    pub fn remove(&mut self, sequence: u32) -> bool {
        self.by_arrival.remove(sequence);
        self.by_order.remove(sequence)
    }

    /// Whether `sequence` waits.
    pub fn contains(&self, sequence: u32) -> bool {
        self.by_order.contains(sequence)
    }

    /// Every waiting sequence, in no order that means anything.
    pub fn sequences(&self) -> impl Iterator<Item = u32> {
        self.by_order.items()
    }

    /// Move those that have waited for `max_wait` ahead. O(moved · log n).
    pub fn age(&mut self, now: Nanos) {
        let Some(max_wait) = self.max_wait else {
            return;
        };
        if planted(Fault::AgeingOff) {
            return;
        }
        while let Some(((_, since), sequence)) = self.by_arrival.peek() {
            if now.saturating_sub(since) < max_wait {
                break;
            }
            self.by_arrival.pop();
            let key = self.key_of(sequence);
            self.by_order.remove(sequence);
            self.by_order.push(key.aged(), sequence);
        }
    }

    fn key_of(&self, sequence: u32) -> OrderKey {
        self.by_order.key(sequence).expect("an ageing sequence waits")
    }

    /// Panic if the heaps are broken or disagree.
    pub fn check(&self) {
        self.by_order.check();
        self.by_arrival.check();
        for sequence in self.by_arrival.items() {
            assert!(self.by_order.contains(sequence), "sequence {sequence} ages but does not wait");
        }
    }
}
