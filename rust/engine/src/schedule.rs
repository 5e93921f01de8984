//! One pass over the running sequences, in the policy's order.
//!
//! Each row in turn gets its tokens and blocks. A row with one token to go has a token of the budget
//! kept for it; a chunk takes what the budget and the pool leave. When a block is missing, the last
//! running sequence in the order gives up its own, and never one that has had its turn: whoever has
//! tokens in this step stands before. So the first always makes progress.

use fastserve_base::fault::{Fault, planted};
use fastserve_base::{BlockId, Nanos, RowSlot, StepId};
use fastserve_kv::SeqKey;
use fastserve_sched::rows::flags;
use fastserve_sched::{PlanWriter, Row, Sequence, Status, StepBudget};

use crate::core::Core;
use crate::outputs::EventKind;

/// A step being planned.
pub(crate) struct Pass<'a> {
    pub(crate) step: StepId,
    pub(crate) now: Nanos,
    pub(crate) budget: StepBudget,
    pub(crate) writer: PlanWriter<'a>,
    pub(crate) num_decode_rows: u32,
    pub(crate) num_preempted: u32,
    /// The row whose turn it is, if no token of the budget is kept for it: it had more than one to go
    /// when the pass began. A match in its turn may have left it one.
    pub(crate) chunk: Option<RowSlot>,
    /// Blocks that running chunks still need for the tokens they have.
    pub(crate) outstanding_blocks: usize,
}

impl Pass<'_> {
    /// The mark of a row that has had its turn in this step.
    #[inline]
    pub(crate) fn mark(&self) -> u32 {
        self.step.0 as u32
    }
}

impl Core {
    /// The pass. Rows of the step end up with `take` tokens and their blocks.
    pub(crate) fn schedule_running(&mut self, pass: &mut Pass<'_>) {
        let block_mask = self.config.block_size - 1;
        for place in 0..self.service.len() {
            let slot = self.service.slot(place);
            let row = &mut self.rows[slot.index()];
            if !row.is_runnable() {
                continue;
            }
            if row.remaining() > 1 {
                self.schedule_chunk(pass, Some(place), slot);
                continue;
            }
            let needs_block = row.num_computed & block_mask == 0;
            if !needs_block && !row.has(flags::FORKED | flags::UNFORKED | flags::SCORE) {
                pass.budget.settle_decode(true);
                row.take = 1;
                row.num_computed += 1;
                row.scheduled_in = pass.step.0 as u32;
                if row.num_computed & block_mask == 0 {
                    self.offer_blocks(slot, pass.step);
                }
                continue;
            }
            self.schedule_last_token(pass, place, slot);
        }
    }

    /// One token to go, and a block or a copy needed first, or more than one output wanted.
    fn schedule_last_token(&mut self, pass: &mut Pass<'_>, place: usize, slot: RowSlot) {
        let fits = self.make_room(pass, Some(place), slot);
        // A victim of its own gave up its token when it was preempted.
        if self.rows[slot.index()].has(flags::LEAVING) {
            return;
        }
        pass.budget.settle_decode(fits);
        // If it does not fit, no block is to be had: nobody is admitted in its stead.
        if fits {
            self.take_tokens(pass, slot, 1);
        }
    }

    /// A row with more than one token to go. `place` is its place in the service order; `None`: it is
    /// being admitted, and stands behind every running row.
    pub(crate) fn schedule_chunk(
        &mut self,
        pass: &mut Pass<'_>,
        place: Option<usize>,
        slot: RowSlot,
    ) {
        self.store_tail(slot);
        pass.chunk = Some(slot);
        if place.is_some() && !self.follow(pass, slot) {
            pass.outstanding_blocks += self.missing_blocks(slot);
            return;
        }
        let row = &self.rows[slot.index()];
        let (remaining, start) = (row.remaining(), row.num_computed);
        let is_long = self.is_long(remaining);
        if is_long {
            self.scratch.long.push(slot);
        }
        let room = pass.budget.chunk_room(is_long, start);
        let mut take = remaining.min(room).min(self.output_room(pass, slot));
        if take > 0 && self.make_room(pass, place, slot) {
            take = take.min(self.tokens_that_fit(slot));
            pass.budget.take_chunk(take, is_long, start);
            self.take_tokens(pass, slot, take);
        }
        if !self.rows[slot.index()].has(flags::LEAVING) {
            pass.outstanding_blocks += self.missing_blocks(slot);
        }
    }

    /// Give long prompts what nobody else wanted.
    pub(crate) fn extend_long(&mut self, pass: &mut Pass<'_>) {
        for at in 0..self.scratch.long.len() {
            let slot = self.scratch.long[at];
            let row = self.rows[slot.index()];
            if row.take == 0 {
                continue; // It is no row of this step.
            }
            let take = row
                .remaining()
                .min(pass.budget.extension_room(row.take, row.num_computed))
                .min(self.output_room(pass, slot))
                .min(self.tokens_that_fit(slot));
            if take > 0 {
                pass.budget.take_chunk(take, false, row.num_computed);
                self.take_tokens(pass, slot, take);
            }
        }
        self.scratch.long.clear();
    }

    pub(crate) fn is_long(&self, remaining: u32) -> bool {
        self.config.long_prefill_threshold.is_some_and(|threshold| remaining > threshold)
    }

    /// Tokens whose logits fit the output rows, where every position's are wanted.
    fn output_room(&self, pass: &Pass<'_>, slot: RowSlot) -> u32 {
        let row = &self.rows[slot.index()];
        if row.has(flags::SCORE) {
            pass.budget.spare_outputs() + u32::from(row.take == 0)
        } else {
            u32::MAX
        }
    }

    /// Tokens that the table and the blocks to be had have room for.
    fn tokens_that_fit(&self, slot: RowSlot) -> u32 {
        let row = &self.rows[slot.index()];
        let copies = usize::from(self.copies_tail(slot));
        let available = self.kv.available().saturating_sub(copies);
        let blocks = self.kv.num_blocks_of(slot) + available;
        let tokens = blocks as u64 * u64::from(self.config.block_size);
        (tokens - u64::from(row.num_computed)).min(u64::from(u32::MAX)) as u32
    }

    /// Whether the row's next token goes into a block that forks still share.
    fn copies_tail(&self, slot: RowSlot) -> bool {
        let row = &self.rows[slot.index()];
        let index = (row.num_computed / self.config.block_size) as usize;
        row.has(flags::FORKED) && self.kv.num_uses(slot, index) > 1
    }

    /// Blocks still to come for the tokens of a row that has more than one to go.
    fn missing_blocks(&self, slot: RowSlot) -> usize {
        let total = self.rows[slot.index()].num_known.div_ceil(self.config.block_size) as usize;
        total.saturating_sub(self.kv.num_blocks_of(slot))
    }

    /// See that the row's next token has a place, preempting those behind if need be.
    ///
    /// False: it has none in this step. The row may have been preempted itself, being the last.
    fn make_room(&mut self, pass: &mut Pass<'_>, place: Option<usize>, slot: RowSlot) -> bool {
        while self.kv.available() == 0 && self.needs_block(slot) {
            // An admitted row asked for no more than there is; only a running one preempts.
            let Some(place) = place else { return false };
            if self.blocks_leaving() > 0 {
                return false;
            }
            if let Some(victim) = self.victim(pass, place) {
                self.preempt(pass, victim, slot);
            } else {
                if self.first_in_service() != Some(slot) {
                    self.preempt(pass, slot, slot);
                }
                return false;
            }
        }
        true
    }

    /// Whether the row's next token needs a block: the next one, or a copy of one that forks share.
    fn needs_block(&self, slot: RowSlot) -> bool {
        let in_table = self.kv.num_blocks_of(slot) as u32 * self.config.block_size;
        in_table == self.rows[slot.index()].num_computed || self.copies_tail(slot)
    }

    /// Blocks that come back when steps in flight commit. Shared ones count although they may stay:
    /// it is better to wait for a commit than to preempt in vain.
    fn blocks_leaving(&self) -> usize {
        self.leaving.iter().map(|&slot| self.kv.num_blocks_of(slot)).sum()
    }

    fn first_in_service(&self) -> Option<RowSlot> {
        self.service.slots().find(|slot| !self.rows[slot.index()].has(flags::LEAVING))
    }

    /// The last running sequence behind `place`.
    fn victim(&self, pass: &Pass<'_>, place: usize) -> Option<RowSlot> {
        let staying = |slot: &RowSlot| !self.rows[slot.index()].has(flags::LEAVING);
        if planted(Fault::LeaderPreemptedInSamePass) {
            let had_turn = |slot: &RowSlot| self.rows[slot.index()].scheduled_in == pass.mark();
            let found = self.service.slots().take(place).filter(staying).find(had_turn);
            if found.is_some() {
                return found;
            }
        }
        let mut behind = self.service.slots().skip(place + 1).filter(staying);
        if planted(Fault::FirstInsteadOfLastAsVictim) { behind.next() } else { behind.last() }
    }

    /// Put a running sequence back into the queue for the sake of `by`.
    fn preempt(&mut self, pass: &mut Pass<'_>, slot: RowSlot, by: RowSlot) {
        let row = self.rows[slot.index()];
        if row.is_runnable() && row.remaining() == 1 && pass.chunk != Some(slot) {
            pass.budget.settle_decode(false);
        }
        let sequence = &mut self.sequences[row.sequence];
        sequence.high_water = sequence.high_water.max(row.num_computed);
        sequence.status = Status::Settling(slot);
        sequence.preempted_at = Some(self.num_endings);
        let seq = sequence.id;
        pass.num_preempted += 1;
        self.stats.num_preemptions += 1;
        self.note(seq, EventKind::Preempted { by: by.0, computed: row.num_computed });
        self.leave(slot);
        // Blocks are needed at once; the slot is listed in the order that the pass goes through, and is
        // free when that is over.
        let listed = self.free_slots.len();
        self.settle_leaving(Some(self.oldest_in_flight().unwrap_or(pass.step)));
        self.scratch.freed.extend(self.free_slots.drain(listed..));
    }

    /// Match again at a block boundary, and wait if the next block is being computed by another row
    /// of this step. False: the row waits.
    fn follow(&mut self, pass: &mut Pass<'_>, slot: RowSlot) -> bool {
        let row = self.rows[slot.index()];
        let block_size = self.config.block_size;
        if !self.config.enable_prefix_caching || !row.num_computed.is_multiple_of(block_size) {
            return true;
        }
        let sequence = &self.sequences[row.sequence];
        let limit = match_limit(sequence, row.has(flags::SCORE));
        let request = &self.requests[sequence.request].request;
        let key = SeqKey { namespace: request.namespace, spans: &request.spans };
        let probe = self.kv.probe_from(slot, key, &sequence.tokens, limit);
        let next = self.kv.probe_next_hash();
        let mut computed = row.num_computed;
        if probe.num_blocks > 0 && probe.num_blocks as usize <= self.edits_left(pass) {
            self.kv.adopt(slot);
            self.scratch.matched += probe.num_blocks as usize;
            computed += probe.num_blocks * block_size;
            let row = &mut self.rows[slot.index()];
            let from = std::mem::replace(&mut row.num_computed, computed);
            row.num_offered = self.kv.num_shared(slot) as u32;
            self.count_hits(slot, from, computed);
        }
        let sure = (computed + block_size) as usize <= limit;
        match next.filter(|_| sure).and_then(|hash| self.leader(pass, hash, slot)) {
            Some(leader) => {
                self.note_follower(self.rows[slot.index()].sequence, leader);
                false
            }
            None => true,
        }
    }

    /// Table entries that may still be told to the device, beyond what the step's tokens may need.
    pub(crate) fn edits_left(&self, pass: &Pass<'_>) -> usize {
        let reserve = self.config.max_num_batched_tokens as usize / self.config.block_size as usize
            + 2 * self.config.max_num_seqs as usize;
        pass.writer.table_edits_left().saturating_sub(reserve + self.scratch.matched)
    }

    /// The row of this step that computes the block with `hash`, if it is another, or the table that
    /// it is being fetched into.
    pub(crate) fn leader(&self, pass: &Pass<'_>, hash: u64, slot: RowSlot) -> Option<RowSlot> {
        let leader = *self.claims.get(&hash)?;
        let Some(row) = self.rows.get(leader.index()) else {
            return Some(leader); // It is being fetched.
        };
        let advances = row.scheduled_in == pass.mark() && !row.has(flags::LEAVING);
        (leader != slot && advances).then_some(leader)
    }

    pub(crate) fn note_follower(&mut self, sequence: u32, leader: RowSlot) {
        self.stats.num_leader_waits += 1;
        let state = &mut self.sequences[sequence];
        if !state.follows {
            state.follows = true;
            let seq = state.id;
            self.note(seq, EventKind::LeaderWait { leader: leader.0 });
        }
    }

    /// Tokens `from..to` of the row came from the tree. What was computed before a preemption is no
    /// hit.
    pub(crate) fn count_hits(&mut self, slot: RowSlot, from: u32, to: u32) {
        let row = &self.rows[slot.index()];
        let first =
            if planted(Fault::RecomputeCountedAsHits) { from } else { from.max(row.high_water) };
        let hits = to.saturating_sub(first);
        self.stats.prefix_cache_hits += u64::from(hits);
        let name = &mut self.names[slot.index()];
        name.num_cached_tokens += hits;
        self.sequences[row.sequence].num_cached_tokens = Some(name.num_cached_tokens);
        if let Some(&block) = self.kv.table(slot).last() {
            self.block_user[block as usize] = slot;
        }
    }

    /// Give the row `take` tokens: blocks for them, a copy of a shared tail, and what they complete.
    pub(crate) fn take_tokens(&mut self, pass: &mut Pass<'_>, slot: RowSlot, take: u32) {
        self.own_tail(pass, slot);
        let block_size = self.config.block_size;
        let row = &mut self.rows[slot.index()];
        if row.has(flags::SCORE) {
            // Every token has an output row; one of them is the row's own.
            pass.budget.take_outputs(take - u32::from(row.take == 0));
        }
        row.scheduled_in = pass.step.0 as u32;
        row.take += take;
        row.num_computed += take;
        let blocks = row.num_computed.div_ceil(block_size) as usize;
        let fresh = blocks.saturating_sub(self.kv.num_blocks_of(slot));
        self.kv.allocate(slot, fresh).expect("room was made");
        self.rows[slot.index()].last_block = self.kv.table(slot)[blocks - 1];
        self.offer_blocks(slot, pass.step);
        self.claim_next(slot);
        let row = &self.rows[slot.index()];
        if row.remaining() == 0 && row.has(flags::UNFORKED) {
            self.fork(pass, slot);
        }
    }

    /// Before a row writes into a block that forks share: make it its own.
    fn own_tail(&mut self, pass: &Pass<'_>, slot: RowSlot) {
        let row = &mut self.rows[slot.index()];
        if !row.has(flags::FORKED) {
            return;
        }
        row.flags &= !flags::FORKED;
        let index = (row.num_computed / self.config.block_size) as usize;
        let copied = self.kv.copy_on_write(slot, index).expect("room was made");
        if let Some((source, destination)) = copied {
            let row = &mut self.rows[slot.index()];
            row.flags |= flags::TAIL_COPIED;
            self.stats.num_copied_blocks += 1;
            let copy = if planted(Fault::CopyOrderSwapped) {
                (destination.0, source.0)
            } else {
                (source.0, destination.0)
            };
            self.scratch.copies.push(copy);
            self.pin_source(pass.step, source, index);
        }
    }

    /// The copy names its source in this step: the rows that still hold it, those that are leaving
    /// too, give it back when this step has committed and not before.
    fn pin_source(&mut self, step: StepId, source: BlockId, index: usize) {
        let Self { kv, rows, service, leaving, .. } = self;
        for slot in service.slots().chain(leaving.iter().copied()) {
            if kv.table(slot).get(index) == Some(&(source.0 as i32)) {
                rows[slot.index()].last_step = step;
            }
        }
    }

    /// Put the row's full blocks of known tokens into the prefix tree.
    pub(crate) fn offer_blocks(&mut self, slot: RowSlot, step: StepId) {
        if !self.config.enable_prefix_caching {
            return;
        }
        let row = &mut self.rows[slot.index()];
        let full = if planted(Fault::SharedBeforeWritten) {
            let tables = self.kv.num_blocks_of(slot) as u32;
            (row.num_known / self.config.block_size).min(tables)
        } else {
            row.num_computed.min(row.num_known) / self.config.block_size
        };
        if full <= row.num_offered {
            return;
        }
        row.num_offered = full;
        self.store_tail(slot);
        let row = &self.rows[slot.index()];
        let sequence = &self.sequences[row.sequence];
        let request = &self.requests[sequence.request].request;
        let key = SeqKey { namespace: request.namespace, spans: &request.spans };
        self.kv.share(slot, key, &sequence.tokens, full as usize, step);
        let block = self.kv.table(slot)[full as usize - 1];
        self.block_user[block as usize] = slot;
    }

    /// Say which block the row computes next, so that others can wait for it.
    fn claim_next(&mut self, slot: RowSlot) {
        self.drop_claim(slot);
        let row = &self.rows[slot.index()];
        if row.remaining() == 0 {
            return;
        }
        let sequence = &self.sequences[row.sequence];
        let request = &self.requests[sequence.request].request;
        let key = SeqKey { namespace: request.namespace, spans: &request.spans };
        if let Some(hash) = self.kv.next_block_hash(slot, key, &sequence.tokens) {
            // 0 stands for no claim; a block with that hash is computed twice at worst.
            self.names[slot.index()].claim = hash;
            self.claims.insert(hash, slot);
        }
    }

    /// Nobody need wait for this row any more.
    pub(crate) fn drop_claim(&mut self, slot: RowSlot) {
        let claim = std::mem::take(&mut self.names[slot.index()].claim);
        if claim != 0 && self.claims.get(&claim) == Some(&slot) {
            self.claims.remove(&claim);
        }
    }

    /// Begin the request's other sequences on this row's prompt: they share its blocks, and the
    /// output row of its last token is theirs too. Those that find no row slot wait in the queue.
    fn fork(&mut self, pass: &mut Pass<'_>, parent: RowSlot) {
        self.rows[parent.index()].flags &= !flags::UNFORKED;
        let request = self.sequences[self.rows[parent.index()].sequence].request;
        while self.requests[request].num_spawned < self.requests[request].request.num_sequences {
            let sequence = self.spawn_sibling(request);
            if self.can_fork(pass, sequence, parent) {
                self.fork_one(pass, parent, sequence);
            } else {
                self.wait(sequence);
            }
        }
    }

    fn can_fork(&self, pass: &Pass<'_>, sequence: u32, parent: RowSlot) -> bool {
        let request = &self.requests[self.sequences[sequence].request].request;
        let words = request.sampling.len() + self.sequences[sequence].tokens.len();
        !self.free_slots.is_empty()
            && pass.budget.spare_outputs() > 0
            && pass.writer.event_words_left() >= words
            && self.edits_left(pass) >= self.kv.num_blocks_of(parent)
    }

    fn fork_one(&mut self, pass: &mut Pass<'_>, parent: RowSlot, sequence: u32) {
        let slot = self.assign(pass, sequence);
        self.kv.fork(parent, slot);
        self.scratch.matched += self.kv.num_blocks_of(parent);
        let above = self.rows[parent.index()];
        let row: &mut Row = &mut self.rows[slot.index()];
        row.num_computed = above.num_computed;
        row.num_offered = above.num_offered;
        row.last_block = above.last_block;
        row.num_pending = 1;
        row.last_step = pass.step;
        row.scheduled_in = pass.step.0 as u32;
        if !above.num_computed.is_multiple_of(self.config.block_size)
            && !planted(Fault::CopyOnWriteSkipped)
        {
            row.flags |= flags::FORKED;
            self.rows[parent.index()].flags |= flags::FORKED;
        }
        pass.budget.take_outputs(1);
        self.scratch.forks.push((parent, slot));
        self.stats.num_forks += 1;
        let cached = self.names[parent.index()].num_cached_tokens;
        self.names[slot.index()].num_cached_tokens = cached;
        let state = &mut self.sequences[sequence];
        state.num_cached_tokens = Some(cached);
        let seq = state.id;
        self.note(seq, EventKind::Forked { slot: slot.0 });
        self.scratch.joining.push((slot, Some(parent)));
    }
}

/// Most tokens of a sequence that a prefix match may cover: one is left to compute, and none whose
/// output is wanted is skipped.
pub(crate) fn match_limit(sequence: &Sequence, scores: bool) -> usize {
    let scores = scores && sequence.num_output_tokens() == 0;
    if scores {
        return 0;
    }
    sequence.tokens.len() - usize::from(!planted(Fault::MatchOfAllTokens))
}

#[cfg(test)]
mod tests;
