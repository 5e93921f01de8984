//! Copies between the pool and another tier, with tickets.
//!
//! The core knows no other tier. Whoever has one (host memory, a disk, another engine) names places
//! in it by number, asks for a prefix to be copied out or in, and says when the copy is done:
//!
//! ```text
//!   offload ─▶ held, listed in a plan ──▶ complete ──▶ cached again
//!   fetch ──▶ fresh blocks, listed ────▶ complete(ok) ──▶ in the prefix tree, cached
//!                                        complete(failed) ─▶ free: whoever needs them computes
//! ```
//!
//! A copy may outlive the step that lists it: its blocks stay held until `complete`. A sequence whose
//! next block is being fetched waits for the ticket, as it would for another sequence that computes
//! it. Swap, host and disk tiers and KV hand-over are built on these two calls and nothing else.
//!
//! A transfer has a block table of its own, behind those of the row slots.

use fastserve_base::{Namespace, RowSlot, StepId, Ticket, Token};
use fastserve_kv::SeqKey;

use crate::core::Core;
use crate::outputs::Lifecycle;
use crate::schedule::Pass;

/// Why nothing can be copied. Nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// Every ticket is in use.
    #[error("{limit} copies are under way (max_num_tickets); complete one first")]
    TooMany {
        /// The limit.
        limit: usize,
    },

    /// The prefix has no whole block that could be copied.
    #[error("no block to copy: {reason}")]
    Nothing {
        /// Why.
        reason: &'static str,
    },

    /// The places in the other tier do not fit the tokens.
    #[error("{places} places for {blocks} whole blocks of tokens; give one a block")]
    Places {
        /// Places given.
        places: usize,
        /// Whole blocks of tokens.
        blocks: usize,
    },

    /// The tokens are more than a sequence may have.
    #[error("{tokens} tokens, a sequence has at most max_model_len={max}")]
    TooLong {
        /// Tokens given.
        tokens: usize,
        /// The limit.
        max: usize,
    },

    /// The pool cannot hold what would be fetched.
    #[error(
        "{needed} blocks wanted, {available} are free or cached beside the watermark; compute instead"
    )]
    NoRoom {
        /// Blocks wanted.
        needed: usize,
        /// Blocks to be had.
        available: usize,
    },

    /// The core is closed.
    #[error("the core is closed; make a new one")]
    Closed,
}

/// A copy that was accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    /// To be completed.
    pub ticket: Ticket,
    /// First block of the prefix that is copied.
    pub first_block: u32,
    /// Blocks that are copied.
    pub num_blocks: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Out,
    In,
}

/// A copy that was not completed yet.
#[derive(Debug)]
pub(crate) struct OpenTransfer {
    ticket: Ticket,
    direction: Direction,
    /// The block table, behind those of the row slots.
    slot: RowSlot,
    namespace: Namespace,
    tokens: Vec<Token>,
    first_block: usize,
    /// Places in the other tier, one for each block from `first_block` on.
    places: Vec<u32>,
    /// How many of them were listed in plans.
    num_listed: usize,
    /// The last step that lists one.
    last_step: StepId,
    /// The step that writes the last block of its path, if that had not committed when it began.
    pending: Option<StepId>,
    /// What the caller said, while a step in flight still names the blocks.
    outcome: Option<bool>,
    /// Hash of the first block that is fetched, for those that wait.
    claim: u64,
}

impl Core {
    /// Copy blocks of a cached prefix to another tier.
    ///
    /// Of the longest cached prefix of `tokens` in `namespace`, the blocks from `first_block` on are
    /// copied to `places`, as many as there are of both, and held until the ticket is completed.
    ///
    /// # Errors
    ///
    /// [`TransferError`] if there is no such block, or no ticket.
    pub fn offload(
        &mut self,
        namespace: Namespace,
        tokens: &[Token],
        first_block: usize,
        places: &[u32],
    ) -> Result<Transfer, TransferError> {
        let slot = self.check_transfer(tokens)?;
        let key = SeqKey { namespace, spans: &[] };
        let limit = (first_block + places.len()) * self.config.block_size as usize;
        let probe = self.kv.probe(key, tokens, tokens.len().min(limit));
        if probe.num_blocks as usize <= first_block {
            return Err(TransferError::Nothing { reason: "the prefix is not cached that far" });
        }
        self.kv.open(slot, namespace);
        self.kv.adopt(slot);
        let num_blocks = probe.num_blocks as usize - first_block;
        Ok(self.begin(OpenTransfer {
            ticket: self.next_ticket,
            direction: Direction::Out,
            slot,
            namespace,
            tokens: Vec::new(),
            first_block,
            places: places[..num_blocks].to_vec(),
            num_listed: 0,
            last_step: StepId(0),
            pending: None,
            outcome: None,
            claim: 0,
        }))
    }

    /// Bring the whole blocks of `tokens` from another tier, those that are not cached here.
    ///
    /// `places` has one place for each whole block of `tokens`. Once the ticket is completed, the
    /// blocks are cached and can be matched; until then sequences that need the first of them wait.
    ///
    /// # Errors
    ///
    /// [`TransferError`] if everything is cached already, the pool has no room, or there is no ticket.
    pub fn fetch(
        &mut self,
        namespace: Namespace,
        tokens: &[Token],
        places: &[u32],
    ) -> Result<Transfer, TransferError> {
        let slot = self.check_transfer(tokens)?;
        let blocks = tokens.len() / self.config.block_size as usize;
        if places.len() != blocks {
            return Err(TransferError::Places { places: places.len(), blocks });
        }
        let key = SeqKey { namespace, spans: &[] };
        let probe = self.kv.probe(key, tokens, tokens.len());
        let first_block = probe.num_blocks as usize;
        let needed = blocks - first_block;
        if needed == 0 || !self.config.enable_prefix_caching {
            let reason = if needed == 0 { "all are cached" } else { "prefix caching is off" };
            return Err(TransferError::Nothing { reason });
        }
        let reserved = probe.num_cached as usize + self.config.watermark_blocks as usize;
        let available = self.kv.available().saturating_sub(reserved);
        if needed > available {
            return Err(TransferError::NoRoom { needed, available });
        }
        self.kv.open(slot, namespace);
        self.kv.adopt(slot);
        self.kv.allocate(slot, needed).expect("there is room");
        let claim = self.kv.next_block_hash(slot, key, tokens).unwrap_or(0);
        if claim != 0 {
            self.claims.entry(claim).or_insert(slot);
        }
        Ok(self.begin(OpenTransfer {
            ticket: self.next_ticket,
            direction: Direction::In,
            slot,
            namespace,
            tokens: tokens.to_vec(),
            first_block,
            places: places[first_block..].to_vec(),
            num_listed: 0,
            last_step: StepId(0),
            pending: None,
            outcome: None,
            claim,
        }))
    }

    /// A copy is done. `ok`: its data is whole; otherwise a fetch counts for nothing.
    ///
    /// False, and nothing changes: no copy has this ticket, or it was not listed whole in plans yet.
    /// While a step in flight names the blocks, they stay held until that has committed.
    pub fn complete(&mut self, ticket: Ticket, ok: bool) -> bool {
        let Some(transfer) = self.transfers.iter_mut().find(|transfer| transfer.ticket == ticket)
        else {
            return false;
        };
        let listed = transfer.num_listed == transfer.places.len();
        // A closed core lists no more: what was listed of a copy is all of it.
        let closed = self.lifecycle == Lifecycle::Closed;
        if !(listed || closed) || transfer.outcome.is_some() {
            return false;
        }
        transfer.outcome = Some(ok && listed);
        self.settle_transfers(self.oldest_in_flight());
        self.publish();
        true
    }

    /// Whether a copy has this ticket and was not completed.
    pub fn is_open(&self, ticket: Ticket) -> bool {
        self.transfers
            .iter()
            .any(|transfer| transfer.ticket == ticket && transfer.outcome.is_none())
    }

    fn check_transfer(&mut self, tokens: &[Token]) -> Result<RowSlot, TransferError> {
        if self.lifecycle == Lifecycle::Closed {
            return Err(TransferError::Closed);
        }
        let max = self.config.max_model_len as usize;
        if tokens.len() > max {
            return Err(TransferError::TooLong { tokens: tokens.len(), max });
        }
        let limit = self.config.max_num_tickets as usize;
        self.transfer_slots.last().copied().ok_or(TransferError::TooMany { limit })
    }

    fn begin(&mut self, mut transfer: OpenTransfer) -> Transfer {
        transfer.pending = self.kv.pending_step(transfer.slot);
        self.transfer_slots.pop();
        self.next_ticket.0 += 1;
        let begun = Transfer {
            ticket: transfer.ticket,
            first_block: transfer.first_block as u32,
            num_blocks: transfer.places.len() as u32,
        };
        self.transfers.push(transfer);
        self.publish();
        begun
    }

    /// List in the plan what was not listed yet, as much as fits.
    pub(crate) fn list_transfers(&mut self, pass: &mut Pass<'_>) {
        for transfer in &mut self.transfers {
            let table = self.kv.table(transfer.slot);
            while transfer.num_listed < transfer.places.len() {
                let block = table[transfer.first_block + transfer.num_listed];
                let place = transfer.places[transfer.num_listed];
                let listed = match transfer.direction {
                    Direction::Out => pass.writer.copy_out(block, place, transfer.ticket),
                    Direction::In => pass.writer.copy_in(block, place, transfer.ticket),
                };
                if !listed {
                    break;
                }
                transfer.num_listed += 1;
                transfer.last_step = pass.step;
            }
        }
    }

    /// Whether a plan must be made for a copy's sake.
    pub(crate) fn has_unlisted_transfers(&self) -> bool {
        self.transfers.iter().any(|transfer| transfer.num_listed < transfer.places.len())
    }

    /// End the completed copies that no step in flight names.
    pub(crate) fn settle_transfers(&mut self, oldest: Option<StepId>) {
        let mut at = 0;
        while at < self.transfers.len() {
            let transfer = &self.transfers[at];
            let named = oldest.is_some_and(|oldest| transfer.last_step >= oldest);
            match transfer.outcome {
                Some(ok) if !named => {
                    let transfer = self.transfers.remove(at);
                    self.end_transfer(&transfer, ok);
                }
                _ => at += 1,
            }
        }
    }

    fn end_transfer(&mut self, transfer: &OpenTransfer, ok: bool) {
        let slot = transfer.slot;
        if self.claims.get(&transfer.claim) == Some(&slot) {
            self.claims.remove(&transfer.claim);
        }
        let moved = transfer.places.len() as u64;
        match transfer.direction {
            Direction::Out if ok => self.stats.num_offloaded_blocks += moved,
            Direction::In if ok => {
                let key = SeqKey { namespace: transfer.namespace, spans: &[] };
                let blocks = transfer.first_block + transfer.places.len();
                self.kv.share(slot, key, &transfer.tokens, blocks, transfer.last_step);
                self.stats.num_fetched_blocks += moved;
            }
            _ => self.stats.num_failed_transfers += 1,
        }
        self.kv.close(slot);
        self.transfer_slots.push(slot);
    }

    /// Every step in flight was dropped, `from` the first: what they listed is listed again, and a
    /// copy that began from a block which one of them was to write ends as failed.
    pub(crate) fn fail_transfers(&mut self, from: StepId) {
        for transfer in &mut self.transfers {
            let unsure = transfer.pending.is_some_and(|step| step >= from);
            if unsure {
                transfer.outcome = Some(false);
            } else if transfer.last_step >= from && transfer.outcome.is_none() {
                (transfer.num_listed, transfer.last_step) = (0, StepId(0));
            } else if transfer.last_step >= from {
                // Completed for a step that never ran: nothing was copied.
                transfer.outcome = Some(false);
            }
        }
    }

    /// End the copies of which no plan listed a block. The device may be at work on the others: they
    /// end when they are completed, those listed in part as failed.
    pub(crate) fn close_transfers(&mut self) {
        for transfer in &mut self.transfers {
            if transfer.num_listed == 0 {
                transfer.outcome = Some(false);
            }
        }
        self.settle_transfers(self.oldest_in_flight());
    }

    /// Panic if a transfer's table does not match it.
    pub(crate) fn check_transfers(&self) {
        let limit = self.config.max_num_tickets as usize;
        assert_eq!(self.transfers.len() + self.transfer_slots.len(), limit, "transfer slots");
        for transfer in &self.transfers {
            let blocks = transfer.first_block + transfer.places.len();
            let held = self.kv.num_blocks_of(transfer.slot);
            assert_eq!(held, blocks, "table of {:?}", transfer.ticket);
        }
        for &slot in &self.transfer_slots {
            assert!(!self.kv.is_open(slot), "{slot:?} is free and open");
        }
    }
}
