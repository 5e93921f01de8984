//! A bounded record of what happened: state changes of sequences, and one record a step.
//!
//! Both are rings of fixed size. The step path appends to a batch of its own and hands it over when
//! nobody reads; a reader scans. Stalls are not recorded: they are derived by joining the two.

use fastserve_base::{RequestId, StepId};

use crate::outputs::{StepRecord, TimelineEvent};

/// The rings.
#[derive(Debug)]
pub(crate) struct Timeline {
    events: Ring<TimelineEvent>,
    steps: Ring<StepRecord>,
}

/// The last `capacity` things, oldest first.
#[derive(Debug)]
struct Ring<T> {
    items: Vec<T>,
    capacity: usize,
    next: usize,
}

impl<T: Copy> Ring<T> {
    fn new(capacity: usize) -> Self {
        Self { items: Vec::with_capacity(capacity), capacity, next: 0 }
    }

    fn push(&mut self, item: T) {
        if self.items.len() < self.capacity {
            self.items.push(item);
        } else {
            self.items[self.next] = item;
        }
        self.next = (self.next + 1) % self.capacity;
    }

    fn iter(&self) -> impl Iterator<Item = &T> {
        // Until it is full, all are recent.
        let (recent, old) = self.items.split_at(self.next);
        old.iter().chain(recent)
    }
}

impl Timeline {
    pub(crate) fn new(num_events: usize, num_steps: usize) -> Self {
        Self { events: Ring::new(num_events), steps: Ring::new(num_steps) }
    }

    /// Take over what the step path gathered; the batches keep their memory.
    pub(crate) fn absorb(&mut self, events: &mut Vec<TimelineEvent>, steps: &mut Vec<StepRecord>) {
        for event in events.drain(..) {
            self.events.push(event);
        }
        for step in steps.drain(..) {
            self.steps.push(step);
        }
    }

    /// State changes of one request that are still in the ring, oldest first.
    pub(crate) fn of(&self, request: RequestId) -> Vec<TimelineEvent> {
        self.events.iter().filter(|event| event.seq.request == request).copied().collect()
    }

    /// Steps `from` and later that are still in the ring, oldest first.
    pub(crate) fn steps_since(&self, from: StepId) -> Vec<StepRecord> {
        self.steps.iter().filter(|record| record.step >= from).copied().collect()
    }
}
