//! The results of a step: tokens are appended, stop rules applied, blocks and slots given back.

use fastserve_base::fault::{Fault, planted};
use fastserve_base::{FinishReason, Nanos, RowSlot, StepError, StepId};
use fastserve_sched::rows::flags;
use fastserve_sched::{Row, Status};

use crate::core::{Core, Flight};
use crate::intake::Ending;
use crate::outputs::{Entry, EventKind, Results, StepRecord};

impl Core {
    /// Take the results of the oldest step in flight.
    ///
    /// # Errors
    ///
    /// [`StepError`] if another step is next, or the results do not fit its plan. The core is
    /// unchanged then.
    pub fn commit(
        &mut self,
        step: StepId,
        now: Nanos,
        results: Results<'_>,
    ) -> Result<(), StepError> {
        self.check_turn(step)?;
        self.check_results(&self.flights[0], results)?;
        self.last_now = now;
        let flight = self.flights.pop_front().expect("checked above");
        for (row, output) in flight.outputs.iter().enumerate() {
            self.look_ahead_of_output(&flight.outputs, row);
            if output.samples {
                self.accept(row, output.slot, results);
            } else if results.counts[row] < 0 {
                self.fail_row(row, output.slot);
            }
        }
        self.kv.step_committed(step);
        self.settle_ended();
        self.settle_transfers(self.oldest_in_flight());
        self.stats.num_steps += 1;
        self.record(&flight, now, false);
        self.idle_flights.push(flight);
        self.publish();
        Ok(())
    }

    /// The oldest step in flight failed, and with it every step planned on top of it: their
    /// sequences go back to the queue and compute again. Nothing of them may be committed any more.
    ///
    /// A sequence under which more than `max_num_step_failures` steps failed since its last token ends
    /// with `error`: what commits in between and is lost again does not count.
    ///
    /// # Errors
    ///
    /// [`StepError::OutOfOrder`] if another step is the oldest.
    pub fn fail(&mut self, step: StepId, now: Nanos) -> Result<(), StepError> {
        self.check_turn(step)?;
        self.last_now = now;
        let mut rolled_back: Vec<RowSlot> = self
            .service
            .slots()
            .filter(|&slot| {
                let row = &self.rows[slot.index()];
                // What is pending waits for a step in flight, and all of those fail.
                let follows = self.kv.pending_step(slot).is_some();
                let planned = row.last_step >= step;
                let kept = planted(Fault::FollowerOfFailedStepKept)
                    && self.names[slot.index()].num_cached_tokens > 0;
                !row.has(flags::LEAVING) && (planned || follows) && !kept
            })
            .collect();
        self.fail_transfers(step);
        self.kv.step_failed(step);
        while let Some(flight) = self.flights.pop_front() {
            self.record(&flight, now, true);
            self.stats.num_failed_steps += 1;
            self.idle_flights.push(flight);
        }
        rolled_back.sort_unstable();
        for slot in rolled_back {
            self.roll_back(slot);
        }
        self.purge();
        self.settle_leaving(None);
        self.settle_transfers(None);
        self.publish();
        Ok(())
    }

    fn roll_back(&mut self, slot: RowSlot) {
        self.store_tail(slot);
        let row = self.rows[slot.index()];
        let sequence = &mut self.sequences[row.sequence];
        sequence.num_failures += 1;
        sequence.high_water = sequence.high_water.max(row.num_computed);
        let (seq, failures) = (sequence.id, sequence.num_failures);
        self.stats.num_rollbacks += 1;
        self.note(seq, EventKind::RolledBack { failures });
        if failures > self.config.max_num_step_failures {
            self.end(row.sequence, Ending::now(FinishReason::Error));
        } else {
            self.sequences[row.sequence].status = Status::Settling(slot);
            self.leave(slot);
        }
    }

    fn check_turn(&self, step: StepId) -> Result<(), StepError> {
        let expected = self.oldest_in_flight();
        if expected == Some(step) {
            return Ok(());
        }
        Err(StepError::OutOfOrder { got: step, expected })
    }

    fn check_results(&self, flight: &Flight, results: Results<'_>) -> Result<(), StepError> {
        let outputs = flight.outputs.len();
        for got in [results.counts.len(), results.tokens.len()] {
            if got != outputs {
                return Err(StepError::WrongResultLength { step: flight.step, outputs, got });
            }
        }
        let vocab_size = self.config.vocab_size;
        for (row, output) in flight.outputs.iter().enumerate() {
            let (count, token) = (results.counts[row], results.tokens[row]);
            let wanted = i32::from(output.samples);
            if count >= 0 && count != wanted {
                return Err(StepError::BadResult {
                    step: flight.step,
                    row,
                    what: "count",
                    value: i64::from(count),
                    want: format!("{wanted}, or a negative number for an error"),
                });
            }
            // A negative token is a large number here.
            if count == 1 && token as u32 >= vocab_size {
                return Err(StepError::BadResult {
                    step: flight.step,
                    row,
                    what: "token",
                    value: i64::from(token),
                    want: format!("0 to {}", vocab_size - 1),
                });
            }
        }
        Ok(())
    }

    /// One sampled token.
    #[inline]
    fn accept(&mut self, output: usize, slot: RowSlot, results: Results<'_>) {
        let row = &mut self.rows[slot.index()];
        if row.sequence == u32::MAX {
            return; // It ended while the step ran.
        }
        row.num_pending -= 1;
        if results.counts[output] < 0 {
            self.fail_row(output, slot);
            return;
        }
        let token = results.tokens[output] as u32;
        self.push_token(slot, token);
        let row = &self.rows[slot.index()];
        self.stats.num_generation_tokens += 1;
        let name = &self.names[slot.index()];
        let num_output_tokens = row.num_known - name.num_prompt_tokens;
        let may_stop = row.num_known >= row.stops_from
            && (token == row.stop_token || row.has(flags::MANY_STOPS));
        if may_stop || row.num_known >= row.limit {
            let row = *row;
            if let Some(ending) = self.stop_rule(&row, token, output) {
                let first = num_output_tokens == 1;
                if first {
                    self.note(self.names[slot.index()].seq, EventKind::FirstToken);
                }
                self.end(row.sequence, ending);
                return;
            }
        }
        let name = &self.names[slot.index()];
        self.outputs.push(&Entry {
            seq: name.seq,
            source_row: output as i32,
            token: Some(token),
            finish: None,
            stop_token: None,
            num_cached_tokens: name.num_cached_tokens,
            num_output_tokens,
        });
        if num_output_tokens == 1 {
            self.note(name.seq, EventKind::FirstToken);
        }
        let row = &self.rows[slot.index()];
        if row.num_pending > 0 {
            // A step in flight writes the K and V of this token; now it is known.
            self.offer_blocks(slot, row.last_step);
        }
    }

    /// Whether the token just accepted ends the sequence.
    fn stop_rule(&self, row: &Row, token: u32, output: usize) -> Option<Ending> {
        let ending = |reason, stop_token| Ending {
            reason,
            source_row: output as i32,
            token: Some(token),
            stop_token,
            num_tokens_kept: None,
        };
        if row.num_known >= row.stops_from {
            let request = self.sequences[row.sequence].request;
            if self.requests[request].request.stop_token_ids.contains(&token) {
                return Some(ending(FinishReason::Stop, Some(token)));
            }
        }
        (row.num_known >= row.limit).then(|| ending(FinishReason::Length, None))
    }

    /// An output row that came back as an error ends its sequence alone.
    fn fail_row(&mut self, output: usize, slot: RowSlot) {
        let sequence = self.rows[slot.index()].sequence;
        if sequence != u32::MAX {
            let source_row = output as i32;
            self.end(sequence, Ending { source_row, ..Ending::now(FinishReason::Error) });
        }
    }

    /// The oldest step that is planned and not committed.
    pub(crate) fn oldest_in_flight(&self) -> Option<StepId> {
        self.flights.front().map(|flight| flight.step)
    }

    /// Those that leave go out of both orders, and give back what no step in flight names. Mostly
    /// nobody leaves, and the rows are not looked at.
    pub(crate) fn settle_ended(&mut self) {
        if !self.leaving.is_empty() {
            self.purge();
            self.settle_leaving(self.oldest_in_flight());
        }
    }

    /// Take leaving rows out of both orders.
    pub(crate) fn purge(&mut self) {
        let Self { rows, service, order, .. } = self;
        let stays = |slot: RowSlot| !rows[slot.index()].has(flags::LEAVING);
        service.retain(stays);
        order.retain(stays);
    }

    /// Give back the blocks and slots of leaving rows that no step in flight names.
    pub(crate) fn settle_leaving(&mut self, oldest: Option<StepId>) {
        let mut kept = 0;
        for at in 0..self.leaving.len() {
            let slot = self.leaving[at];
            let last = self.rows[slot.index()].last_step;
            let named = oldest.is_some_and(|oldest| last >= oldest)
                && !planted(Fault::BlockReusedUnderStepInFlight);
            if named {
                self.leaving[kept] = slot;
                kept += 1;
            } else {
                self.free_slot(slot);
            }
        }
        self.leaving.truncate(kept);
    }

    fn free_slot(&mut self, slot: RowSlot) {
        let sequence = self.rows[slot.index()].sequence;
        if sequence != u32::MAX {
            self.store_tail(slot);
        }
        let is_fork = self.names[slot.index()].seq.index > 0;
        if !(planted(Fault::AbortForkedLeaks) && is_fork && sequence == u32::MAX) {
            self.kv.close(slot);
            self.free_slots.push(slot);
        }
        // The mark of leaving stays until the slot is assigned again: the orders may still list it.
        self.rows[slot.index()] = Row { flags: flags::LEAVING, ..Row::EMPTY };
        if !self.is_released[slot.index()] {
            self.is_released[slot.index()] = true;
            self.released.push(slot);
        }
        if sequence != u32::MAX {
            self.wait(sequence);
        }
    }

    fn record(&mut self, flight: &Flight, now: Nanos, failed: bool) {
        self.step_records.push(StepRecord {
            step: flight.step,
            planned_at: flight.planned_at,
            committed_at: now,
            num_rows: flight.num_rows,
            num_decode_rows: flight.num_decode_rows,
            num_tokens: flight.num_tokens,
            num_preempted: flight.num_preempted,
            failed,
        });
        if !failed && self.last_commit_at > 0 {
            let nanos = now.saturating_sub(flight.planned_at.max(self.last_commit_at));
            self.shared.state().rate.observe(u64::from(flight.num_tokens), nanos);
        }
        self.last_commit_at = now;
    }
}
