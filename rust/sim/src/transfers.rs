//! Another tier, as an embedder has one: what was copied out, what is being copied, what can come back.
//!
//! A copy goes on until it is completed, however many steps that takes: what is copied out must not
//! change until then, and what is copied in must not be used before.

use std::collections::BTreeMap;

use fastserve_base::{Namespace, Ticket, Token};
use fastserve_engine::Transfer;
use fastserve_sched::plan::TIER_COPY_WORDS;

use crate::device::{Device, Kv};
use crate::model::{self, Prefix};
use crate::violation::{Check, Violation, ensure};

/// Which way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// To the other tier.
    Out,
    /// From it.
    In,
}

/// A copy that was not completed, or whose last step is in flight.
#[derive(Debug, Clone)]
pub struct OpenTransfer {
    /// Its ticket.
    pub ticket: Ticket,
    /// Which way.
    pub direction: Direction,
    /// Prefix at each position of the tokens that it is about.
    prefixes: Vec<Prefix>,
    first_block: usize,
    places: Vec<u32>,
    /// The blocks that plans have listed so far.
    blocks: Vec<usize>,
    last_step: u64,
    epoch: u32,
    outcome: Option<bool>,
}

impl OpenTransfer {
    /// Whether plans have listed all of it.
    pub fn is_listed(&self) -> bool {
        self.blocks.len() == self.places.len()
    }
}

/// Endings of copies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TransferCounts {
    /// Blocks copied out.
    pub num_offloaded_blocks: u64,
    /// Blocks copied in.
    pub num_fetched_blocks: u64,
    /// Copies that failed.
    pub num_failed_transfers: u64,
}

/// The other tier.
#[derive(Debug, Clone, Default)]
pub struct Tier {
    /// Copies under way.
    pub open: Vec<OpenTransfer>,
    /// What ended.
    pub counts: TransferCounts,
    contents: BTreeMap<u32, Vec<Kv>>,
    by_prefix: BTreeMap<Prefix, u32>,
    next_place: u32,
}

/// Prefixes of `tokens` in `namespace`, without spans.
pub fn prefixes(namespace: Namespace, tokens: &[Token]) -> Vec<Prefix> {
    let mut prefix = model::root(namespace);
    let extend = |&token: &Token| {
        prefix = model::extend(prefix, token, 0);
        prefix
    };
    tokens.iter().map(extend).collect()
}

impl Tier {
    /// Places for `blocks` blocks that will be copied out.
    pub fn fresh_places(&mut self, blocks: usize) -> Vec<u32> {
        let first = self.next_place;
        self.next_place += blocks as u32;
        (first..self.next_place).collect()
    }

    /// The places of the whole blocks of `tokens`, if the tier has them all.
    pub fn places_of(
        &self,
        namespace: Namespace,
        tokens: &[Token],
        block_size: usize,
    ) -> Option<Vec<u32>> {
        let prefixes = prefixes(namespace, tokens);
        let ends = prefixes.chunks_exact(block_size).map(|block| block[block_size - 1]);
        ends.map(|end| self.by_prefix.get(&end).copied()).collect()
    }

    /// The core accepted a copy. `places` are those of its blocks, from its first on.
    pub fn begin(
        &mut self,
        transfer: Transfer,
        direction: Direction,
        prefixes: Vec<Prefix>,
        places: &[u32],
        epoch: u32,
    ) {
        self.open.push(OpenTransfer {
            ticket: transfer.ticket,
            direction,
            prefixes,
            first_block: transfer.first_block as usize,
            places: places[..transfer.num_blocks as usize].to_vec(),
            blocks: Vec::new(),
            last_step: 0,
            epoch,
            outcome: None,
        });
    }

    /// A plan lists copies. Before anything of the step runs, blocks that go out hold what the tokens
    /// say, and blocks that come in are nobody's.
    ///
    /// # Errors
    ///
    /// The first that does not, or an entry that belongs to no copy.
    pub fn list(
        &mut self,
        words: &[i32],
        direction: Direction,
        device: &mut Device,
        step: u64,
    ) -> Check {
        for entry in words.chunks_exact(TIER_COPY_WORDS) {
            let (block, place) = (entry[0] as usize, entry[1] as u32);
            let ticket = u64::from(entry[2] as u32) | u64::from(entry[3] as u32) << 32;
            let found = self.open.iter_mut().find(|open| open.ticket.0 == ticket);
            let next = found.filter(|open| {
                open.direction == direction && open.places.get(open.blocks.len()) == Some(&place)
            });
            let Some(open) = next else {
                return Err(Violation {
                    checker: "copies",
                    what: format!("{entry:?} of step {step} is not the next block of any copy"),
                });
            };
            let index = open.first_block + open.blocks.len();
            open.blocks.push(block);
            open.last_step = step;
            match direction {
                Direction::Out => {
                    let expected = &open.prefixes[index * device.block_size..][..device.block_size];
                    device.copy_out(block, index, expected, open.epoch, step)?;
                }
                Direction::In => device.copy_in(block, step)?,
            }
        }
        Ok(())
    }

    /// Blocks that copies under way read or write.
    pub fn busy_blocks(&self) -> impl Iterator<Item = usize> {
        self.open.iter().flat_map(|open| open.blocks.iter().copied())
    }

    /// The caller says that a copy is done. Data arrives now.
    ///
    /// # Errors
    ///
    /// What was copied out has changed on the way.
    pub fn complete(&mut self, at: usize, ok: bool, device: &mut Device, epoch: u32) -> Check {
        let open = &mut self.open[at];
        open.outcome = Some(ok);
        if !ok {
            return Ok(());
        }
        let is_current = open.epoch == epoch;
        for (number, (&block, &place)) in open.blocks.iter().zip(&open.places).enumerate() {
            let index = open.first_block + number;
            let expected = &open.prefixes[index * device.block_size..][..device.block_size];
            match open.direction {
                Direction::Out => {
                    let content = device.block_content(block);
                    ensure!(
                        content.iter().map(|kv| kv.prefix).eq(expected.iter().copied()),
                        "copies",
                        "block {block} has changed while it was copied out"
                    );
                    if is_current {
                        self.by_prefix.insert(expected[expected.len() - 1], place);
                        self.contents.insert(place, content.to_vec());
                    }
                }
                Direction::In => {
                    if let Some(content) = self.contents.get(&place).filter(|_| is_current) {
                        device.arrive(block, content);
                    }
                }
            }
        }
        Ok(())
    }

    /// End what is completed and named by no step in flight. `done`: the last step that has left.
    pub fn settle(&mut self, done: u64) {
        let Self { open, counts, .. } = self;
        open.retain(|open| match open.outcome {
            Some(ok) if open.last_step <= done => {
                let moved = open.places.len() as u64;
                match (ok, open.direction) {
                    (true, Direction::Out) => counts.num_offloaded_blocks += moved,
                    (true, Direction::In) => counts.num_fetched_blocks += moved,
                    (false, _) => counts.num_failed_transfers += 1,
                }
                false
            }
            _ => true,
        });
    }

    /// Whether a plan has to list something.
    pub fn has_unlisted(&self) -> bool {
        self.open.iter().any(|open| open.outcome.is_none() && !open.is_listed())
    }

    /// Every step from `from` on was dropped: what they listed is listed again, unless it was
    /// completed: then it has failed.
    pub fn failed(&mut self, from: u64) {
        for open in self.open.iter_mut().filter(|open| open.last_step >= from) {
            if open.outcome.is_some() {
                open.outcome = Some(false);
            } else {
                open.blocks.clear();
            }
            open.last_step = 0;
        }
    }

    /// The core says that it gave a copy up of its own accord: its source was to be written by a step
    /// that failed, or the core was closed before the copy was listed.
    pub fn given_up(&mut self, is_open: impl Fn(Ticket) -> bool) {
        for open in &mut self.open {
            if open.outcome.is_none() && !is_open(open.ticket) {
                open.outcome = Some(false);
            }
        }
    }

    /// Everything stored is of an old epoch.
    pub fn reset(&mut self) {
        self.by_prefix.clear();
        self.contents.clear();
    }

    /// Whether the block of `stream` that ends before `limit` tokens is on its way in.
    pub fn is_coming(&self, prefixes: &[Prefix], limit: usize, block_size: usize) -> bool {
        self.open.iter().filter(|open| open.direction == Direction::In).any(|open| {
            let end = (open.first_block + 1) * block_size;
            end <= limit && prefixes.get(end - 1) == Some(&open.prefixes[end - 1])
        })
    }
}
