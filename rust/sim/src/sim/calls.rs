//! What an operator does: copies to and from another tier, resets, lifecycle.

use fastserve_base::{Namespace, Token};
use fastserve_engine::{Lifecycle, Stats, Transfer, TransferError};

use super::Sim;
use crate::check::results::check_effect;
use crate::trace::Event;
use crate::transfers::{self, Direction};
use crate::violation::{Check, ensure};

impl Sim {
    /// Ask for the blocks of a prefix, from `first_block` on, to be copied to another tier.
    ///
    /// # Errors
    ///
    /// A violation. A refusal is none.
    pub fn offload(
        &mut self,
        (namespace, tokens): (Namespace, &[Token]),
        first_block: usize,
        blocks: usize,
    ) -> Check {
        let places = self.tier.fresh_places(blocks);
        let before = self.core.stats();
        let answer = self.core.offload(namespace, tokens, first_block, &places);
        self.begun(&answer, Direction::Out, (namespace, tokens), &places, before)
    }

    /// Ask for the blocks of a prefix to be copied from the other tier, which has them at `places`.
    ///
    /// # Errors
    ///
    /// A violation. A refusal is none.
    pub fn fetch(&mut self, (namespace, tokens): (Namespace, &[Token]), places: &[u32]) -> Check {
        let before = self.core.stats();
        let answer = self.core.fetch(namespace, tokens, places);
        let first = answer.as_ref().map_or(0, |transfer| transfer.first_block as usize);
        let wanted = places.get(first..).unwrap_or_default();
        self.begun(&answer, Direction::In, (namespace, tokens), wanted, before)
    }

    fn begun(
        &mut self,
        answer: &Result<Transfer, TransferError>,
        direction: Direction,
        (namespace, tokens): (Namespace, &[Token]),
        places: &[u32],
        before: Stats,
    ) -> Check {
        let &Ok(transfer) = answer else {
            let after = self.core.stats();
            ensure!(before == after, "errors", "a refused copy changed {before:?} to {after:?}");
            return self.settle();
        };
        let (ticket, blocks) = (transfer.ticket.0, transfer.num_blocks);
        ensure!(
            blocks > 0 && self.core.is_open(transfer.ticket),
            "copies",
            "{transfer:?} copies nothing, or is not open"
        );
        let prefixes = transfers::prefixes(namespace, tokens);
        self.tier.begin(transfer, direction, prefixes, places, self.epoch);
        self.trace.push(self.last_step, Event::Transfer { ticket, direction, blocks });
        self.settle()
    }

    /// Complete a copy, by its place among the open ones.
    ///
    /// # Errors
    ///
    /// A violation.
    pub fn complete(&mut self, at: usize, ok: bool) -> Check {
        let open = &self.tier.open[at];
        let listed = open.is_listed();
        // A closed core lists no more: what was listed in part can only fail.
        let all_it_gets = listed || self.core.state() == Lifecycle::Closed;
        let (ticket, due) = (open.ticket, all_it_gets && self.core.is_open(open.ticket));
        let answer = self.core.complete(ticket, ok);
        ensure!(
            answer == due,
            "copies",
            "complete of ticket {} answers {answer}, want {due}",
            ticket.0
        );
        if answer {
            self.trace.push(self.last_step, Event::Complete { ticket: ticket.0, ok });
            self.tier.complete(at, ok && listed, &mut self.device, self.epoch)?;
        }
        self.settle()
    }

    /// Forget every cached prefix.
    ///
    /// # Errors
    ///
    /// A violation.
    pub fn reset(&mut self) -> Check {
        self.core.reset_prefix_cache();
        self.epoch += 1;
        self.tier.reset();
        self.trace.push(self.last_step, Event::Call { what: "reset_prefix_cache" });
        self.settle()
    }

    /// Change the lifecycle. `Running` resumes.
    ///
    /// # Errors
    ///
    /// A violation.
    pub fn lifecycle(&mut self, to: Lifecycle) -> Check {
        match to {
            Lifecycle::Running => self.core.resume(),
            Lifecycle::Paused => self.core.pause(),
            Lifecycle::Draining => self.core.drain(),
            Lifecycle::Closed => {
                self.take_over();
                let live: Vec<usize> = self.ledger.live.values().copied().collect();
                for number in live {
                    self.ledger.requests[number].abort_pending = true;
                }
                self.core.close();
                self.endings(None)?;
                check_effect(&self.ledger)?;
            }
        }
        ensure!(
            self.core.state() == to,
            "lifecycle",
            "{} was asked for, the core is {}",
            to.name(),
            self.core.state().name()
        );
        self.trace.push(self.last_step, Event::Call { what: to.name() });
        self.settle()
    }
}
