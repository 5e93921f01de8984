//! The policies that a simulation may run under, and what rank each gives.

use fastserve_base::{CoreConfig, PolicyKind, Request, RequestId};
use fastserve_engine::{Candidate, Policy};

use crate::rng::mix;

/// Which policy orders the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PolicyChoice {
    /// What the configuration names.
    Config,
    /// A random rank for each request.
    Random {
        /// Seed of the ranks.
        seed: u64,
    },
}

impl PolicyChoice {
    /// The rank of a request: lower runs first.
    pub fn rank(self, config: &CoreConfig, request: &Request) -> i64 {
        match (self, config.scheduling_policy) {
            (Self::Random { seed }, _) => random_rank(seed, request.id),
            (Self::Config, PolicyKind::Fcfs) => 0,
            (Self::Config, PolicyKind::Priority) => i64::from(request.priority),
        }
    }
}

fn random_rank(seed: u64, id: RequestId) -> i64 {
    (mix(seed, id.0) % 8) as i64 - 4
}

/// Orders requests by a hash of their ids: whatever it does, no contract may break.
#[derive(Debug, Clone, Copy)]
pub struct RandomPolicy {
    /// Seed of the ranks.
    pub seed: u64,
}

impl Policy for RandomPolicy {
    fn name(&self) -> &'static str {
        "random"
    }

    fn rank(&mut self, candidate: &Candidate) -> i64 {
        random_rank(self.seed, candidate.request)
    }
}
