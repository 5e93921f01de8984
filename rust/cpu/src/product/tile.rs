//! The innermost loop: some rows of `x` by some panels, sums in registers.

#![expect(clippy::needless_range_loop, reason = "loops over constants, unrolled into registers")]

use super::stored::{FOUR, Stored};
use crate::simd::Simd;

/// Positions of K, in groups of a format and what is left over after the last.
#[derive(Debug, Clone, Copy)]
pub(super) struct Groups {
    pub(super) first: usize,
    pub(super) end: usize,
    /// Positions after the last group: a format without blocks has groups of four.
    pub(super) rest: usize,
}

impl Groups {
    /// Positions `start..start + len`. `start` is whole groups.
    #[inline(always)]
    pub(super) fn between<W: Stored>(start: usize, len: usize) -> Self {
        let first = start / W::GROUP;
        Self { first, end: first + len / W::GROUP, rest: len % W::GROUP }
    }
}

/// Add to `sums[row][panel]`, in the order of K.
///
/// # Safety
///
/// Each of `x` has the positions of `groups` readable, counted from its own start at `groups.first`;
/// each of `panels` is a panel of the format that has them too.
#[inline(always)]
pub(super) unsafe fn tile<S: Simd, W: Stored, const R: usize, const P: usize>(
    s: S,
    x: [*const f32; R],
    panels: [*const u8; P],
    groups: Groups,
    sums: &mut [[S::V; P]; R],
) {
    let mut at = 0;
    for group in groups.first..groups.end {
        let opened = open::<S, W, P>(s, panels, group);
        for part in 0..W::GROUP / FOUR {
            // SAFETY: the caller's promise.
            unsafe { four::<S, W, R, P>(s, x, at, &opened, part, sums) };
            at += FOUR;
        }
    }
    if groups.rest > 0 {
        let opened = open::<S, W, P>(s, panels, groups.end);
        for k in 0..groups.rest {
            for p in 0..P {
                // SAFETY: the caller's promise; a panel is whole groups, filled up with zeros.
                let w = unsafe { W::four(s, opened[p].0, opened[p].1, 0) };
                for r in 0..R {
                    // SAFETY: the caller's promise.
                    let v = s.splat(unsafe { x[r].add(at + k).read() });
                    sums[r][p] = s.fma(v, w[k], sums[r][p]);
                }
            }
        }
    }
}

#[inline(always)]
fn open<S: Simd, W: Stored, const P: usize>(
    s: S,
    panels: [*const u8; P],
    group: usize,
) -> [(W::Scales<S::V>, *const u8); P] {
    // A loop, since a closure would not be compiled to the instructions.
    // SAFETY: `tile`'s promise.
    let mut opened = [unsafe { W::open(s, panels[0], group) }; P];
    for p in 1..P {
        // SAFETY: as above.
        opened[p] = unsafe { W::open(s, panels[p], group) };
    }
    opened
}

/// Four positions of K from `at` on.
///
/// # Safety
///
/// As for [`tile`].
#[inline(always)]
unsafe fn four<S: Simd, W: Stored, const R: usize, const P: usize>(
    s: S,
    x: [*const f32; R],
    at: usize,
    opened: &[(W::Scales<S::V>, *const u8); P],
    part: usize,
    sums: &mut [[S::V; P]; R],
) {
    for p in 0..P {
        // SAFETY: the caller's promise.
        let w = unsafe { W::four(s, opened[p].0, opened[p].1, part) };
        for k in 0..FOUR {
            for r in 0..R {
                // SAFETY: the caller's promise.
                let v = s.splat(unsafe { x[r].add(at + k).read() });
                sums[r][p] = s.fma(v, w[k], sums[r][p]);
            }
        }
    }
}
