//! What sequences share: matching a prefix, adopting it, adding to it, and taking it back.
//!
//! A node is inserted when the step that writes it is *planned*. It can be matched from then on, and
//! remembers the step: if that fails, the node goes, and all that was built on it.

use fastserve_base::fault::{Fault, planted};
use fastserve_base::{BlockId, RowSlot, StepId, Token};

use super::{KvManager, LastProbe, Probe, SeqKey};

impl KvManager {
    /// Longest prefix of `tokens` in the tree, in whole blocks and at most `max_tokens` tokens, for a
    /// sequence that is not running yet.
    ///
    /// Changes no block. The path is remembered for [`adopt`](Self::adopt) until the next call that
    /// changes a block or probes again (`open` and `step_committed` do not). O(blocks matched).
    pub fn probe(&mut self, key: SeqKey<'_>, tokens: &[Token], max_tokens: usize) -> Probe {
        self.look_up(None, None, 0, key, tokens, max_tokens)
    }

    /// As [`probe`](Self::probe), for what follows the blocks of the running sequence in `slot`.
    ///
    /// Finds nothing unless every block of the slot is shared and its chain is unbroken, so that the
    /// matched blocks can be appended.
    pub fn probe_from(
        &mut self,
        slot: RowSlot,
        key: SeqKey<'_>,
        tokens: &[Token],
        max_tokens: usize,
    ) -> Probe {
        let state = self.open_slot(slot);
        if state.is_broken || state.num_shared < state.num_blocks {
            let (tail, next_hash) = (self.tail(slot), self.next_block_hash(slot, key, tokens));
            self.path.clear();
            self.last_probe = Some(LastProbe { slot: Some(slot), tail, next_hash });
            return Probe::default();
        }
        assert_eq!(key.namespace, state.namespace, "namespace of {slot:?}");
        let num_shared = state.num_shared as usize;
        self.look_up(Some(slot), self.tail(slot), num_shared, key, tokens, max_tokens)
    }

    /// Match the blocks of `tokens` from `index` on, below `tail`.
    fn look_up(
        &mut self,
        slot: Option<RowSlot>,
        tail: Option<BlockId>,
        index: usize,
        key: SeqKey<'_>,
        tokens: &[Token],
        max_tokens: usize,
    ) -> Probe {
        self.path.clear();
        if !self.enable_prefix_caching {
            self.last_probe = Some(LastProbe { slot, tail: None, next_hash: None });
            return Probe::default();
        }
        let place = self.tree.place(tail, key.namespace);
        let known = &tokens[..max_tokens.min(tokens.len())];
        let place = self.tree.match_path(place, key, known, index, &mut self.path);
        let next = self.tree.key(place, key, tokens, index + self.path.len());
        let next_hash = next.map(|next| next.hash);
        self.last_probe = Some(LastProbe { slot, tail: place.tail, next_hash });
        // Above a held block all is held.
        let num_held = self.path.partition_point(|&block| self.pool.num_uses(block) > 0);
        let num_blocks = self.path.len();
        Probe { num_blocks: num_blocks as u32, num_cached: (num_blocks - num_held) as u32 }
    }

    /// Last block of the path that the last probe found, the slot's own shared blocks of `probe_from`
    /// included. `None` if that path is empty.
    ///
    /// Two sequences of one namespace with equal tails, and equal tokens and spans in the block that
    /// follows, are about to compute the same block: that is exact.
    pub fn probe_tail(&self) -> Option<BlockId> {
        self.valid_probe().tail
    }

    /// Hash of the block that follows the path of the last probe: of its parent, tokens and spans.
    ///
    /// `None` if fewer than `block_size` tokens follow (of those given, whatever `max_tokens` was),
    /// if the chain of `probe_from`'s slot is broken, or if prefix caching is off. Equal blocks have
    /// equal hashes; the reverse is likely only, see [`probe_tail`](Self::probe_tail).
    pub fn probe_next_hash(&self) -> Option<u64> {
        self.valid_probe().next_hash
    }

    fn valid_probe(&self) -> LastProbe {
        self.last_probe.expect("a probe since blocks last changed")
    }

    /// Last shared block of `slot`, `None` if it shares none. The running side of
    /// [`probe_tail`](Self::probe_tail).
    pub fn tail(&self, slot: RowSlot) -> Option<BlockId> {
        let last = self.num_shared(slot).checked_sub(1)?;
        Some(self.block(slot, last))
    }

    /// Hash of the first block of `slot` that is not shared yet, whether or not it has been
    /// allocated. The running side of [`probe_next_hash`](Self::probe_next_hash), under the same
    /// conditions.
    pub fn next_block_hash(&self, slot: RowSlot, key: SeqKey<'_>, tokens: &[Token]) -> Option<u64> {
        let state = self.open_slot(slot);
        assert_eq!(key.namespace, state.namespace, "namespace of {slot:?}");
        if state.is_broken || !self.enable_prefix_caching {
            return None;
        }
        let place = self.tree.place(self.tail(slot), state.namespace);
        let key = self.tree.key(place, key, tokens, state.num_shared as usize)?;
        Some(key.hash)
    }

    /// Append the path of the last probe to the table of `slot`, one more use of each block.
    ///
    /// `slot` is open, and after `probe` its table is empty and its chain unbroken; after `probe_from`
    /// it is the slot given there.
    pub fn adopt(&mut self, slot: RowSlot) {
        let probe = self.valid_probe();
        let state = self.open_slot(slot);
        match probe.slot {
            Some(probed) => assert_eq!(slot, probed, "the slot that was probed"),
            None => assert_eq!(state.num_blocks, 0, "blocks of {slot:?} before it adopts"),
        }
        assert!(self.path.is_empty() || !state.is_broken, "{slot:?} with a broken chain adopts");
        self.last_probe = None;
        for index in 0..self.path.len() {
            let block = self.path[index];
            if self.pool.num_uses(block) == 0 || !planted(Fault::UseCountOffByOne) {
                self.pool.retain(block);
            }
            self.append(slot, block);
        }
        self.slots[slot.index()].num_shared += self.path.len() as u32;
        // The others have the next one as a child, so they were not in the heap.
        if let Some(&tail) = self.path.last() {
            self.lru.remove(tail);
        }
    }

    /// Put the blocks `num_shared..num_full` of `slot` into the tree, written by `step`.
    ///
    /// Their tokens are known and accepted, and the step that writes the last of their slots is
    /// planned (or has committed: a fetched block is certain at once): `tokens` are the sequence's, at
    /// least `num_full` blocks of them. Where the tree has an equal block of another sequence, that
    /// one stays, and the chain of `slot` is broken.
    pub fn share(
        &mut self,
        slot: RowSlot,
        key: SeqKey<'_>,
        tokens: &[Token],
        num_full: usize,
        step: StepId,
    ) {
        let state = self.open_slot(slot);
        assert_eq!(key.namespace, state.namespace, "namespace of {slot:?}");
        assert!(num_full <= state.num_blocks as usize, "{slot:?} has not {num_full} blocks");
        if state.is_broken || !self.enable_prefix_caching {
            return;
        }
        self.last_probe = None;
        if num_full > state.num_shared as usize + 1 {
            self.prefetch_share(slot, key, tokens, num_full);
        }
        for index in state.num_shared as usize..num_full {
            let place = self.tree.place(self.tail(slot), key.namespace);
            let block =
                self.tree.key(place, key, tokens, index).expect("the tokens of every block");
            let own = self.block(slot, index);
            let node = self.tree.find(&block);
            if node.is_none() {
                self.tree.insert(own, &block, step);
                if let Some(events) = &mut self.events {
                    events.stored(own, &block);
                }
            } else if node != Some(own) {
                self.slots[slot.index()].is_broken = true;
                return;
            }
            self.slots[slot.index()].num_shared += 1;
        }
    }

    /// `step` has run: the blocks it wrote are certain. Steps commit in ascending order.
    pub fn step_committed(&mut self, step: StepId) {
        assert!(step > self.last_committed, "{step:?} commits after {:?}", self.last_committed);
        self.last_committed = step;
    }

    /// `from` and every later step failed or will not run: take the blocks they were to write out
    /// of the tree, and those below them. O(capacity).
    ///
    /// Cached ones become free. Held ones stay in their tables, no longer shared, and become free on
    /// release; `num_shared` of their slots falls. Which sequences must compute again is the caller's
    /// to find *before* this call: those planned in such a step, and those whose
    /// [`pending_step`](Self::pending_step) is not before `from`.
    pub fn step_failed(&mut self, from: StepId) {
        assert!(from > self.last_committed, "{from:?} has committed");
        self.last_probe = None;
        for block in self.blocks() {
            if self.tree.contains(block) && self.tree.step(block) >= from {
                self.forget_failed(block, from);
            }
        }
        for slot in (0..self.slots.len() as u32).map(RowSlot) {
            while self.tail(slot).is_some_and(|tail| !self.tree.contains(tail)) {
                self.slots[slot.index()].num_shared -= 1;
            }
        }
    }

    /// Take `block` out of the tree if it is a leaf, then whatever failed node that makes one.
    fn forget_failed(&mut self, block: BlockId, from: StepId) {
        let mut next = Some(block);
        while let Some(leaf) = next.filter(|&block| self.tree.is_leaf(block)) {
            if self.tree.step(leaf) < from {
                self.insert_if_evictable(leaf);
                return;
            }
            next = self.forget(leaf);
            self.lru.remove(leaf);
            if self.pool.last_use(leaf).is_some() {
                self.pool.evict(leaf);
            }
        }
    }

    /// The latest step, not committed yet, that a shared block of `slot` waits for. `None` if all
    /// are certain.
    pub fn pending_step(&self, slot: RowSlot) -> Option<StepId> {
        let step = self.tree.step(self.tail(slot)?);
        (step > self.last_committed).then_some(step)
    }

    /// Forget every prefix: nothing shared before this call can be matched after it.
    ///
    /// Cached blocks become free. Held ones stay with their sequences and become free on release; the
    /// chains of all open slots are broken. O(capacity).
    pub fn reset(&mut self) {
        if planted(Fault::EpochIgnored) {
            return;
        }
        self.last_probe = None;
        self.tree.clear();
        self.lru.clear();
        for block in self.blocks() {
            if self.pool.last_use(block).is_some() {
                self.pool.evict(block);
            }
        }
        for slot in self.slots.iter_mut().filter(|slot| slot.is_open) {
            slot.is_broken = true;
            slot.num_shared = 0;
        }
        if let Some(events) = &mut self.events {
            events.cleared();
        }
    }
}
