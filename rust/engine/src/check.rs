//! Proof of the invariants in the module header of [`core`](crate::core).

use fastserve_base::RowSlot;
use fastserve_sched::Status;
use fastserve_sched::rows::flags;

use crate::core::Core;
use crate::tail::TAIL;

impl Core {
    /// Panic if an invariant is broken. O(capacity + sequences).
    pub fn check(&self) {
        self.kv.check();
        self.waiting.check();
        self.service.check();
        let counts = self.kv.counts();
        assert_eq!(counts.free + counts.held + counts.cached, counts.capacity, "conservation");
        self.check_slots();
        self.check_rows();
        self.check_sequences();
        self.check_transfers();
    }

    /// Every slot is free, running or leaving.
    fn check_slots(&self) {
        let mut uses = vec![0_u32; self.rows.len()];
        for slot in self.free_slots.iter().copied().chain(self.service.slots()) {
            uses[slot.index()] += 1;
        }
        for slot in &self.leaving {
            let listed = self.service.slots().any(|other| other == *slot);
            uses[slot.index()] += u32::from(!listed);
        }
        for (slot, uses) in uses.iter().enumerate() {
            assert_eq!(*uses, 1, "slot {slot} is free, running or leaving, one of them");
        }
        for &slot in &self.free_slots {
            assert!(!self.kv.is_open(slot), "{slot:?} is free and open");
        }
    }

    /// A running row's table covers exactly its computed tokens.
    fn check_rows(&self) {
        for slot in self.service.slots() {
            let row = &self.rows[slot.index()];
            if row.has(flags::LEAVING) {
                continue;
            }
            let state = &self.sequences[row.sequence];
            assert_eq!(state.status, Status::Running(slot), "{:?}", state.id);
            let num_stored = self.names[slot.index()].num_stored;
            assert_eq!(state.tokens.len(), num_stored as usize, "{:?}", state.id);
            assert_eq!(num_stored / TAIL, row.num_known / TAIL, "tail of {:?}", state.id);
            let blocks = row.num_computed.div_ceil(self.config.block_size) as usize;
            assert_eq!(self.kv.num_blocks_of(slot), blocks, "table of {:?}", state.id);
            assert!(
                row.num_computed <= row.num_known + row.num_pending,
                "{:?} computed more than it has",
                state.id
            );
        }
        assert_eq!(self.order.places().len(), self.service.len(), "both orders list the same rows");
        for pair in self.order.places().windows(2) {
            let shared = self.kv.num_shared_leading(pair[0].slot, pair[1].slot, usize::MAX);
            assert!(pair[1].num_shared as usize <= shared, "{pair:?} share {shared}");
        }
    }

    /// Every live sequence is somewhere, and its request counts it.
    fn check_sequences(&self) {
        let mut queued_requests = 0;
        let mut queued_tokens = 0;
        for (place, state) in self.requests.iter() {
            let mut listed = state.request.num_sequences - state.num_spawned;
            let mut next = state.first_sequence;
            while let Some(sequence) = next {
                self.check_place(sequence);
                listed += 1;
                next = self.sequences[sequence].next_sibling;
            }
            assert_eq!(listed, state.num_live, "sequences of request {place}");
            if !state.was_admitted {
                queued_requests += 1;
                queued_tokens += u64::from(state.num_prompt_tokens);
            }
        }
        assert_eq!(self.num_queued_requests, queued_requests, "queued requests");
        assert_eq!(self.num_queued_tokens, queued_tokens, "queued tokens");
        assert_eq!(self.ids.len(), self.requests.len(), "ids of live requests");
    }

    fn check_place(&self, sequence: u32) {
        let state = &self.sequences[sequence];
        let waits = self.waiting.contains(sequence);
        match state.status {
            Status::Waiting => assert!(waits, "{:?} waits nowhere", state.id),
            Status::Running(slot) => {
                assert!(!waits && self.owns(slot, sequence), "{:?} runs nowhere", state.id);
            }
            Status::Settling(slot) => {
                let leaves = self.leaving.contains(&slot) && self.owns(slot, sequence);
                assert!(!waits && leaves, "{:?} settles nowhere", state.id);
            }
        }
    }

    fn owns(&self, slot: RowSlot, sequence: u32) -> bool {
        self.rows[slot.index()].sequence == sequence
    }
}

#[cfg(test)]
mod tests;
