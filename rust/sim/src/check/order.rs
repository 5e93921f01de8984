//! Who goes first: decode rows before prefill, victims from the end, admission in the policy's order.

use crate::check::step::PlanCheck;
use crate::device::Device;
use crate::ledger::{Ledger, Place};
use crate::violation::{Check, ensure};

impl PlanCheck<'_> {
    /// Every running sequence with one token to go has its row, in every step.
    ///
    /// It may be passed over for want of a block alone: while it stands at a block's beginning, or in
    /// a block that forks share, and blocks will come back when a step in flight commits or a copy to
    /// or from another tier is completed.
    pub(crate) fn decode_first(&self) -> Check {
        for &seq in &self.stayed {
            let state = &self.ledger.seqs[seq];
            let has_row = self.rows.iter().any(|row| row.seq == seq);
            let fills = state.num_total >= state.stream.limit();
            if has_row || fills || state.remaining() != Some(1) {
                continue;
            }
            if !matches!(state.place, Place::Running(_)) || self.may_want_blocks(seq) {
                continue;
            }
            ensure!(
                false,
                "decode first",
                "{} has one token to go and no row in step {}, which computes {} tokens",
                self.ledger.name(seq),
                self.step(),
                self.sizes.num_tokens
            );
        }
        Ok(())
    }

    /// Whether a sequence cannot go on without a block that a sequence on its way out still has.
    pub(crate) fn may_want_blocks(&self, seq: usize) -> bool {
        let state = &self.ledger.seqs[seq];
        let (Place::Running(slot), Some(computed)) = (state.place, state.computed) else {
            return false;
        };
        let block_size = self.device.block_size;
        let at_start = computed.is_multiple_of(block_size);
        let shares_tail = !at_start
            && self
                .device
                .block(slot, computed / block_size)
                .is_ok_and(|block| self.device.holders(block).len() > 1);
        let comes_back = someone_leaves(self.ledger, self.device) || !self.tier.open.is_empty();
        (at_start || shares_tail) && comes_back
    }

    /// Whether a row of this step computes the block that `seq` would compute next, or a copy brings
    /// it.
    pub(crate) fn may_follow(&self, seq: usize) -> bool {
        let state = &self.ledger.seqs[seq];
        let block_size = self.device.block_size;
        let limit = state.num_known - 1;
        if self.tier.is_coming(&state.stream.prefixes, limit, block_size) {
            return true;
        }
        self.config.enable_prefix_caching
            && self.rows.iter().any(|row| {
                let theirs = &self.ledger.seqs[row.seq].stream;
                let block_end = (row.start / block_size + 1) * block_size;
                row.seq != seq
                    && block_end <= limit
                    && theirs.prefixes[row.start] == state.stream.prefixes[row.start]
            })
    }

    /// Of the sequences admitted in one step, no two compute the same block: the second waits for it,
    /// or shares it.
    ///
    /// Left out are spans (those of one digest and different lengths are different keys), blocks that
    /// the first was not allowed to match (the tree may have had one and evicted it since), and long
    /// prompts, which may get a second helping when everybody else has been served.
    pub(crate) fn no_work_twice(&self, admissions: &[(usize, usize)]) -> Check {
        if !self.config.enable_prefix_caching {
            return Ok(());
        }
        for &(seq, start) in admissions {
            let end = start + self.device.block_size;
            let stream = &self.ledger.seqs[seq].stream;
            if end > self.ledger.match_limit(seq) || self.ledger.has_spans(seq) {
                continue;
            }
            for &(other, from) in admissions {
                let theirs = &self.ledger.seqs[other];
                let computes = from <= start && theirs.computed.is_some_and(|to| to > start);
                let came_first = self.ledger.order(other) < self.ledger.order(seq);
                ensure!(
                    !came_first
                        || !computes
                        || self.ledger.match_limit(other) < end
                        || self.may_be_held_back(other)
                        || theirs.stream.prefixes[end - 1] != stream.prefixes[end - 1],
                    "work twice",
                    "{} and {} both compute positions {start}..{end}",
                    self.ledger.name(seq),
                    self.ledger.name(other)
                );
            }
        }
        Ok(())
    }

    /// A sequence is admitted before all that stand behind it in the order of service, unless it
    /// waits for a row of this step to compute its next block.
    pub(crate) fn admission_order(&self) -> Check {
        let admitted = self.assigned.iter().filter(|&&seq| !self.is_fork(seq));
        let Some(last) = admitted.max_by_key(|&&seq| self.ledger.order(seq)) else {
            return Ok(());
        };
        for &seq in &self.ledger.live_seqs {
            let waits = self.ledger.seqs[seq].place == Place::Waiting
                && self.ledger.record_of(seq).queued.is_some();
            ensure!(
                !waits
                    || self.ledger.order(seq) > self.ledger.order(*last)
                    || self.may_follow(seq)
                    || self.may_be_held_back(seq),
                "admission order",
                "{} {:?} is admitted before {} {:?}",
                self.ledger.name(*last),
                self.ledger.order(*last),
                self.ledger.name(seq),
                self.ledger.order(seq)
            );
        }
        Ok(())
    }

    /// Whether a prompt may have to wait because long ones have had their share.
    fn may_be_held_back(&self, seq: usize) -> bool {
        let Some(threshold) = self.config.long_prefill_threshold else { return false };
        self.ledger.seqs[seq].num_known > threshold as usize
            && self.config.max_long_prefill_percent < 100
    }

    fn is_fork(&self, seq: usize) -> bool {
        self.rows.iter().all(|row| row.seq != seq)
    }
}

fn someone_leaves(ledger: &Ledger, device: &Device) -> bool {
    device.rows.iter().any(|row| {
        row.owner.is_some_and(|seq| !matches!(ledger.seqs[seq].place, Place::Running(_)))
    })
}

/// Victims stand behind everybody who stays, the first in the order is never one, and between two
/// endings of other sequences nobody is a victim twice.
///
/// # Errors
///
/// The first victim that should not be one.
pub fn check_victims(ledger: &mut Ledger, stayed: &[usize], victims: &[usize]) -> Check {
    for &victim in victims {
        for &other in stayed {
            ensure!(
                ledger.order(other) < ledger.order(victim),
                "victim",
                "{} {:?} is preempted, {} {:?} behind it is not",
                ledger.name(victim),
                ledger.order(victim),
                ledger.name(other),
                ledger.order(other)
            );
        }
        ensure!(
            !stayed.is_empty() || victims.len() > 1,
            "victim",
            "{} is preempted, and nothing else runs",
            ledger.name(victim)
        );
        let (endings, name) = (ledger.num_endings, ledger.name(victim));
        let state = &mut ledger.seqs[victim];
        ensure!(
            state.preempted_at != Some(endings),
            "recompute",
            "{name} is preempted again, and no sequence has ended in between"
        );
        state.preempted_at = Some(endings);
    }
    Ok(())
}

/// An empty plan is right only if everybody waits for a step in flight.
///
/// # Errors
///
/// Somebody who does not.
pub fn check_idle(ledger: &Ledger, device: &Device, in_flight: usize) -> Check {
    for &seq in &ledger.live_seqs {
        let state = &ledger.seqs[seq];
        let runs = matches!(state.place, Place::Running(_))
            && state.num_total < state.stream.limit()
            && !someone_leaves(ledger, device);
        let waits = state.place != Place::Unborn && in_flight == 0;
        ensure!(
            !runs && !waits,
            "idle",
            "an empty plan with {in_flight} steps in flight, but {} is {:?}",
            ledger.name(seq),
            state.place
        );
    }
    Ok(())
}
