//! The running sequences: what a step touches of each, and the two orders they are kept in.
//!
//! A [`Row`] is one cache line a row slot. [`ServiceOrder`] is the policy's order: it decides who gets
//! tokens and blocks first, and who is preempted. [`PlanOrder`] is the order in which rows are written:
//! sequences that share leading blocks stand beside each other, so that attention can read them once.

use fastserve_base::fault::{Fault, planted};
use fastserve_base::{Nanos, RowSlot, StepId, Token};

use crate::policy::OrderKey;

/// No token: the row has none, or several, stop tokens.
pub const NO_TOKEN: Token = Token::MAX;

/// What a step touches of a running sequence.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub struct Row {
    /// Last step that names the row slot.
    pub last_step: StepId,
    /// The sequence, by number.
    pub sequence: u32,
    /// Tokens whose K and V are in the cache once every planned step has run.
    pub num_computed: u32,
    /// Tokens that are known.
    pub num_known: u32,
    /// Tokens that steps in flight will sample.
    pub num_pending: u32,
    /// Most tokens, prompt and output.
    pub limit: u32,
    /// Known tokens from which on a stop token ends the sequence.
    pub stops_from: u32,
    /// The one stop token; [`NO_TOKEN`]: look at the request's list.
    pub stop_token: Token,
    /// The last known token.
    pub last_token: Token,
    /// Full blocks that were offered to the prefix tree.
    pub num_offered: u32,
    /// The block of the token computed last.
    pub last_block: i32,
    /// Tokens below this were computed before.
    pub high_water: u32,
    /// Tokens scheduled in the step being planned.
    pub take: u32,
    /// The step in which the row got tokens or was admitted last: it is no victim in it.
    pub scheduled_in: u32,
    /// Bits of [`flags`].
    pub flags: u32,
}

const _: () = assert!(size_of::<Row>() == 64, "a row is one cache line");

/// Rare things about a row.
pub mod flags {
    /// Tokens of the last block may be shared with forks: copy before writing.
    pub const FORKED: u32 = 1;
    /// The last block was copied in the step being planned: tell the device.
    pub const TAIL_COPIED: u32 = 2;
    /// The sequence has ended or was preempted; the slot waits for its steps to commit.
    pub const LEAVING: u32 = 4;
    /// The request has a list of several stop tokens.
    pub const MANY_STOPS: u32 = 8;
    /// Logits are wanted at every prompt position.
    pub const SCORE: u32 = 16;
    /// Forks are still to come.
    pub const UNFORKED: u32 = 32;
}

impl Row {
    /// A slot without a sequence.
    pub const EMPTY: Self = Self {
        last_step: StepId(0),
        sequence: u32::MAX,
        num_computed: 0,
        num_known: 0,
        num_pending: 0,
        limit: 0,
        stops_from: 0,
        stop_token: NO_TOKEN,
        last_token: 0,
        num_offered: 0,
        last_block: 0,
        high_water: 0,
        take: 0,
        scheduled_in: 0,
        flags: 0,
    };

    /// Tokens to compute, those still to be sampled included.
    #[inline]
    pub fn remaining(&self) -> u32 {
        self.num_known + self.num_pending - self.num_computed
    }

    /// Whether a flag is set.
    #[inline]
    pub fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    /// Whether the row may be given tokens: it is not leaving, and the tokens it waits for do not
    /// fill it.
    #[inline]
    pub fn is_runnable(&self) -> bool {
        !self.has(flags::LEAVING) && self.num_known + self.num_pending < self.limit
    }
}

/// A running sequence in the service order.
#[derive(Debug, Clone, Copy)]
struct Served {
    key: OrderKey,
    slot: RowSlot,
    /// When it ages; never, if it has.
    ages_at: Nanos,
}

/// Running sequences in the policy's order, best first.
#[derive(Debug, Clone)]
pub struct ServiceOrder {
    entries: Vec<Served>,
    /// Nobody ages before.
    next_ageing: Nanos,
}

impl ServiceOrder {
    /// Room for `rows`.
    pub fn with_capacity(rows: usize) -> Self {
        Self { entries: Vec::with_capacity(rows), next_ageing: Nanos::MAX }
    }

    /// Running sequences.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing runs.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The slot at a place.
    #[inline]
    pub fn slot(&self, place: usize) -> RowSlot {
        self.entries[place].slot
    }

    /// Slots, best first.
    pub fn slots(&self) -> impl DoubleEndedIterator<Item = RowSlot> {
        self.entries.iter().map(|served| served.slot)
    }

    /// Add a sequence at its place; it ages at `ages_at` unless it has.
    pub fn insert(&mut self, key: OrderKey, slot: RowSlot, ages_at: Nanos) {
        let ages_at = if key.has_aged() { Nanos::MAX } else { ages_at };
        let place = self.entries.partition_point(|other| other.key < key);
        self.entries.insert(place, Served { key, slot, ages_at });
        self.next_ageing = self.next_ageing.min(ages_at);
    }

    /// Move those that came long enough ago ahead, as the queue does: whoever came earlier ages
    /// earlier, so that ageing turns nobody's order of arrival round. `moved` learns the new keys.
    pub fn age(&mut self, now: Nanos, mut moved: impl FnMut(RowSlot, OrderKey)) {
        if now < self.next_ageing || planted(Fault::AgeingOff) {
            return;
        }
        self.next_ageing = Nanos::MAX;
        for served in &mut self.entries {
            if served.ages_at <= now {
                served.key = served.key.aged();
                served.ages_at = Nanos::MAX;
                moved(served.slot, served.key);
            }
            self.next_ageing = self.next_ageing.min(served.ages_at);
        }
        self.entries.sort_unstable_by_key(|served| served.key);
    }

    /// Remove one.
    pub fn remove(&mut self, slot: RowSlot) {
        self.entries.retain(|served| served.slot != slot);
    }

    /// Keep those for which `keep` holds.
    pub fn retain(&mut self, mut keep: impl FnMut(RowSlot) -> bool) {
        self.entries.retain(|served| keep(served.slot));
    }

    /// Panic if the order is broken.
    pub fn check(&self) {
        for pair in self.entries.windows(2) {
            assert!(pair[0].key < pair[1].key, "service order: {pair:?}");
        }
    }
}

/// One place of the plan order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The row slot.
    pub slot: RowSlot,
    /// Leading blocks it shares with the place before it, at least.
    pub num_shared: u32,
}

/// Running sequences in the order in which rows are written.
#[derive(Debug, Clone)]
pub struct PlanOrder {
    places: Vec<Place>,
}

impl PlanOrder {
    /// Room for `rows`.
    pub fn with_capacity(rows: usize) -> Self {
        Self { places: Vec::with_capacity(rows) }
    }

    /// The places.
    #[inline]
    pub fn places(&self) -> &[Place] {
        &self.places
    }

    /// Put `slot` right after `sibling`, or at the end. `shared(a, b)` counts leading equal blocks.
    pub fn insert(
        &mut self,
        slot: RowSlot,
        sibling: Option<RowSlot>,
        shared: impl Fn(RowSlot, RowSlot) -> u32,
    ) {
        let after =
            sibling.and_then(|sibling| self.places.iter().position(|place| place.slot == sibling));
        let Some(after) = after else {
            self.places.push(Place { slot, num_shared: 0 });
            return;
        };
        let place = Place { slot, num_shared: shared(self.places[after].slot, slot) };
        if let Some(next) = self.places.get_mut(after + 1) {
            next.num_shared = shared(slot, next.slot);
        }
        self.places.insert(after + 1, place);
    }

    /// Keep those for which `keep` holds. What two neighbours share is what both shared with the
    /// places between them.
    pub fn retain(&mut self, mut keep: impl FnMut(RowSlot) -> bool) {
        let mut carried = u32::MAX;
        self.places.retain_mut(|place| {
            let shared = place.num_shared.min(carried);
            if keep(place.slot) {
                place.num_shared = shared;
                carried = u32::MAX;
                true
            } else {
                carried = shared;
                false
            }
        });
        if let Some(first) = self.places.first_mut() {
            first.num_shared = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "service order: ")]
    fn check_notices_an_order_that_is_broken() {
        let mut order = ServiceOrder::with_capacity(2);
        order.insert(OrderKey::new(0, 1, 0), RowSlot(0), 0);
        order.insert(OrderKey::new(0, 2, 0), RowSlot(1), 0);
        order.check();
        order.entries.swap(0, 1);
        order.check();
    }
}
