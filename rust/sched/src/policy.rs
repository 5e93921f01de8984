//! Who is served first. A policy only orders; it cannot break any other contract.
//!
//! A policy gives each sequence a rank when it enters the queue. The queue adds what every policy
//! needs: ties go to the one that came first, and after `max_wait` a sequence goes ahead of all that
//! came later, whatever the ranks say. So an arbitrary policy, a random one included, starves nobody.

use fastserve_base::{Nanos, PolicyKind, RequestId};

/// What a policy may look at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// The request.
    pub request: RequestId,
    /// Its `priority`: lower runs first.
    pub priority: i32,
    /// Tokens of its prompt.
    pub num_prompt_tokens: u32,
    /// Most tokens it may generate, a sequence.
    pub max_tokens: u32,
    /// When it arrived, as the caller said.
    pub arrival: Nanos,
}

/// Orders the queue, and in reverse the victims of preemption.
pub trait Policy: Send {
    /// A name for logs and stats.
    fn name(&self) -> &'static str;

    /// Rank of a request: lower runs first. Called once, when the request enters the queue.
    fn rank(&mut self, candidate: &Candidate) -> i64;
}

/// First come, first served.
#[derive(Debug, Clone, Copy, Default)]
pub struct Fcfs;

impl Policy for Fcfs {
    fn name(&self) -> &'static str {
        "fcfs"
    }

    fn rank(&mut self, _: &Candidate) -> i64 {
        0
    }
}

/// Lower `priority` first.
#[derive(Debug, Clone, Copy, Default)]
pub struct Priority;

impl Policy for Priority {
    fn name(&self) -> &'static str {
        "priority"
    }

    fn rank(&mut self, candidate: &Candidate) -> i64 {
        i64::from(candidate.priority)
    }
}

/// The policy that a configuration names.
pub fn policy(kind: PolicyKind) -> Box<dyn Policy> {
    match kind {
        PolicyKind::Fcfs => Box::new(Fcfs),
        PolicyKind::Priority => Box::new(Priority),
    }
}

/// A sequence's place in the order of service: smaller is served first and preempted last.
///
/// Total: `order` and `index` are unique together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct OrderKey {
    /// 0 once the sequence has aged, else 1.
    class: u8,
    /// The policy's rank, 0 once aged.
    rank: i64,
    /// When its request entered the queue: a logical counter.
    order: u64,
    /// Which of the request's sequences.
    index: u32,
}

impl OrderKey {
    /// The key of a sequence that has not aged.
    pub fn new(rank: i64, order: u64, index: u32) -> Self {
        Self { class: 1, rank, order, index }
    }

    /// The same sequence, ahead of every one that came later.
    #[must_use]
    pub fn aged(self) -> Self {
        Self { class: 0, rank: 0, ..self }
    }

    /// Whether it has aged.
    pub fn has_aged(&self) -> bool {
        self.class == 0
    }

    /// Place in order of arrival, for the ageing heap.
    pub fn arrival_order(&self) -> (u64, u32) {
        (self.order, self.index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_have_the_names_of_the_configuration_and_rank_by_what_they_say() {
        let candidate = |priority| Candidate {
            request: RequestId(7),
            priority,
            num_prompt_tokens: 5,
            max_tokens: 9,
            arrival: 3,
        };
        let mut fcfs = policy(PolicyKind::Fcfs);
        let mut priority = policy(PolicyKind::Priority);
        assert_eq!((fcfs.name(), priority.name()), ("fcfs", "priority"));
        for value in [i32::MIN, -1, 0, 1, 5, i32::MAX] {
            assert_eq!(fcfs.rank(&candidate(value)), 0);
            assert_eq!(priority.rank(&candidate(value)), i64::from(value));
        }
    }
}
