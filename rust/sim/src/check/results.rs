//! What a call hands back: each entry of the step outputs against what must have happened.

use fastserve_base::{FinishReason, OutputKind};
use fastserve_engine::StepOutputs;

use crate::check::Counters;
use crate::check::step::FlightOutput;
use crate::ledger::Ledger;
use crate::trace::{Event, Trace};
use crate::violation::{Check, Violation, ensure};

/// One entry, gathered from the flat arrays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The sequence: request, index.
    pub seq: (u64, u32),
    /// The output row it comes from, or −1.
    pub source_row: i32,
    /// New tokens.
    pub tokens: Vec<u32>,
    /// Finish reason, as a code.
    pub finish: u8,
    /// Stop token, or −1.
    pub stop_token: i32,
    /// Cached tokens.
    pub num_cached: u32,
    /// Output tokens so far.
    pub num_outputs: u32,
}

/// The entries of `outputs`.
///
/// # Errors
///
/// If its arrays do not have equal lengths.
pub fn entries(outputs: &StepOutputs) -> Check<Vec<Entry>> {
    let len = outputs.len();
    let lengths = [
        outputs.seq_indices.len(),
        outputs.source_rows.len(),
        outputs.token_indptr.len() - 1,
        outputs.finish_reasons.len(),
        outputs.stop_tokens.len(),
        outputs.num_cached_tokens.len(),
        outputs.num_output_tokens.len(),
    ];
    ensure!(lengths == [len; 7], "results", "arrays of {lengths:?} for {len} entries");
    let entry = |at: usize| {
        let tokens = outputs.token_indptr[at] as usize..outputs.token_indptr[at + 1] as usize;
        Entry {
            seq: (outputs.request_ids[at], outputs.seq_indices[at]),
            source_row: outputs.source_rows[at],
            tokens: outputs.tokens[tokens].iter().map(|&token| token as u32).collect(),
            finish: outputs.finish_reasons[at],
            stop_token: outputs.stop_tokens[at],
            num_cached: outputs.num_cached_tokens[at],
            num_outputs: outputs.num_output_tokens[at],
        }
    };
    Ok((0..len).map(entry).collect())
}

/// The ledger under the results of a call.
pub struct ResultsCheck<'a> {
    /// What is known.
    pub ledger: &'a mut Ledger,
    /// What is counted.
    pub counters: &'a mut Counters,
    /// What happened.
    pub trace: &'a mut Trace,
    /// The last step planned.
    pub step: u64,
    /// Tokens per block, 0 where nothing is cached.
    pub block_size: usize,
}

impl ResultsCheck<'_> {
    /// The commit of a step: an entry for each output row that samples for a sequence that still
    /// lives, in order, with its token; and nothing else. `failed[row]`: the row was reported as an
    /// error.
    ///
    /// # Errors
    ///
    /// The first entry that differs.
    pub fn commit(&mut self, outputs: &[FlightOutput], failed: &[bool], found: &[Entry]) -> Check {
        let mut found = found.iter();
        for (row, output) in outputs.iter().enumerate() {
            if self.ledger.seqs[output.seq].has_ended() {
                continue;
            }
            let expected = match (failed[row], output.kind) {
                (true, _) => self.error(output.seq, row as i32),
                (false, OutputKind::Sample) => self.token(output.seq, row as i32)?,
                (false, _) => {
                    let state = &mut self.ledger.seqs[output.seq];
                    if output.position == state.num_scored {
                        state.num_scored += 1;
                    }
                    continue;
                }
            };
            self.same(found.next(), &expected, output.seq)?;
        }
        Self::none_left(found.next())
    }

    /// A plan, a failed step or a closing: only sequences that end, each with a right to.
    ///
    /// `may_fail`: the limit of failures between two tokens, after a failed step.
    ///
    /// # Errors
    ///
    /// The first entry that is not due.
    pub fn endings(&mut self, found: &[Entry], may_fail: Option<u32>) -> Check {
        for entry in found {
            let Some(seq) = self.ledger.find(entry.seq.0, entry.seq.1) else {
                ensure!(false, "results", "an entry of r{}.{}, not live", entry.seq.0, entry.seq.1);
                unreachable!()
            };
            let state = &self.ledger.seqs[seq];
            ensure!(
                !state.has_ended(),
                "results",
                "{} has ended already: {entry:?}",
                self.ledger.name(seq)
            );
            let kept = state.num_outputs() as u32;
            let abort = self.ledger.record_of(seq).abort_pending;
            let error = may_fail.is_some_and(|limit| state.num_failures > limit);
            let expected = match (entry.finish, state.cut) {
                (3, cut) if abort && cut.is_none_or(|(reason, _)| reason as u8 != 3) => {
                    self.end(seq, FinishReason::Abort, kept)
                }
                (finish, Some((reason, cut))) if finish == reason as u8 => {
                    self.end(seq, reason, cut.min(kept))
                }
                (4, _) if error => self.end(seq, FinishReason::Error, kept),
                _ => {
                    ensure!(
                        false,
                        "results",
                        "{} ends for no reason: {entry:?}",
                        self.ledger.name(seq)
                    );
                    unreachable!()
                }
            };
            self.same(Some(entry), &expected, seq)?;
        }
        Ok(())
    }

    fn token(&mut self, seq: usize, row: i32) -> Check<Entry> {
        let state = &mut self.ledger.seqs[seq];
        state.num_failures = 0;
        let token = state.stream.tokens[state.num_known];
        state.num_known += 1;
        self.counters.num_generation_tokens += 1;
        let num_outputs = state.num_outputs();
        let mut entry = Entry {
            seq: (state.id.request.0, state.id.index),
            source_row: row,
            tokens: vec![token],
            finish: 0,
            stop_token: -1,
            num_cached: state.num_cached.unwrap_or(0) as u32,
            num_outputs: num_outputs as u32,
        };
        if num_outputs == state.stream.num_outputs {
            let reason = state.stream.finish;
            let all_scored = state.num_scored + 1 >= state.stream.num_prompt;
            ensure!(
                !self.ledger.scores(seq) || all_scored,
                "results",
                "{} ends with {} prompt positions scored",
                self.ledger.name(seq),
                self.ledger.seqs[seq].num_scored
            );
            entry.finish = reason as u8;
            if reason == FinishReason::Stop {
                entry.stop_token = token as i32;
            }
            self.end(seq, reason, num_outputs as u32);
        }
        Ok(entry)
    }

    fn error(&mut self, seq: usize, row: i32) -> Entry {
        let kept = self.ledger.seqs[seq].num_outputs() as u32;
        Entry { source_row: row, ..self.end(seq, FinishReason::Error, kept) }
    }

    fn end(&mut self, seq: usize, reason: FinishReason, outputs: u32) -> Entry {
        let state = &self.ledger.seqs[seq];
        let (id, num_cached) = (state.id, state.num_cached.unwrap_or(0) as u32);
        self.counters.unseen += self.ledger.lose_sight(seq, self.step, self.block_size) as u64;
        self.ledger.end(seq, reason);
        self.counters.finished(reason);
        self.trace.push(self.step, Event::Finish { seq: id, reason, outputs });
        Entry {
            seq: (id.request.0, id.index),
            source_row: -1,
            tokens: Vec::new(),
            finish: reason as u8,
            stop_token: -1,
            num_cached,
            num_outputs: outputs,
        }
    }

    /// The entry found is the one expected. Cached tokens that no row has shown are taken as given, as
    /// far as there may be such.
    fn same(&mut self, found: Option<&Entry>, expected: &Entry, seq: usize) -> Check {
        let state = &mut self.ledger.seqs[seq];
        let mut expected = expected.clone();
        let more = found.map_or(0, |entry| entry.num_cached.saturating_sub(expected.num_cached));
        if more > 0 && more as usize <= state.unseen {
            state.unseen -= more as usize;
            state.num_cached = state.num_cached.map(|cached| cached + more as usize);
            expected.num_cached += more;
        }
        ensure!(
            found == Some(&expected),
            "results",
            "step outputs have {found:?}, want {expected:?}"
        );
        Ok(())
    }

    fn none_left(found: Option<&Entry>) -> Check {
        match found {
            None => Ok(()),
            Some(entry) => Err(Violation {
                checker: "results",
                what: format!("step outputs have one entry too many: {entry:?}"),
            }),
        }
    }
}

/// After a plan, nothing that was aborted or cut before it lives on.
///
/// # Errors
///
/// A sequence that does.
pub fn check_effect(ledger: &Ledger) -> Check {
    for &seq in &ledger.live_seqs {
        let aborted = ledger.record_of(seq).abort_pending;
        ensure!(
            !aborted && ledger.seqs[seq].cut.is_none(),
            "results",
            "{} was aborted or cut before the plan and lives on",
            ledger.name(seq)
        );
    }
    Ok(())
}
