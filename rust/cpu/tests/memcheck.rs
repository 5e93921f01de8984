//! Every public kernel at exact sizes, for a tool that watches each access to memory: `make test-valgrind`.
//! `guard.rs` runs the same between guard pages, so by themselves these tests are left out.

#![cfg(unix)]

mod common;

use common::{Noise, isas, kernels};
use fastserve_cpu::Pool;

fn run(kernel: fn(&Pool, &mut Noise)) {
    for isa in isas() {
        // Alone, and with a thread that is woken and handed work.
        for num_threads in [1, 2] {
            kernel(&Pool::new(num_threads, isa), &mut Noise::new(1));
        }
    }
}

/// A test of each kernel.
macro_rules! each {
    ($($kernel:ident)+) => {$(
        #[test]
        #[ignore = "for make test-valgrind"]
        fn $kernel() {
            run(kernels::$kernel);
        }
    )+};
}

each!(products norm_and_gate rotation attention sampling steps);
