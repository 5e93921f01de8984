//! What the core tells of itself besides its counters: timelines, step records, the inbox's stats.

use fastserve_base::{FinishReason, StepId};
use fastserve_engine::{EventKind, Inbox, Stats, TimelineEvent};

use crate::check::step::Flight;
use crate::ledger::{Ledger, Place};
use crate::violation::{Check, ensure};

/// A request has ended: its timeline tells of every admission, preemption, rollback and ending, once,
/// in order.
///
/// # Errors
///
/// What it tells wrongly.
pub fn check_timeline(ledger: &Ledger, number: usize, timeline: &[TimelineEvent]) -> Check {
    let record = &ledger.requests[number];
    let queued = |event: &TimelineEvent| matches!(event.kind, EventKind::Queued { .. });
    let Some(first) = timeline.iter().rposition(queued) else {
        ensure!(record.queued.is_none(), "timeline", "r{} was never queued", record.request.id.0);
        return Ok(());
    };
    let timeline = &timeline[first..];
    ensure!(
        timeline.windows(2).all(|pair| pair[0].at <= pair[1].at && pair[0].step <= pair[1].step),
        "timeline",
        "events out of order: {timeline:?}"
    );
    for seq in record.seqs() {
        let state = &ledger.seqs[seq];
        let events = || timeline.iter().filter(|event| event.seq == state.id);
        let count = |wanted: fn(&EventKind) -> bool| {
            events().filter(|event| wanted(&event.kind)).count() as u32
        };
        let starts = |kind: &EventKind| {
            matches!(kind, EventKind::Admitted { .. } | EventKind::Forked { .. })
        };
        let told = [
            count(starts),
            count(|kind| matches!(kind, EventKind::Preempted { .. })),
            count(|kind| matches!(kind, EventKind::RolledBack { .. })),
            count(|kind| matches!(kind, EventKind::FirstToken)),
        ];
        let first_tokens = u32::from(state.num_outputs() > 0);
        let due = [state.num_admissions, state.num_preemptions, state.num_rollbacks, first_tokens];
        ensure!(
            told == due,
            "timeline",
            "{} was admitted, preempted, rolled back and began to answer {due:?} times, told {told:?}",
            ledger.name(seq)
        );
        let Place::Ended(reason) = state.place else { continue };
        let last = events().next_back().map(|event| event.kind);
        // A sequence that never came into being has no events of its own.
        let unborn = last.is_none() && reason == FinishReason::Abort && state.num_admissions == 0;
        ensure!(
            unborn || last == Some(EventKind::Finished { reason }),
            "timeline",
            "{} ended with {reason:?}, its timeline with {last:?}",
            ledger.name(seq)
        );
    }
    Ok(())
}

/// The newest step record is of the step that has just left.
///
/// # Errors
///
/// If it is not.
pub fn check_record(inbox: &Inbox, flight: &Flight, now: u64, failed: bool) -> Check {
    let records = inbox.steps_since(StepId(flight.step));
    let found = records.iter().find(|record| record.step.0 == flight.step);
    ensure!(
        found.is_some_and(|record| {
            (record.num_rows, record.num_tokens) == (flight.num_rows, flight.num_tokens)
                && (record.failed, record.committed_at) == (failed, now)
                && record.planned_at == flight.planned_at
                && record.num_preempted == flight.num_preempted
        }),
        "timeline",
        "step {} was {flight:?}, its record is {found:?}",
        flight.step
    );
    Ok(())
}

/// The inbox shows the core's stats, and counts what lies in it as waiting.
///
/// # Errors
///
/// If it does not.
pub fn check_inbox(inbox: &Inbox, stats: &Stats, ledger: &Ledger) -> Check {
    let mut expected = *stats;
    for &number in ledger.live.values() {
        let record = &ledger.requests[number];
        if record.queued.is_none() {
            expected.num_waiting += 1;
            expected.num_queued_tokens += record.request.prompt.len() as u64;
        }
    }
    let found = inbox.stats();
    ensure!(
        found == expected || found.capacity == 0,
        "counters",
        "the inbox shows {found:?}, want {expected:?}"
    );
    Ok(())
}
