//! Planted faults: the simulator proves that it would notice, by breaking the core on purpose.
//!
//! Without the `faults` feature [`planted`] is the constant `false` and costs nothing. With it, one
//! fault can be active per thread; a test plants it, runs seeds until a checker fails, and clears it.

/// One way of being wrong. Each is caught by the simulator within 100 seeds
/// (`rust/sim/tests/faults.rs`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A prefix match includes a block of which only a part is equal.
    PartialBlockMatched,
    /// Equal hashes are taken for equal tokens.
    HashTakenForEquality,
    /// The namespace is left out of the first block's key.
    NamespaceIgnored,
    /// `reset_prefix_cache` does not bump the epoch.
    EpochIgnored,
    /// A match may cover every token, so that nothing is left to compute.
    MatchOfAllTokens,
    /// A sequence given tokens in a step is taken as a victim in the same step.
    LeaderPreemptedInSamePass,
    /// A failed step does not roll back the sequences that matched its blocks.
    FollowerOfFailedStepKept,
    /// A forked sequence writes into the block it shares.
    CopyOnWriteSkipped,
    /// Source and destination of a copy change places.
    CopyOrderSwapped,
    /// Blocks go back to the pool while a step in flight names them.
    BlockReusedUnderStepInFlight,
    /// Aborting a waiting sequence leaks what it holds in the queue's counts.
    AbortWaitingLeaks,
    /// Aborting a forked sequence leaks its blocks.
    AbortForkedLeaks,
    /// A retain is forgotten when a prefix is shared.
    UseCountOffByOne,
    /// The victim is the first in the policy's order.
    FirstInsteadOfLastAsVictim,
    /// Recomputed tokens are counted as prefix hits.
    RecomputeCountedAsHits,
    /// No request ever ages.
    AgeingOff,
    /// A row slot is handed on without telling the device.
    StaleRowSlot,
    /// A step may hold one token more than its budget.
    BudgetExceededByOne,
    /// Prompt tokens count the same whatever their context.
    ContextUnweighed,
    /// A span's digest is left out of its blocks' keys.
    SpanDigestIgnored,
    /// A block is shared before its last slot is planned to be written.
    SharedBeforeWritten,
}

/// Every fault, for tests that go through them all.
pub const ALL: [Fault; 21] = [
    Fault::PartialBlockMatched,
    Fault::HashTakenForEquality,
    Fault::NamespaceIgnored,
    Fault::EpochIgnored,
    Fault::MatchOfAllTokens,
    Fault::LeaderPreemptedInSamePass,
    Fault::FollowerOfFailedStepKept,
    Fault::CopyOnWriteSkipped,
    Fault::CopyOrderSwapped,
    Fault::BlockReusedUnderStepInFlight,
    Fault::AbortWaitingLeaks,
    Fault::AbortForkedLeaks,
    Fault::UseCountOffByOne,
    Fault::FirstInsteadOfLastAsVictim,
    Fault::RecomputeCountedAsHits,
    Fault::AgeingOff,
    Fault::StaleRowSlot,
    Fault::BudgetExceededByOne,
    Fault::ContextUnweighed,
    Fault::SpanDigestIgnored,
    Fault::SharedBeforeWritten,
];

#[cfg(feature = "faults")]
thread_local! {
    static ACTIVE: std::cell::Cell<Option<Fault>> = const { std::cell::Cell::new(None) };
}

/// Whether `fault` is planted in this thread.
#[inline]
pub fn planted(fault: Fault) -> bool {
    #[cfg(feature = "faults")]
    return ACTIVE.with(|active| active.get() == Some(fault));
    #[cfg(not(feature = "faults"))]
    {
        let _ = fault;
        false
    }
}

/// Plant one fault in this thread, or none.
#[cfg(feature = "faults")]
pub fn plant(fault: Option<Fault>) {
    ACTIVE.with(|active| active.set(fault));
}
