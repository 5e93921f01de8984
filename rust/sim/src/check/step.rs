//! One plan, from slot events to sampled tokens, run on the shadow and checked on the way.
//!
//! The order is the device's: slot events and table edits, copies, then every row's writes, then every
//! row's attention, then the outputs.

use std::ops::Range;

use fastserve_base::{CoreConfig, OutputKind};
use fastserve_engine::PlanSizes;
use fastserve_sched::plan::{COPY_WORDS, TABLE_EDIT_WORDS};
use fastserve_sched::{Header, PlanView};

use crate::check::Counters;
use crate::device::{Device, DeviceChanges};
use crate::ledger::{Ledger, Place};
use crate::trace::{Event, Trace};
use crate::transfers::{Direction, Tier};
use crate::violation::{Check, ensure};

/// A step planned and not committed.
#[derive(Debug, Clone, Default)]
pub struct Flight {
    /// Its id.
    pub step: u64,
    /// Rows.
    pub num_rows: u32,
    /// Tokens.
    pub num_tokens: u32,
    /// Sequences preempted by its plan.
    pub num_preempted: u32,
    /// When it was planned.
    pub planned_at: u64,
    /// What its plan changed on the device, to be undone where the plan got lost.
    pub changes: DeviceChanges,
    /// Sequences with their first row since they got a slot, and where it starts.
    pub admissions: Vec<(usize, usize)>,
    /// Its output rows.
    pub outputs: Vec<FlightOutput>,
    /// Sequences with a row in it, and forks begun in it.
    pub seqs: Vec<usize>,
}

/// What an output row is for, and what the model says.
#[derive(Debug, Clone, Copy)]
pub struct FlightOutput {
    /// The sequence.
    pub seq: usize,
    /// Sample or score.
    pub kind: OutputKind,
    /// Position of the token whose logits are taken.
    pub position: usize,
    /// The token that the model samples.
    pub token: u32,
}

/// A row of the plan.
#[derive(Debug, Clone)]
pub struct RowView {
    /// Its row slot.
    pub slot: u32,
    /// The sequence in it.
    pub seq: usize,
    /// Its tokens, as indices into the step's.
    pub tokens: Range<usize>,
    /// Position of the first.
    pub start: usize,
    /// Tokens with K and V after the step.
    pub seq_len: usize,
    /// Tokens that the sequence had to go, those of this step included.
    pub remaining: usize,
    /// Where its sequence stood, if it was running already and has gone ahead by prefix match.
    pub rematched_from: Option<usize>,
}

/// A plan under check.
pub struct PlanCheck<'a> {
    /// Limits in force.
    pub config: &'a CoreConfig,
    /// The plan.
    pub view: PlanView<'a>,
    /// What `plan` answered.
    pub sizes: PlanSizes,
    /// The core's own block tables.
    pub block_tables: &'a [i32],
    /// Number of resets of the prefix cache so far.
    pub epoch: u32,
    /// What is known of sequences.
    pub ledger: &'a mut Ledger,
    /// The shadow.
    pub device: &'a mut Device,
    /// The other tier.
    pub tier: &'a mut Tier,
    /// What is counted.
    pub counters: &'a mut Counters,
    /// What happened.
    pub trace: &'a mut Trace,
    /// Sequences that were running before the plan and were not preempted by it.
    pub stayed: Vec<usize>,
    /// Rows, once they are read.
    pub rows: Vec<RowView>,
    /// Sequences assigned in this plan.
    pub assigned: Vec<usize>,
    /// Table entries that this plan changes: slot, index.
    pub(crate) edits: Vec<(u32, u32)>,
    /// Table edits of blocks that an earlier step in flight names: slot, index, block.
    pub(crate) edits_under_flight: Vec<(u32, usize, usize)>,
}

impl PlanCheck<'_> {
    /// Its step.
    pub fn step(&self) -> u64 {
        self.sizes.step.0
    }

    /// Check and run the plan.
    ///
    /// # Errors
    ///
    /// The first contract that it breaks.
    pub fn run(&mut self, last_step: u64) -> Check<Flight> {
        self.header(last_step)?;
        self.slot_events()?;
        let replaced = self.table_edits()?;
        self.tier_copies()?;
        self.copies(&replaced)?;
        self.read_rows()?;
        self.budgets()?;
        self.prompt_weight()?;
        self.check_rows()?;
        self.write_rows()?;
        self.attend_rows()?;
        self.shared_in_flight()?;
        let mut flight = Flight {
            step: self.step(),
            num_rows: self.sizes.num_rows,
            num_tokens: self.sizes.num_tokens,
            ..Flight::default()
        };
        flight.admissions = self.advance_rows();
        self.no_work_twice(&flight.admissions)?;
        self.outputs(&mut flight)?;
        self.after(&mut flight)?;
        flight.changes = self.device.take_changes();
        Ok(flight)
    }

    fn header(&self, last_step: u64) -> Check {
        let count = |field| self.view.count(field) as u32;
        let sizes = self.sizes;
        ensure!(
            self.view.step() == sizes.step && sizes.step.0 > last_step,
            "plan",
            "step {} of the header, {} of the sizes, after {last_step}",
            self.view.step().0,
            sizes.step.0
        );
        ensure!(
            (sizes.num_rows, sizes.num_tokens, sizes.num_outputs)
                == (count(Header::NumRows), count(Header::NumTokens), count(Header::NumOutputs)),
            "plan",
            "sizes {sizes:?} are not the header's"
        );
        let fields = [Header::NumCopiesOut, Header::NumCopiesIn, Header::NumCopies];
        ensure!(
            sizes.num_copies == fields.into_iter().map(count).sum::<u32>(),
            "plan",
            "sizes {sizes:?} are not the header's copies"
        );
        Ok(())
    }

    fn slot_events(&mut self) -> Check {
        let view = self.view;
        for event in view.slot_events() {
            if !event.assigned {
                self.released(event.slot as u32)?;
                continue;
            }
            let Some(seq) = self.ledger.find(event.request, event.index) else {
                ensure!(
                    false,
                    "plan",
                    "slot {} is assigned to r{}.{}, which is not live",
                    event.slot,
                    event.request,
                    event.index
                );
                unreachable!()
            };
            self.vacate(event.slot as u32)?;
            self.device.assign(&event, seq)?;
            let request = &self.ledger.record_of(seq).request;
            ensure!(
                event.sampling == request.sampling && event.adapter == request.adapter as i32,
                "plan",
                "slot {}: sampling record or adapter is not of {}",
                event.slot,
                self.ledger.name(seq)
            );
            let state = &mut self.ledger.seqs[seq];
            ensure!(
                matches!(state.place, Place::Waiting | Place::Unborn | Place::Leaving(_)),
                "plan",
                "slot {} is assigned to r{}.{}, which is {:?}",
                event.slot,
                event.request,
                event.index,
                state.place
            );
            let known = &state.stream.tokens[..state.num_known];
            ensure!(
                event.num_prompt_tokens as usize == state.stream.num_prompt
                    && event.tokens.iter().map(|&token| token as u32).eq(known.iter().copied()),
                "exact tokens",
                "slot {}: the event's tokens {:?} are not r{}.{}'s {known:?}",
                event.slot,
                event.tokens,
                event.request,
                event.index
            );
            state.place = Place::Running(event.slot as u32);
            state.roll_back();
            state.epoch = self.epoch;
            state.num_copies = 0;
            state.num_admissions += 1;
            self.assigned.push(seq);
        }
        Ok(())
    }

    /// An assignment stands for the release of whoever left the slot before.
    fn vacate(&mut self, slot: u32) -> Check {
        let owner = self.device.rows.get(slot as usize).and_then(|row| row.owner);
        match owner {
            Some(seq) if self.ledger.seqs[seq].place != Place::Running(slot) => self.released(slot),
            _ => Ok(()),
        }
    }

    fn released(&mut self, slot: u32) -> Check {
        let seq = self.device.release(slot)?;
        let state = &mut self.ledger.seqs[seq];
        ensure!(
            state.place != Place::Running(slot),
            "plan",
            "slot {slot} is released while r{}.{} runs in it",
            state.id.request.0,
            state.id.index
        );
        if state.place == Place::Leaving(slot) {
            state.place = Place::Waiting;
        }
        Ok(())
    }

    /// Returns the entries that changed from one block to another: slot, old block, new block.
    fn table_edits(&mut self) -> Check<Vec<(u32, u32, u32)>> {
        let mut replaced = Vec::new();
        for edit in self.view.table_edits().chunks_exact(TABLE_EDIT_WORDS) {
            let (slot, index, block) = (edit[0] as u32, edit[1] as usize, edit[2] as u32);
            self.edits.push((slot, index as u32));
            if let Some(before) = self.device.edit(slot, index, block)? {
                replaced.push((slot, before, block));
            }
            if self.device.block_touched[block as usize] > self.device.done {
                self.edits_under_flight.push((slot, index, block as usize));
            }
        }
        Ok(replaced)
    }

    fn tier_copies(&mut self) -> Check {
        let step = self.step();
        let (out, inward) = (self.view.copies_out(), self.view.copies_in());
        self.tier.list(out, Direction::Out, self.device, step)?;
        self.tier.list(inward, Direction::In, self.device, step)?;
        for block in self.tier.busy_blocks() {
            self.device.busy[block] = true;
        }
        Ok(())
    }

    fn copies(&mut self, replaced: &[(u32, u32, u32)]) -> Check {
        let step = self.step();
        let copies: Vec<(u32, u32)> = self
            .view
            .copies()
            .chunks_exact(COPY_WORDS)
            .map(|copy| (copy[0] as u32, copy[1] as u32))
            .collect();
        for (at, &(source, destination)) in copies.iter().enumerate() {
            ensure!(
                copies.iter().all(|&(other, _)| other != destination)
                    && copies[..at].iter().all(|&(_, other)| other != destination),
                "copies",
                "block {destination} is a destination twice, or a source too: {copies:?}"
            );
            let owner = replaced
                .iter()
                .find(|&&(_, before, block)| (before, block) == (source, destination));
            ensure!(
                owner.is_some(),
                "copies",
                "copy of block {source} to {destination}, but no table goes from one to the other"
            );
            let holders = self.device.holders(destination as usize);
            ensure!(
                holders.iter().all(|holder| self.edits.contains(holder)),
                "copies",
                "block {destination} is copied onto, and stands in the tables {holders:?} already"
            );
            let mut num_used = 0;
            if let Some(seq) = owner.and_then(|&(slot, ..)| self.device.rows[slot as usize].owner) {
                let state = &mut self.ledger.seqs[seq];
                state.num_copies += 1;
                num_used = state.computed.unwrap_or(0) % self.device.block_size;
                ensure!(
                    state.num_copies == 1 && self.ledger.record_of(seq).request.num_sequences > 1,
                    "copies",
                    "{} copies more than one partial block",
                    self.ledger.name(seq)
                );
            }
            self.device.copy(source as usize, destination as usize, num_used, step)?;
            self.counters.num_copied_blocks += 1;
            self.trace.push(step, Event::Copy { source, destination });
        }
        for &(slot, before, block) in replaced {
            ensure!(
                copies.contains(&(before, block)),
                "copies",
                "slot {slot} exchanges block {before} for {block} without a copy"
            );
        }
        Ok(())
    }

    /// A block that an earlier step in flight names may stand in a new table only if it is shared:
    /// it holds what the table's sequence would write there itself.
    fn shared_in_flight(&self) -> Check {
        for &(slot, index, block) in &self.edits_under_flight {
            let Some(seq) = self.device.rows[slot as usize].owner else { continue };
            let first = index * self.device.block_size;
            let kv = &self.device.kv[block * self.device.block_size];
            let stream = &self.ledger.seqs[seq].stream;
            ensure!(
                kv.position as usize == first && stream.prefixes.get(first) == Some(&kv.prefix),
                "in flight",
                "block {block} goes to slot {slot} as new while a step in flight uses it"
            );
        }
        Ok(())
    }

    /// What the plan leaves behind in the ledger.
    fn after(&mut self, flight: &mut Flight) -> Check {
        for &seq in &self.assigned {
            let state = &self.ledger.seqs[seq];
            ensure!(
                state.computed.is_some(),
                "order",
                "{} was admitted, but given nothing to compute",
                self.ledger.name(seq)
            );
            let number = state.request;
            self.ledger.requests[number].was_admitted = true;
        }
        flight.seqs.extend(self.rows.iter().map(|row| row.seq));
        self.decode_first()?;
        self.long_share()?;
        self.admission_order()
    }
}
