//! Each row of a plan: where it starts, its tokens, where they go, and what they attend to.

use crate::check::step::{PlanCheck, RowView};
use crate::ledger::Place;
use crate::model;
use crate::trace::Event;
use crate::violation::{Check, ensure};

impl PlanCheck<'_> {
    /// Read the rows: sound indices, one row a slot, every slot taken by a sequence that runs.
    pub(crate) fn read_rows(&mut self) -> Check {
        let indptr = self.view.query_indptr();
        let num_tokens = self.view.token_ids().len();
        ensure!(
            indptr[0] == 0
                && indptr.last() == Some(&(num_tokens as i32))
                && indptr.windows(2).all(|pair| pair[0] < pair[1]),
            "rows",
            "query_indptr {indptr:?} over {num_tokens} tokens"
        );
        for (row, &slot) in self.view.row_slots().iter().enumerate() {
            let slot = slot as u32;
            let owner = self.device.rows.get(slot as usize).and_then(|state| state.owner);
            let Some(seq) = owner else {
                ensure!(false, "stale row slot", "a row in slot {slot}, which nobody has");
                unreachable!()
            };
            ensure!(
                self.rows.iter().all(|other| other.slot != slot),
                "rows",
                "slot {slot} has two rows"
            );
            ensure!(
                self.ledger.seqs[seq].place == Place::Running(slot),
                "rows",
                "a row for {} in slot {slot}, which is {:?}",
                self.ledger.name(seq),
                self.ledger.seqs[seq].place
            );
            let tokens = indptr[row] as usize..indptr[row + 1] as usize;
            let positions = &self.view.positions()[tokens.clone()];
            let start = positions[0] as usize;
            ensure!(
                positions[0] >= 0
                    && positions.iter().enumerate().all(|(at, &p)| p as usize == start + at),
                "rows",
                "slot {slot}: positions {positions:?} do not follow each other"
            );
            let seq_len = self.view.seq_lens()[row] as usize;
            ensure!(
                seq_len == start + positions.len(),
                "rows",
                "slot {slot}: seq_len {seq_len} after positions {positions:?}"
            );
            let remaining = self.ledger.seqs[seq].num_total.saturating_sub(start);
            let rematched_from = None;
            self.rows.push(RowView {
                slot,
                seq,
                tokens,
                start,
                seq_len,
                remaining,
                rematched_from,
            });
        }
        Ok(())
    }

    /// Everything about a row that can be told before anything runs.
    pub(crate) fn check_rows(&mut self) -> Check {
        for row in 0..self.rows.len() {
            self.check_start(row)?;
            self.check_tokens(row)?;
            self.check_places(row)?;
            self.check_shared(row)?;
        }
        Ok(())
    }

    fn check_start(&mut self, row: usize) -> Check {
        let RowView { seq, start, seq_len, .. } = self.rows[row];
        let block_size = self.device.block_size;
        let name = self.ledger.name(seq);
        let scores = self.ledger.scores(seq);
        let state = &self.ledger.seqs[seq];
        ensure!(
            state.num_total < state.stream.limit(),
            "rows",
            "{name} runs although the steps in flight fill its {} tokens",
            state.stream.limit()
        );
        ensure!(
            seq_len <= state.num_total,
            "rows",
            "{name} computes up to {seq_len} of {} tokens",
            state.num_total
        );
        let from = state.computed.unwrap_or(0);
        if state.computed == Some(start) || state.computed.is_none() && start == 0 {
            return Ok(());
        }
        ensure!(
            start > from && start.is_multiple_of(block_size) && from.is_multiple_of(block_size),
            "rows",
            "{name} has computed {from} tokens and goes on at {start}"
        );
        ensure!(
            self.config.enable_prefix_caching && start < state.num_known,
            "rows",
            "{name} matched {start} of {} known tokens, caching is {}",
            state.num_known,
            self.config.enable_prefix_caching
        );
        ensure!(
            !scores || start <= state.num_scored_planned || state.num_outputs() > 0,
            "rows",
            "{name} skips position {}, whose output is wanted, by a match of {start}",
            state.num_scored_planned
        );
        if state.computed.is_some() {
            self.rows[row].rematched_from = Some(from);
            self.trace.push(
                self.sizes.step.0,
                Event::Rematch { seq: state.id, from: from as u32, to: start as u32 },
            );
        }
        Ok(())
    }

    /// What a running sequence matched since its last row was shared after the resets before that,
    /// whatever it holds itself.
    fn check_rematch(&self, row: &RowView) -> Check {
        let state = &self.ledger.seqs[row.seq];
        for position in row.rematched_from.unwrap_or(row.start)..row.start {
            let kv = &self.device.kv[self.device.place(row.slot, position)?];
            ensure!(
                kv.epoch >= state.last_row_epoch,
                "kv content",
                "{} matched position {position} of epoch {}, want at least {}",
                self.ledger.name(row.seq),
                kv.epoch,
                state.last_row_epoch
            );
        }
        Ok(())
    }

    fn check_tokens(&self, row: usize) -> Check {
        let RowView { slot, seq, ref tokens, start, .. } = self.rows[row];
        let state = &self.ledger.seqs[seq];
        for (position, token) in (start..).zip(tokens.clone()) {
            let word = self.view.token_ids()[token];
            let token = if word >= 0 {
                ensure!(
                    position < state.num_known,
                    "exact tokens",
                    "slot {slot}: token {word} at position {position}, which is not known yet"
                );
                word as u32
            } else {
                let from = (-1 - word) as u32;
                ensure!(from == slot, "rows", "slot {slot} takes the last sample of slot {from}");
                ensure!(
                    position + 1 == state.num_total,
                    "rows",
                    "slot {slot}: a last sample at position {position} of {}",
                    state.num_total
                );
                let sample = self.device.rows[slot as usize].last_sample;
                ensure!(sample.is_some(), "rows", "slot {slot} has sampled nothing yet");
                sample.unwrap_or_default()
            };
            ensure!(
                state.stream.tokens[position] == token,
                "exact tokens",
                "{} computes token {token} at position {position}, which is {}",
                self.ledger.name(seq),
                state.stream.tokens[position]
            );
        }
        Ok(())
    }

    /// Places are the mirror's, the mirror is the core's, and nobody else's content is overwritten.
    fn check_places(&self, row: usize) -> Check {
        let RowView { slot, seq, ref tokens, start, seq_len, .. } = self.rows[row];
        let live = &self.block_tables[slot as usize * self.device.max_blocks..];
        for (index, &told) in live[..seq_len.div_ceil(self.device.block_size)].iter().enumerate() {
            let block = self.device.block(slot, index)?;
            ensure!(
                told == block as i32,
                "stale row slot",
                "slot {slot}: block {index} is {told} in the core's table, the device knows {block}"
            );
        }
        let prefixes = &self.ledger.seqs[seq].stream.prefixes;
        for (position, token) in (start..).zip(tokens.clone()) {
            let place = self.view.slot_mapping()[token];
            let expected = self.device.place(slot, position)?;
            ensure!(
                place == expected as i32 || place == -1,
                "rows",
                "slot {slot}: position {position} goes to place {place}, its table says {expected}"
            );
            if place < 0 {
                continue;
            }
            let block = expected / self.device.block_size;
            for &(other, index) in self.device.holders(block) {
                let Some(sharer) = self.device.rows[other as usize].owner else { continue };
                if other == slot || self.ledger.seqs[sharer].has_ended() {
                    continue;
                }
                let same_index = index as usize == position / self.device.block_size;
                let theirs = self.ledger.seqs[sharer].stream.prefixes.get(position);
                ensure!(
                    same_index && theirs == Some(&prefixes[position]),
                    "one writer",
                    "{} writes position {position} into block {block}, which {} uses too",
                    self.ledger.name(seq),
                    self.ledger.name(sharer)
                );
            }
        }
        Ok(())
    }

    /// `num_shared_blocks` counts leading blocks that really are the previous row's, before both
    /// rows' queries.
    fn check_shared(&self, row: usize) -> Check {
        let shared = self.view.num_shared_blocks()[row] as usize;
        if shared == 0 {
            return Ok(());
        }
        ensure!(row > 0, "rows", "the first row shares {shared} blocks with nobody");
        let (above, this) = (&self.rows[row - 1], &self.rows[row]);
        let common = self
            .device
            .table(above.slot)
            .iter()
            .zip(self.device.table(this.slot))
            .take_while(|&(a, b)| a == b && *a >= 0)
            .count();
        let before = above.start.min(this.start) / self.device.block_size;
        ensure!(
            shared <= common.min(before),
            "rows",
            "slot {}: {shared} shared blocks; {common} are equal, {before} are before both queries",
            this.slot
        );
        Ok(())
    }

    /// Every row's writes. Rows that start earlier come first, because a row may build on what
    /// another row of the same step writes.
    pub(crate) fn write_rows(&mut self) -> Check {
        let step = self.step();
        let mut order: Vec<usize> = (0..self.rows.len()).collect();
        order.sort_by_key(|&row| self.rows[row].start);
        for row in order {
            let RowView { slot, seq, ref tokens, start, .. } = self.rows[row];
            let mut before = if start == 0 {
                (model::root(self.ledger.record_of(seq).request.namespace), self.epoch)
            } else {
                let kv = &self.device.kv[self.device.place(slot, start - 1)?];
                (kv.prefix, kv.epoch)
            };
            let state = &self.ledger.seqs[seq];
            for (position, token) in (start..).zip(tokens.clone()) {
                let word = self.view.token_ids()[token];
                let sample = self.device.rows[slot as usize].last_sample;
                let id = if word >= 0 { word as u32 } else { sample.unwrap_or_default() };
                let span = state.stream.span(position);
                let place = self.view.slot_mapping()[token];
                if place < 0 {
                    let kv = &self.device.kv[self.device.place(slot, position)?];
                    before = (kv.prefix, kv.epoch);
                    continue;
                }
                before = self.device.write(
                    place as usize,
                    before,
                    (id, span, position as u32),
                    (seq, step, self.epoch),
                )?;
            }
        }
        Ok(())
    }

    /// Every row's attention, after all writes.
    pub(crate) fn attend_rows(&mut self) -> Check {
        let step = self.step();
        for row in &self.rows {
            self.check_rematch(row)?;
            let state = &self.ledger.seqs[row.seq];
            self.device.attend(row.slot, &state.stream, row.seq_len, state.epoch, step)?;
            self.device.rows[row.slot as usize].touched = step;
        }
        Ok(())
    }

    /// Count what the rows compute, and move their sequences on. Returns those with their first row
    /// since they got a slot, and where it starts.
    pub(crate) fn advance_rows(&mut self) -> Vec<(usize, usize)> {
        let step = self.step();
        let mut admissions = Vec::new();
        for row in &self.rows {
            let state = &mut self.ledger.seqs[row.seq];
            let take = row.tokens.len();
            state.last_row = step;
            state.last_row_epoch = self.epoch;
            let first = state.computed.is_none();
            if first && state.num_cached.is_none() {
                state.num_cached = Some(0);
                if self.config.enable_prefix_caching {
                    self.counters.prefix_cache_queries += state.num_known as u64;
                }
            }
            let from = state.computed.unwrap_or(0).max(state.high_water);
            let hits = row.start.saturating_sub(from);
            self.counters.prefix_cache_hits += hits as u64;
            state.num_cached = state.num_cached.map(|cached| cached + hits);
            state.high_water = state.high_water.max(row.start);
            let again = state.high_water.min(row.seq_len) - row.start;
            self.counters.num_recomputed_tokens += again as u64;
            let prompt = state.stream.num_prompt.min(row.seq_len);
            let fresh = prompt.saturating_sub(row.start.max(state.high_water));
            self.counters.num_prompt_tokens += fresh as u64;
            self.counters.num_scheduled_tokens += take as u64;
            state.high_water = state.high_water.max(row.seq_len);
            state.computed = Some(row.seq_len);
            let (seq, at, take) = (state.id, row.start as u32, take as u32);
            if first {
                admissions.push((row.seq, row.start));
            }
            let event = if first {
                Event::Admit { seq, slot: row.slot, matched: at, take }
            } else {
                Event::Extend { seq, at, take }
            };
            self.trace.push(step, event);
        }
        admissions
    }
}
