//! Output rows: who samples, what is scored, which forks begin.

use fastserve_base::OutputKind;

use crate::check::step::{Flight, FlightOutput, PlanCheck, RowView};
use crate::ledger::Place;
use crate::model;
use crate::trace::Event;
use crate::violation::{Check, ensure};

impl PlanCheck<'_> {
    /// Every row that reaches its last token samples once, and nothing else does but forks of a whole
    /// prompt. Every prompt position of a sequence that is scored has one score.
    pub(crate) fn outputs(&mut self, flight: &mut Flight) -> Check {
        let mut num_own = vec![0_usize; self.rows.len()];
        let mut num_scores = vec![0_usize; self.rows.len()];
        for output in 0..self.view.out_rows().len() {
            let token = self.view.out_rows()[output];
            let slot = self.view.out_slots()[output] as u32;
            let Some(row) = self.rows.iter().position(|row| row.tokens.contains(&(token as usize)))
            else {
                ensure!(false, "outputs", "out_rows {token} is no token of the step");
                unreachable!()
            };
            let position = self.rows[row].start + token as usize - self.rows[row].tokens.start;
            let kind = self.view.out_kinds()[output];
            let found = match (kind, slot == self.rows[row].slot) {
                (0, true) => {
                    num_own[row] += 1;
                    self.sample(row, position)?
                }
                (0, false) => self.fork(row, slot, position, flight)?,
                (2, true) => {
                    num_scores[row] += 1;
                    self.score(row, position)?
                }
                _ => {
                    ensure!(false, "outputs", "kind {kind} for slot {slot} of another's token");
                    unreachable!()
                }
            };
            flight.outputs.push(found);
        }
        for (row, view) in self.rows.iter().enumerate() {
            self.check_counts(view, num_own[row], num_scores[row])?;
        }
        self.birth(flight);
        Ok(())
    }

    fn check_counts(&self, row: &RowView, num_own: usize, num_scores: usize) -> Check {
        // `num_total` counts the sample by now, if there is one.
        let state = &self.ledger.seqs[row.seq];
        let total = state.num_total - num_own.min(1);
        let wanted = usize::from(row.seq_len == total);
        ensure!(
            num_own == wanted,
            "outputs",
            "{} computes {} of {total} tokens and samples {num_own} times",
            self.ledger.name(row.seq),
            row.seq_len
        );
        let scored =
            self.ledger.record_of(row.seq).request.score_prompt && state.num_outputs() == 0;
        let last = state.stream.num_prompt - 1;
        let wanted = if scored { row.seq_len.min(last).saturating_sub(row.start) } else { 0 };
        ensure!(
            num_scores == wanted,
            "outputs",
            "{} computes positions {}..{} with {num_scores} scores, want {wanted}",
            self.ledger.name(row.seq),
            row.start,
            row.seq_len
        );
        Ok(())
    }

    /// What the model says after `position` of a row, to the sampler of `slot`.
    fn run_model(&self, row: usize, position: usize, slot: u32) -> Check<u32> {
        let place = self.device.place(self.rows[row].slot, position)?;
        let sampler = self.device.rows[slot as usize].sampler;
        Ok(model::next_token(self.device.kv[place].prefix, sampler, self.config.vocab_size))
    }

    fn sample(&mut self, row: usize, position: usize) -> Check<FlightOutput> {
        let RowView { slot, seq, seq_len, .. } = self.rows[row];
        ensure!(
            position + 1 == seq_len,
            "outputs",
            "slot {slot} samples at position {position} of a row that ends at {seq_len}"
        );
        self.sampled(row, position, slot, seq)
    }

    /// `slot` samples, a row's own or a fork's.
    fn sampled(
        &mut self,
        row: usize,
        position: usize,
        slot: u32,
        seq: usize,
    ) -> Check<FlightOutput> {
        let token = self.run_model(row, position, slot)?;
        let (step, name) = (self.step(), self.ledger.name(seq));
        let state = &mut self.ledger.seqs[seq];
        let expected = state.stream.tokens.get(position + 1).copied();
        ensure!(
            expected == Some(token),
            "exact tokens",
            "{name} samples {token} at position {}, alone it is {expected:?}",
            position + 1
        );
        state.num_total = position + 2;
        let state = &mut self.device.rows[slot as usize];
        state.last_sample = Some(token);
        state.touched = step;
        Ok(FlightOutput { seq, kind: OutputKind::Sample, position, token })
    }

    fn fork(
        &mut self,
        row: usize,
        slot: u32,
        position: usize,
        flight: &mut Flight,
    ) -> Check<FlightOutput> {
        let parent = self.rows[row].clone();
        let owner = self.device.rows.get(slot as usize).and_then(|state| state.owner);
        let Some(seq) = owner else {
            ensure!(false, "stale row slot", "a fork in slot {slot}, which nobody has");
            unreachable!()
        };
        let (above, state) = (&self.ledger.seqs[parent.seq], &self.ledger.seqs[seq]);
        let num_prompt = state.stream.num_prompt;
        ensure!(
            above.request == state.request
                && self.assigned.contains(&seq)
                && position + 1 == num_prompt
                && state.num_known == num_prompt
                && !flight.seqs.contains(&seq),
            "outputs",
            "{} is no fork of {} at position {position}",
            self.ledger.name(seq),
            self.ledger.name(parent.seq)
        );
        for index in 0..num_prompt.div_ceil(self.device.block_size) {
            let (theirs, own) =
                (self.device.block(parent.slot, index)?, self.device.block(slot, index)?);
            ensure!(
                theirs == own,
                "outputs",
                "fork {} has block {own} at {index}, its parent {theirs}",
                self.ledger.name(seq)
            );
        }
        let (epoch, cached) = (above.epoch, above.num_cached);
        let state = &mut self.ledger.seqs[seq];
        state.epoch = epoch;
        state.num_cached = cached;
        state.computed = Some(num_prompt);
        state.high_water = state.high_water.max(num_prompt);
        self.counters.num_forks += 1;
        self.trace.push(self.sizes.step.0, Event::Fork { seq: state.id, slot });
        flight.seqs.push(seq);
        self.sampled(row, position, slot, seq)
    }

    fn score(&mut self, row: usize, position: usize) -> Check<FlightOutput> {
        let RowView { seq, .. } = self.rows[row];
        let state = &mut self.ledger.seqs[seq];
        let token = state.stream.tokens.get(position + 1).copied().unwrap_or_default();
        ensure!(
            position + 1 < state.stream.num_prompt && position <= state.num_scored_planned,
            "outputs",
            "a score at position {position} after {} of {} prompt tokens",
            state.num_scored_planned,
            state.stream.num_prompt
        );
        state.num_scored_planned = state.num_scored_planned.max(position + 1);
        Ok(FlightOutput { seq, kind: OutputKind::Score, position, token })
    }

    /// Where a prompt became whole, the request's other sequences exist: as forks, or in the queue.
    fn birth(&mut self, flight: &Flight) {
        for output in &flight.outputs {
            if output.kind != OutputKind::Sample {
                continue;
            }
            let number = self.ledger.seqs[output.seq].request;
            if self.ledger.requests[number].request.num_sequences == 1 {
                continue;
            }
            for sibling in self.ledger.requests[number].seqs() {
                let place = &mut self.ledger.seqs[sibling].place;
                if *place == Place::Unborn {
                    *place = Place::Waiting;
                }
            }
        }
    }
}
