//! The shadow of a device: every KV slot, the mirror of the block tables, the sampler's state.
//!
//! It is kept from plans alone, as a device on the far side of a bus would be: slot events, table
//! edits, copies, rows. A KV slot remembers what a real one would depend on, the [`Prefix`] of its
//! position, and where it came from: position, epoch, step and writer. So a row that attends to a
//! wrong block is noticed at once, whatever made the core choose that block.

use fastserve_sched::SlotEvent;

use crate::model::{self, Prefix, Stream};
use crate::violation::{Check, ensure};

/// No block: the mirror has not been told.
const UNKNOWN: i32 = -1;
/// Position of a slot that holds nothing.
const EMPTY: u32 = u32::MAX;
/// Position of a slot whose writing step failed.
const FAILED: u32 = u32::MAX - 1;
/// Writer of a slot that a block copy filled.
const COPIED: u32 = u32::MAX;

/// One KV slot.
#[derive(Debug, Clone, Copy)]
pub struct Kv {
    /// Everything its content depends on.
    pub prefix: Prefix,
    /// Position in the sequence, or [`EMPTY`], or [`FAILED`].
    pub position: u32,
    /// The oldest epoch among the slots its content depends on.
    pub epoch: u32,
    /// The sequence that wrote it.
    pub writer: u32,
    /// The step that wrote it.
    pub step: u64,
    /// The last step that reads or writes it.
    pub touched: u64,
}

/// A row slot, as the device knows it.
#[derive(Debug, Clone, Default)]
pub struct RowState {
    /// The sequence in it.
    pub owner: Option<usize>,
    /// What its sampler knows, from the slot event.
    pub sampler: u64,
    /// The token it sampled last.
    pub last_sample: Option<u32>,
    /// The last step that names it.
    pub touched: u64,
}

/// What a plan changed in tables and row slots.
#[derive(Debug, Clone, Default)]
pub struct DeviceChanges {
    /// Slot, index, and the block that stood there.
    edits: Vec<(u32, u32, i32)>,
    assigned: Vec<u32>,
}

/// The device.
#[derive(Debug, Clone)]
pub struct Device {
    /// Tokens per block.
    pub block_size: usize,
    /// Entries of a block table.
    pub max_blocks: usize,
    /// Every KV slot.
    pub kv: Vec<Kv>,
    /// Row slots.
    pub rows: Vec<RowState>,
    /// The mirror of the block tables.
    tables: Vec<i32>,
    /// For each block, the tables it stands in: slot, index.
    holders: Vec<Vec<(u32, u32)>>,
    /// The last step that names each block.
    pub block_touched: Vec<u64>,
    /// What the plan at hand has changed.
    changes: DeviceChanges,
    /// Blocks that a copy to or from another tier is at work on.
    pub busy: Vec<bool>,
    /// The last step that has left: committed or failed.
    pub done: u64,
    /// Vocabulary.
    pub vocab_size: u32,
}

impl Device {
    /// Nothing anywhere.
    pub fn new(config: &fastserve_base::CoreConfig) -> Self {
        let max_blocks = config.max_blocks_per_seq() as usize;
        let num_blocks = config.num_blocks as usize;
        let empty = Kv { prefix: 0, position: EMPTY, epoch: 0, writer: 0, step: 0, touched: 0 };
        Self {
            block_size: config.block_size as usize,
            max_blocks,
            kv: vec![empty; num_blocks * config.block_size as usize],
            rows: vec![RowState::default(); config.max_num_seqs as usize],
            tables: vec![UNKNOWN; config.max_num_seqs as usize * max_blocks],
            holders: vec![Vec::new(); num_blocks],
            block_touched: vec![0; num_blocks],
            changes: DeviceChanges::default(),
            busy: vec![false; num_blocks],
            done: 0,
            vocab_size: config.vocab_size,
        }
    }

    /// The mirrored table of a row slot.
    pub fn table(&self, slot: u32) -> &[i32] {
        &self.tables[slot as usize * self.max_blocks..][..self.max_blocks]
    }

    /// A block's place in a row's table, if the mirror knows one.
    pub fn block(&self, slot: u32, index: usize) -> Check<usize> {
        let block = self.table(slot).get(index).copied().unwrap_or(UNKNOWN);
        ensure!(
            block >= 0,
            "stale row slot",
            "slot {slot}: the device was never told block {index}"
        );
        Ok(block as usize)
    }

    /// Where a position of a row lies.
    pub fn place(&self, slot: u32, position: usize) -> Check<usize> {
        let block = self.block(slot, position / self.block_size)?;
        Ok(block * self.block_size + position % self.block_size)
    }

    /// A slot has a new sequence.
    pub fn assign(&mut self, event: &SlotEvent<'_>, owner: usize) -> Check {
        let slot = event.slot as u32;
        let (done, max_blocks) = (self.done, self.max_blocks);
        let row = &mut self.rows[slot as usize];
        ensure!(row.owner.is_none(), "stale row slot", "slot {slot} is assigned while it is taken");
        ensure!(
            row.touched <= done,
            "in flight",
            "slot {slot} is assigned again while step {} in flight names it",
            row.touched
        );
        row.owner = Some(owner);
        row.sampler = model::sampler(event.index, event.sampling);
        row.last_sample = None;
        self.changes.assigned.push(slot);
        self.tables[slot as usize * max_blocks..][..max_blocks].fill(UNKNOWN);
        Ok(())
    }

    /// A slot has no sequence any more. Returns whose it was.
    pub fn release(&mut self, slot: u32) -> Check<usize> {
        let owner = self.rows[slot as usize].owner.take();
        for index in 0..self.max_blocks {
            let block = self.table(slot)[index];
            if block >= 0 {
                self.holders[block as usize].retain(|&(holder, _)| holder != slot);
            }
        }
        owner.ok_or_else(|| crate::violation::Violation {
            checker: "stale row slot",
            what: format!("slot {slot} is released, but nobody has it"),
        })
    }

    /// A table entry changes. Returns the block that stood there.
    pub fn edit(&mut self, slot: u32, index: usize, block: u32) -> Check<Option<u32>> {
        ensure!(
            self.rows.get(slot as usize).is_some_and(|row| row.owner.is_some()),
            "stale row slot",
            "table edit of slot {slot}, which nobody has"
        );
        ensure!(
            index < self.max_blocks && (block as usize) < self.holders.len(),
            "plan",
            "table edit of slot {slot}: index {index}, block {block}"
        );
        let entry = &mut self.tables[slot as usize * self.max_blocks + index];
        let before = std::mem::replace(entry, block as i32);
        if before >= 0 {
            self.holders[before as usize].retain(|&holder| holder != (slot, index as u32));
        }
        self.holders[block as usize].push((slot, index as u32));
        self.changes.edits.push((slot, index as u32, before));
        Ok(u32::try_from(before).ok())
    }

    /// The tables that a block stands in: slot, index.
    pub fn holders(&self, block: usize) -> &[(u32, u32)] {
        &self.holders[block]
    }

    /// Copy a block onto another, for the sake of its first `num_used` slots.
    pub fn copy(&mut self, source: usize, destination: usize, num_used: usize, step: u64) -> Check {
        for offset in 0..self.block_size {
            let (from, to) =
                (source * self.block_size + offset, destination * self.block_size + offset);
            self.untouched(to, step, "a copy")?;
            if offset < num_used {
                self.kv[from].touched = step;
            }
            let touched = if offset < num_used { step } else { self.done };
            self.kv[to] = Kv { step, touched, writer: COPIED, ..self.kv[from] };
        }
        self.block_touched[source] = step;
        self.block_touched[destination] = step;
        Ok(())
    }

    /// A block begins to be copied out: it holds block `index` of what `expected` is a part of.
    pub fn copy_out(
        &mut self,
        block: usize,
        index: usize,
        expected: &[Prefix],
        epoch: u32,
        step: u64,
    ) -> Check {
        let first = block * self.block_size;
        for (offset, &prefix) in expected.iter().enumerate() {
            let kv = &mut self.kv[first + offset];
            let position = (index * self.block_size + offset) as u32;
            kv.touched = step;
            ensure!(
                kv.prefix == prefix && kv.position == position && kv.epoch >= epoch,
                "copies",
                "block {block} is copied out and its slot {offset} does not hold position {position}"
            );
        }
        self.block_touched[block] = step;
        Ok(())
    }

    /// A block begins to be copied in: until that is completed it holds nothing.
    pub fn copy_in(&mut self, block: usize, step: u64) -> Check {
        ensure!(
            self.holders[block].is_empty(),
            "copies",
            "block {block} is copied in and stands in the table of {:?}",
            self.holders[block]
        );
        for place in block * self.block_size..(block + 1) * self.block_size {
            self.untouched(place, step, "a copy from another tier")?;
            let kv = &mut self.kv[place];
            (kv.position, kv.step, kv.touched, kv.writer) = (FAILED, step, step, COPIED);
        }
        self.block_touched[block] = step;
        Ok(())
    }

    /// What a block holds.
    pub fn block_content(&self, block: usize) -> &[Kv] {
        &self.kv[block * self.block_size..][..self.block_size]
    }

    /// The data of a block that is copied in.
    pub fn arrive(&mut self, block: usize, content: &[Kv]) {
        let slots = &mut self.kv[block * self.block_size..][..self.block_size];
        for (slot, from) in slots.iter_mut().zip(content) {
            *slot = Kv { step: slot.step, touched: slot.touched, ..*from };
        }
    }

    fn untouched(&self, place: usize, step: u64, who: &str) -> Check {
        let kv = &self.kv[place];
        ensure!(
            kv.touched <= self.done || kv.touched == step,
            "in flight",
            "{who} of step {step} writes block {} offset {}, which step {} in flight uses",
            place / self.block_size,
            place % self.block_size,
            kv.touched
        );
        Ok(())
    }

    /// Write one slot. `before` is the content of the position before it.
    pub fn write(
        &mut self,
        place: usize,
        before: (Prefix, u32),
        (token, span, position): (u32, u64, u32),
        (writer, step, epoch): (usize, u64, u32),
    ) -> Check<(Prefix, u32)> {
        self.untouched(place, step, "a row")?;
        ensure!(
            !self.busy[place / self.block_size],
            "copies",
            "step {step} writes block {}, which is being copied",
            place / self.block_size
        );
        let kv = &self.kv[place];
        ensure!(
            kv.step != step || kv.writer == COPIED,
            "one writer",
            "step {step} writes block {} offset {} twice",
            place / self.block_size,
            place % self.block_size
        );
        let content = (model::extend(before.0, token, span), before.1.min(epoch));
        self.kv[place] = Kv {
            prefix: content.0,
            position,
            epoch: content.1,
            writer: writer as u32,
            step,
            touched: step,
        };
        Ok(content)
    }

    /// Attend to positions `0..seq_len` of the sequence in `slot`: each holds what the sequence's
    /// own tokens say, and nothing older than `epoch`.
    pub fn attend(
        &mut self,
        slot: u32,
        stream: &Stream,
        seq_len: usize,
        epoch: u32,
        step: u64,
    ) -> Check {
        for (index, expected) in stream.prefixes[..seq_len].chunks(self.block_size).enumerate() {
            let block = self.block(slot, index)?;
            self.block_touched[block] = step;
            let first = block * self.block_size;
            for (offset, &prefix) in expected.iter().enumerate() {
                let kv = &mut self.kv[first + offset];
                let position = (index * self.block_size + offset) as u32;
                kv.touched = step;
                if kv.prefix == prefix && kv.position == position && kv.epoch >= epoch {
                    continue;
                }
                let kv = *kv;
                return Err(self.wrong_content(slot, block, (position, prefix, epoch), kv));
            }
        }
        Ok(())
    }

    fn wrong_content(
        &self,
        slot: u32,
        block: usize,
        (position, prefix, epoch): (u32, Prefix, u32),
        kv: Kv,
    ) -> crate::violation::Violation {
        let what = if kv.position == EMPTY {
            "was never written".to_owned()
        } else if kv.position == FAILED {
            format!("was written by step {}, which failed", kv.step)
        } else if kv.position != position {
            format!("holds position {} of sequence {} (step {})", kv.position, kv.writer, kv.step)
        } else if kv.prefix != prefix {
            format!("holds another prefix, of sequence {} (step {})", kv.writer, kv.step)
        } else {
            format!("is of epoch {}, want at least {epoch} (step {})", kv.epoch, kv.step)
        };
        crate::violation::Violation {
            checker: "kv content",
            what: format!(
                "slot {slot} (sequence {:?}) attends to position {position} in block {block}, which {what}",
                self.rows[slot as usize].owner
            ),
        }
    }

    /// The changes since the last call.
    pub fn take_changes(&mut self) -> DeviceChanges {
        std::mem::take(&mut self.changes)
    }

    /// A plan never reached the device, because a step before it failed: what it changed has not
    /// changed. Plans get lost newest first.
    pub fn lose(&mut self, changes: &DeviceChanges) {
        for &(slot, index, before) in changes.edits.iter().rev() {
            let entry = &mut self.tables[slot as usize * self.max_blocks + index as usize];
            let block = std::mem::replace(entry, before);
            if block >= 0 {
                self.holders[block as usize].retain(|&holder| holder != (slot, index));
            }
            if before >= 0 {
                self.holders[before as usize].push((slot, index));
            }
        }
        for &slot in &changes.assigned {
            self.rows[slot as usize].sampler = 0;
            for index in 0..self.max_blocks {
                let entry = slot as usize * self.max_blocks + index;
                let block = std::mem::replace(&mut self.tables[entry], UNKNOWN);
                if block >= 0 {
                    self.holders[block as usize].retain(|&(holder, _)| holder != slot);
                }
            }
        }
    }

    /// A step failed: what it wrote is garbage.
    pub fn poison(&mut self, step: u64) {
        for kv in self.kv.iter_mut().filter(|kv| kv.step == step) {
            kv.position = FAILED;
        }
    }
}
