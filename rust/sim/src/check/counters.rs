//! Every counter of `stats()`, counted again from plans and outputs.

use fastserve_base::FinishReason;
use fastserve_engine::Stats;

use crate::ledger::{Ledger, Place};
use crate::transfers::TransferCounts;
use crate::violation::{Check, ensure};

/// What the simulator counts itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Steps committed.
    pub num_steps: u64,
    /// Steps that failed or fell with one that did.
    pub num_failed_steps: u64,
    /// Steps planned and not committed.
    pub num_steps_in_flight: u64,
    /// Tokens in plans.
    pub num_scheduled_tokens: u64,
    /// Prompt tokens among them, computed for the first time.
    pub num_prompt_tokens: u64,
    /// Tokens among them that were computed before.
    pub num_recomputed_tokens: u64,
    /// Tokens in step outputs.
    pub num_generation_tokens: u64,
    /// Preemptions in timelines.
    pub num_preemptions: u64,
    /// Rollbacks in timelines.
    pub num_rollbacks: u64,
    /// Tokens looked up at first admissions.
    pub prefix_cache_queries: u64,
    /// Tokens matched that were not computed before.
    pub prefix_cache_hits: u64,
    /// Forks in plans.
    pub num_forks: u64,
    /// Copies in plans.
    pub num_copied_blocks: u64,
    /// Copies to and from another tier.
    pub transfers: TransferCounts,
    /// Most tokens that sequences may have matched without a row that shows it, before they ended or
    /// lost their slots.
    pub unseen: u64,
    /// Endings by reason.
    pub num_finished: [u64; 5],
}

impl Counters {
    /// Count an ending.
    pub fn finished(&mut self, reason: FinishReason) {
        self.num_finished[reason as usize] += 1;
    }

    /// Add another run's.
    pub fn add(&mut self, other: &Self) {
        self.num_steps += other.num_steps;
        self.num_failed_steps += other.num_failed_steps;
        self.num_scheduled_tokens += other.num_scheduled_tokens;
        self.num_prompt_tokens += other.num_prompt_tokens;
        self.num_recomputed_tokens += other.num_recomputed_tokens;
        self.num_generation_tokens += other.num_generation_tokens;
        self.num_preemptions += other.num_preemptions;
        self.num_rollbacks += other.num_rollbacks;
        self.prefix_cache_queries += other.prefix_cache_queries;
        self.prefix_cache_hits += other.prefix_cache_hits;
        self.num_forks += other.num_forks;
        self.num_copied_blocks += other.num_copied_blocks;
        self.transfers.num_offloaded_blocks += other.transfers.num_offloaded_blocks;
        self.transfers.num_fetched_blocks += other.transfers.num_fetched_blocks;
        self.transfers.num_failed_transfers += other.transfers.num_failed_transfers;
        for (sum, other) in self.num_finished.iter_mut().zip(other.num_finished) {
            *sum += other;
        }
    }

    /// The core's own counters say the same. `lag`: tokens that waiting rows may have matched since the
    /// last step that shows them.
    ///
    /// # Errors
    ///
    /// The first counter that differs.
    pub fn check(&self, stats: &Stats, ledger: &Ledger, lag: u64) -> Check {
        let slack = self.unseen + lag;
        for (name, theirs, ours) in [
            ("num_prompt_tokens", stats.num_prompt_tokens, self.num_prompt_tokens),
            ("num_recomputed_tokens", stats.num_recomputed_tokens, self.num_recomputed_tokens),
            ("prefix_cache_hits", stats.prefix_cache_hits, self.prefix_cache_hits),
        ] {
            ensure!(
                theirs.abs_diff(ours) <= slack,
                "counters",
                "{name} is {theirs}, counted {ours}, of which {slack} may be unseen"
            );
        }
        self.check_exact(stats, ledger)
    }

    fn check_exact(&self, stats: &Stats, ledger: &Ledger) -> Check {
        let running = ledger
            .live_seqs
            .iter()
            .filter(|&&seq| matches!(ledger.seqs[seq].place, Place::Running(_)))
            .count() as u64;
        for (name, theirs, ours) in [
            ("num_running", stats.num_running, running),
            ("num_steps", stats.num_steps, self.num_steps),
            ("num_failed_steps", stats.num_failed_steps, self.num_failed_steps),
            ("num_steps_in_flight", stats.num_steps_in_flight, self.num_steps_in_flight),
            ("num_scheduled_tokens", stats.num_scheduled_tokens, self.num_scheduled_tokens),
            ("num_generation_tokens", stats.num_generation_tokens, self.num_generation_tokens),
            ("num_preemptions", stats.num_preemptions, self.num_preemptions),
            ("num_rollbacks", stats.num_rollbacks, self.num_rollbacks),
            ("prefix_cache_queries", stats.prefix_cache_queries, self.prefix_cache_queries),
            ("num_forks", stats.num_forks, self.num_forks),
            ("num_copied_blocks", stats.num_copied_blocks, self.num_copied_blocks),
            (
                "num_offloaded_blocks",
                stats.num_offloaded_blocks,
                self.transfers.num_offloaded_blocks,
            ),
            ("num_fetched_blocks", stats.num_fetched_blocks, self.transfers.num_fetched_blocks),
            (
                "num_failed_transfers",
                stats.num_failed_transfers,
                self.transfers.num_failed_transfers,
            ),
            ("num_finished_stop", stats.num_finished_stop, self.num_finished[1]),
            ("num_finished_length", stats.num_finished_length, self.num_finished[2]),
            ("num_finished_abort", stats.num_finished_abort, self.num_finished[3]),
            ("num_finished_error", stats.num_finished_error, self.num_finished[4]),
        ] {
            ensure!(theirs == ours, "counters", "{name} is {theirs}, counted {ours}");
        }
        Self::check_queue(stats, ledger)
    }

    fn check_queue(stats: &Stats, ledger: &Ledger) -> Check {
        let (mut waiting, mut leaving) = (0, 0);
        for &seq in &ledger.live_seqs {
            match ledger.seqs[seq].place {
                Place::Waiting if ledger.record_of(seq).queued.is_some() => waiting += 1,
                Place::Leaving(_) => leaving += 1,
                _ => {}
            }
        }
        ensure!(
            (waiting..=waiting + leaving).contains(&stats.num_waiting),
            "counters",
            "num_waiting is {}, {waiting} sequences wait and {leaving} are on their way back",
            stats.num_waiting
        );
        let (_, tokens) = queued(ledger, true);
        ensure!(
            stats.num_queued_tokens == tokens,
            "counters",
            "num_queued_tokens is {}, counted {tokens}",
            stats.num_queued_tokens
        );
        Ok(())
    }
}

/// Requests that were never admitted, and their prompt tokens; `taken_over`: without those that still
/// lie in the inbox.
pub fn queued(ledger: &Ledger, taken_over: bool) -> (usize, u64) {
    let mut found = (0, 0);
    for &number in ledger.live.values() {
        let record = &ledger.requests[number];
        if !record.was_admitted && (!taken_over || record.queued.is_some()) {
            found.0 += 1;
            found.1 += record.request.prompt.len() as u64;
        }
    }
    found
}
