//! The plan: what was scheduled, as words, in plan order.

use fastserve_base::{Nanos, OutputKind, RowSlot, StepError, StepId};
use fastserve_sched::rows::flags;
use fastserve_sched::{PlanWriter, Row, StepBudget};

use crate::core::{Core, Flight, FlightOutput};
use crate::outputs::{Lifecycle, PlanSizes};
use crate::schedule::Pass;

impl Core {
    /// Plan the next step and write it into `arena`, at least `layout().words` long.
    ///
    /// Takes over the inbox first, so aborts and submissions take effect here. `now` is in
    /// nanoseconds on any monotonic clock of the caller's. Unless the answer [is a
    /// step](PlanSizes::is_step) there is nothing to run or commit; outputs may still wait.
    ///
    /// # Errors
    ///
    /// [`StepError`] if the arena is too small, too many steps are in flight, or the core is closed.
    pub fn plan(&mut self, now: Nanos, arena: &mut [i32]) -> Result<PlanSizes, StepError> {
        self.check_can_plan(arena.len())?;
        self.intake(now);
        self.settle_ended();
        if self.lifecycle == Lifecycle::Paused {
            self.publish();
            return Ok(PlanSizes::default());
        }
        self.waiting.age(now);
        let Self { service, rows, sequences, .. } = self;
        service.age(now, |slot, key| {
            if let Some(state) = sequences.get_mut(rows[slot.index()].sequence) {
                state.key = key;
            }
        });
        let num_decode_rows = self.look_ahead();
        let mut pass = Pass {
            step: self.next_step,
            now,
            budget: StepBudget::new(&self.config, num_decode_rows),
            writer: PlanWriter::new(&self.layout, arena),
            num_decode_rows,
            num_preempted: 0,
            chunk: None,
            outstanding_blocks: 0,
        };
        self.schedule_running(&mut pass);
        if pass.num_preempted > 0 {
            self.purge();
            self.free_slots.append(&mut self.scratch.freed);
        }
        self.admit(&mut pass);
        self.extend_long(&mut pass);
        self.settle_joining();
        let sizes = self.emit(pass);
        self.publish();
        Ok(sizes)
    }

    fn emit(&mut self, mut pass: Pass<'_>) -> PlanSizes {
        let mut flight = self.idle_flights.pop().expect("a flight is idle");
        flight.clear();
        self.emit_rows(&mut pass, &mut flight);
        self.list_transfers(&mut pass);
        let sizes = PlanSizes {
            step: pass.step,
            num_copies: pass.writer.num_tier_copies() + self.scratch.copies.len() as u32,
            num_rows: pass.writer.num_rows(),
            num_tokens: pass.writer.num_tokens(),
            num_outputs: pass.writer.num_outputs(),
        };
        self.scratch.matched = 0;
        if !sizes.is_step() {
            pass.writer.finish(pass.step);
            self.idle_flights.push(flight);
            return PlanSizes::default();
        }
        self.emit_releases(&mut pass);
        for (source, destination) in self.scratch.copies.drain(..) {
            pass.writer.copy(source, destination);
        }
        flight.step = pass.step;
        flight.planned_at = pass.now;
        flight.num_tokens = sizes.num_tokens;
        flight.num_decode_rows = pass.num_decode_rows;
        flight.num_preempted = pass.num_preempted;
        flight.num_rows = sizes.num_rows;
        flight.slots.extend(self.scratch.forks.drain(..).map(|(_, fork)| fork));
        self.stats.num_scheduled_tokens += u64::from(sizes.num_tokens);
        self.next_step = StepId(pass.step.0 + 1);
        self.flights.push_back(flight);
        pass.writer.finish(pass.step);
        sizes
    }

    fn emit_rows(&mut self, pass: &mut Pass<'_>, flight: &mut Flight) {
        let mark = pass.mark();
        let shift = self.config.block_size.trailing_zeros();
        let mut carried = u32::MAX;
        let mut before = 0;
        for at in 0..self.order.places().len() {
            let place = self.order.places()[at];
            let slot = place.slot;
            carried = carried.min(place.num_shared);
            let row = &mut self.rows[slot.index()];
            if row.take == 0 || row.scheduled_in != mark {
                continue;
            }
            let take = std::mem::take(&mut row.take);
            let start = row.num_computed - take;
            let whole = start >> shift;
            let shared = carried.min(before).min(whole);
            (carried, before) = (u32::MAX, whole);
            pass.writer.row(slot.0, row.num_computed, shared);
            row.last_step = pass.step;
            flight.slots.push(slot);
            if take == 1 && start + 1 == row.num_known + row.num_pending {
                self.emit_last_token(pass, flight, slot, start);
            } else {
                self.emit_chunk(pass, flight, slot, start, take);
            }
        }
    }

    /// A row with one token to go: what most rows are.
    #[inline]
    fn emit_last_token(
        &mut self,
        pass: &mut Pass<'_>,
        flight: &mut Flight,
        slot: RowSlot,
        start: u32,
    ) {
        let block_size = self.config.block_size;
        let row = &mut self.rows[slot.index()];
        let offset = start & (block_size - 1);
        let word = if row.num_pending > 0 { -1 - slot.0 as i32 } else { row.last_token as i32 };
        pass.writer.token(word, start, row.last_block * block_size as i32 + offset as i32);
        row.num_pending += 1;
        pass.writer.output(0, slot.0, OutputKind::Sample);
        flight.outputs.push(FlightOutput { slot, samples: true });
        if offset == 0
            || row.has(flags::TAIL_COPIED)
            || row.high_water > start
            || row.num_known <= self.names[slot.index()].num_prompt_tokens
        {
            self.emit_rarities(pass, flight, slot, start, 1);
        }
    }

    fn emit_chunk(
        &mut self,
        pass: &mut Pass<'_>,
        flight: &mut Flight,
        slot: RowSlot,
        start: u32,
        take: u32,
    ) {
        let row = self.rows[slot.index()];
        let end = start + take;
        // With more than one token to go, none is waited for.
        let reaches_end = end == row.num_known;
        let scores = row.has(flags::SCORE);
        self.emit_tokens(pass, flight, slot, start, take);
        if reaches_end {
            self.rows[slot.index()].num_pending += 1;
            pass.writer.output(0, slot.0, OutputKind::Sample);
            flight.outputs.push(FlightOutput { slot, samples: true });
        } else if scores {
            pass.writer.output(0, slot.0, OutputKind::Score);
            flight.outputs.push(FlightOutput { slot, samples: false });
        }
        self.emit_rarities(pass, flight, slot, start, take);
    }

    /// The tokens of a chunk, and the outputs of all but the last where scores are wanted.
    fn emit_tokens(
        &mut self,
        pass: &mut Pass<'_>,
        flight: &mut Flight,
        slot: RowSlot,
        start: u32,
        take: u32,
    ) {
        let block_size = self.config.block_size;
        let row: Row = self.rows[slot.index()];
        let tokens = &self.sequences[row.sequence].tokens[start as usize..(start + take) as usize];
        pass.writer.tokens(tokens, start, self.kv.table(slot), block_size);
        if row.has(flags::SCORE) {
            for back in (1..take).rev() {
                pass.writer.output(back, slot.0, OutputKind::Score);
                flight.outputs.push(FlightOutput { slot, samples: false });
            }
        }
    }

    /// What most rows do not have: new table entries, forks, recomputed and prompt tokens to count.
    fn emit_rarities(
        &mut self,
        pass: &mut Pass<'_>,
        flight: &mut Flight,
        slot: RowSlot,
        start: u32,
        take: u32,
    ) {
        self.emit_edits(pass, slot, start);
        let name = self.names[slot.index()];
        let row = &self.rows[slot.index()];
        let end = start + take;
        let again = row.high_water.min(end).saturating_sub(start);
        self.stats.num_recomputed_tokens += u64::from(again);
        let fresh = name.num_prompt_tokens.min(end).saturating_sub(start.max(row.high_water));
        self.stats.num_prompt_tokens += u64::from(fresh);
        if row.num_known > name.num_prompt_tokens {
            return;
        }
        for at in 0..self.scratch.forks.len() {
            let (parent, fork) = self.scratch.forks[at];
            if parent == slot {
                pass.writer.output(0, fork.0, OutputKind::Sample);
                flight.outputs.push(FlightOutput { slot: fork, samples: true });
                self.emit_edits(pass, fork, end);
            }
        }
    }

    /// Table entries that the device does not know yet.
    fn emit_edits(&mut self, pass: &mut Pass<'_>, slot: RowSlot, start: u32) {
        let table = self.kv.table(slot);
        let name = &mut self.names[slot.index()];
        let row = &mut self.rows[slot.index()];
        if row.has(flags::TAIL_COPIED) {
            row.flags &= !flags::TAIL_COPIED;
            let index = start / self.config.block_size;
            pass.writer.table_edit(slot.0, index, table[index as usize]);
        }
        for (index, &block) in table.iter().enumerate().skip(name.num_edited as usize) {
            pass.writer.table_edit(slot.0, index as u32, block);
        }
        name.num_edited = table.len() as u32;
    }

    fn emit_releases(&mut self, pass: &mut Pass<'_>) {
        for slot in self.released.drain(..) {
            if std::mem::take(&mut self.is_released[slot.index()]) {
                pass.writer.released(slot.0);
            }
        }
    }
}
