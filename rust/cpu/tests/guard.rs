//! No kernel touches what is not its own: every public one runs with guard pages against both ends of
//! every buffer, for every instruction set.
//!
//! The allocator of this binary is `common::guards`. So guarded are the arguments, at their exact size,
//! and what the crate allocates for itself: packed weights, a decoder's activations, scratch. A thread
//! of its own for each side has scratch of its own.
//!
//! An access outside a buffer ends this process, after a line that names the case.

#![cfg(unix)]

mod common;

use common::guards::{Guards, Side, guard};
use common::{Noise, isas, kernels};
use fastserve_cpu::Pool;

#[global_allocator]
static GUARDS: Guards = Guards;

/// Run `test` with guards at each side, for each instruction set.
fn on_both_sides(test: fn(&Pool, &mut Noise)) {
    for side in [Side::End, Side::Start] {
        for isa in isas() {
            let run = move || {
                guard(Some(side));
                test(&Pool::new(1, isa), &mut Noise::new(1));
                guard(None);
            };
            std::thread::spawn(run).join().unwrap_or_else(|_| panic!("{side:?} {isa:?}"));
        }
    }
}

/// The guards do what the other tests rely on.
#[test]
fn an_access_outside_a_buffer_ends_the_process() {
    for (side, len) in [Side::End, Side::Start].into_iter().flat_map(|s| [5, 4096].map(|n| (s, n)))
    {
        guard(Some(side));
        let buffer: Box<[u8]> = vec![7; len].into_boxed_slice();
        guard(None);
        let address = buffer.as_ptr();
        let (inside, outside) = match side {
            Side::End => (address.wrapping_add(len - 1), address.wrapping_add(len)),
            Side::Start => (address, address.wrapping_sub(1)),
        };
        assert!(child_can_read(inside), "{side:?} of {len} bytes");
        assert!(!child_can_read(outside), "{side:?} of {len} bytes");
        drop(buffer);
        assert!(!child_can_read(inside), "what was given back");
    }
}

/// Whether a process that reads `at` lives on.
fn child_can_read(at: *const u8) -> bool {
    let mut status = 0;
    // SAFETY: the child reads, which is what is tested, and ends without running anything else.
    unsafe {
        let child = libc::fork();
        assert!(child >= 0, "fork");
        if child == 0 {
            libc::signal(libc::SIGSEGV, libc::SIG_DFL);
            libc::signal(libc::SIGBUS, libc::SIG_DFL);
            at.read_volatile();
            libc::_exit(0);
        }
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
    }
    libc::WIFEXITED(status)
}

#[test]
fn products_gathering_and_decoding() {
    on_both_sides(kernels::products);
}

#[test]
fn norm_and_gate() {
    on_both_sides(kernels::norm_and_gate);
}

#[test]
fn rotation_and_writing() {
    on_both_sides(kernels::rotation);
}

#[test]
fn attention_over_every_kind_of_cache() {
    on_both_sides(kernels::attention);
}

#[test]
fn sampling() {
    on_both_sides(kernels::sampling);
}

#[test]
fn steps_of_a_decoder_and_copies_of_blocks() {
    on_both_sides(kernels::steps);
}
