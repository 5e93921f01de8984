//! Threads for kernels.

use crate::isa::Isa;

/// Most threads a pool may have.
pub const MAX_NUM_THREADS: usize = 1024;

/// Runs kernels.
#[derive(Debug)]
pub struct Pool {
    num_threads: usize,
    isa: Isa,
}

impl Pool {
    /// A pool of `num_threads`, the caller's own included, that computes with `isa`.
    pub fn new(num_threads: usize, isa: Isa) -> Self {
        assert!(num_threads > 0, "a pool needs at least the caller's thread");
        assert!(isa.is_available(), "this machine has no {}", isa.name());
        Self { num_threads, isa }
    }

    /// Threads that compute, the caller's own included.
    pub fn num_threads(&self) -> usize {
        self.num_threads
    }

    /// Instruction set that kernels use.
    pub fn isa(&self) -> Isa {
        self.isa
    }
}
