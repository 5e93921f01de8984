//! Products of bfloat16 by instructions for its pairs: neither factor is ever widened.
//!
//! Few rows: a tile goes through all of K, and the panels pass by once, as memory brings them. More: a
//! piece of K of a strip of panels stays in the first-level cache while tiles of twelve rows use it, and
//! between pieces the totals are in memory, as in [`many`](super::many). The piece of `x` is copied
//! together, since rows of a matrix may lie in the same few places of the cache.

use std::cell::UnsafeCell;

use super::pairs::Pairs;
use super::weight::PANELS_PER_STRIP;
use super::{PIECE, Task};
use crate::simd::{Dot, DotKernel, FEW_ROWS, LANES, PAIR_BYTES, Pair, Simd, run_dot};

/// Pairs of a piece of K.
const PIECE_PAIRS: usize = PIECE / 2;

/// Rows of a block: their piece of `x`, and their totals, are 48 KiB each.
const BLOCK_ROWS: usize = 192;

/// Columns of a strip.
const STRIP: usize = PANELS_PER_STRIP * LANES;

/// A thread's working memory.
struct Scratch {
    /// `[row][pair]` of a piece of a block of rows.
    x: Box<[[Pair; PIECE_PAIRS]]>,
    /// `[row][column]` of a block of rows by a strip.
    totals: Box<[[f32; STRIP]]>,
}

thread_local! {
    static SCRATCH: UnsafeCell<Scratch> = UnsafeCell::new(Scratch {
        x: vec![[Pair::default(); PIECE_PAIRS]; BLOCK_ROWS].into_boxed_slice(),
        totals: vec![[0.0; STRIP]; BLOCK_ROWS].into_boxed_slice(),
    });
}

/// A task whose strip is of bfloat16, with the pairs of the product's `x`.
///
/// # Safety
///
/// The machine has AVX-512 with BF16.
pub(super) unsafe fn run(task: &Task<'_>, x: &Pairs) {
    // SAFETY: the caller's promise.
    unsafe { run_dot(&Rows { task, x }) };
}

/// All rows of a task.
struct Rows<'a> {
    task: &'a Task<'a>,
    x: &'a Pairs,
}

impl DotKernel for Rows<'_> {
    #[inline(always)]
    fn run(&self, dot: Dot) {
        let (num_rows, num_panels) = (self.task.num_rows(), self.task.strip.num_panels);
        if num_rows > FEW_ROWS {
            return self.many(dot);
        }
        let mut panel = 0;
        while panel < num_panels {
            // One row takes four panels at a time, since each is one chain that waits for itself.
            panel += match (num_rows, num_panels - panel) {
                (1, PANELS_PER_STRIP) => self.few::<1, PANELS_PER_STRIP>(dot, panel),
                (1, _) => self.few::<1, 1>(dot, panel),
                (_, 1) => self.few::<FEW_ROWS, 1>(dot, panel),
                _ => self.few::<FEW_ROWS, 2>(dot, panel),
            };
        }
    }
}

impl Rows<'_> {
    /// `P` panels from `panel` on of the strip, where they are from pair `pair` on.
    #[inline(always)]
    fn panels<const P: usize>(&self, panel: usize, pair: usize) -> [*const u8; P] {
        let (part, first) = (self.task.part(), self.task.strip.first_panel + panel);
        let mut panels = [std::ptr::null(); P];
        for (p, to) in panels.iter_mut().enumerate() {
            *to = part.panel(first + p).wrapping_add(pair * PAIR_BYTES);
        }
        panels
    }

    /// All rows, `R` at most, by `P` panels. Returns `P`.
    #[inline(always)]
    fn few<const R: usize, const P: usize>(&self, dot: Dot, panel: usize) -> usize {
        let s = dot.simd();
        let (num_rows, num_pairs) = (self.task.num_rows(), self.x.num_pairs);
        let mut rows = [std::ptr::null::<Pair>(); R];
        for (r, to) in rows.iter_mut().enumerate() {
            // Where there are fewer rows than the tile has, the last is computed again.
            *to = self.x.row(self.task.first_row + r.min(num_rows - 1));
        }
        let mut totals = [[s.splat(0.0); P]; R];
        for start in (0..num_pairs).step_by(PIECE_PAIRS) {
            let count = PIECE_PAIRS.min(num_pairs - start);
            // SAFETY: rows of `x` and panels of this part have `num_pairs` pairs.
            let sums = unsafe { dot.sums::<R, P>(rows, self.panels(panel, start), count) };
            for r in 0..R {
                rows[r] = rows[r].wrapping_add(PIECE_PAIRS);
                for p in 0..P {
                    totals[r][p] = s.add(totals[r][p], sums[r][p]);
                }
            }
        }
        for (row, totals) in totals.iter().enumerate().take(num_rows) {
            for (p, &total) in totals.iter().enumerate() {
                let at = (panel + p) * LANES;
                // SAFETY: a row of the task, which is this thread's.
                unsafe { self.task.finish(s, row, at, total) };
            }
        }
        P
    }

    #[inline(always)]
    fn many(&self, dot: Dot) {
        let s = dot.simd();
        let (num_rows, num_pairs) = (self.task.num_rows(), self.x.num_pairs);
        let num_panels = self.task.strip.num_panels;
        // SAFETY: this thread's own, and nothing below asks for it again.
        let scratch = unsafe { &mut *SCRATCH.with(UnsafeCell::get) };
        for first in (0..num_rows).step_by(BLOCK_ROWS) {
            let block = BLOCK_ROWS.min(num_rows - first);
            scratch.totals[..block].fill([0.0; STRIP]);
            for start in (0..num_pairs).step_by(PIECE_PAIRS) {
                let count = PIECE_PAIRS.min(num_pairs - start);
                for (row, to) in scratch.x[..block].iter_mut().enumerate() {
                    let from = self.x.row(self.task.first_row + first + row).wrapping_add(start);
                    // SAFETY: `count` pairs of the row from `start` on.
                    to[..count].copy_from_slice(unsafe { std::slice::from_raw_parts(from, count) });
                }
                let piece = Piece { start, count, block };
                for panel in (0..num_panels).step_by(2) {
                    for row in (0..block).step_by(12) {
                        match (num_panels - panel, block - row) {
                            (1, 1..=4) => self.tile::<4, 1>(dot, scratch, piece, row, panel),
                            (1, _) => self.tile::<12, 1>(dot, scratch, piece, row, panel),
                            (_, 1..=4) => self.tile::<4, 2>(dot, scratch, piece, row, panel),
                            _ => self.tile::<12, 2>(dot, scratch, piece, row, panel),
                        }
                    }
                }
            }
            for (row, totals) in scratch.totals[..block].iter().enumerate() {
                for at in (0..num_panels * LANES).step_by(LANES) {
                    // SAFETY: sixteen of a row; a row of the task, which is this thread's.
                    unsafe {
                        let total = s.load(totals[at..].as_ptr());
                        self.task.finish(s, first + row, at, total);
                    }
                }
            }
        }
    }

    /// Add a piece of `R` rows, by `P` panels, to the totals. Twelve by two take 24 of 32 registers for
    /// sums.
    #[inline(always)]
    fn tile<const R: usize, const P: usize>(
        &self,
        dot: Dot,
        scratch: &mut Scratch,
        piece: Piece,
        row: usize,
        panel: usize,
    ) {
        let s = dot.simd();
        let mut rows = [std::ptr::null(); R];
        for (r, to) in rows.iter_mut().enumerate() {
            // Where there are fewer rows than the tile has, the last is computed again.
            *to = scratch.x[(row + r).min(piece.block - 1)].as_ptr();
        }
        // SAFETY: the piece's rows, and panels of this part, have `count` pairs, these from `start` on.
        let sums = unsafe { dot.sums::<R, P>(rows, self.panels(panel, piece.start), piece.count) };
        for (totals, sums) in scratch.totals[row..piece.block].iter_mut().zip(&sums) {
            for (p, &sum) in sums.iter().enumerate() {
                let total = totals[(panel + p) * LANES..][..LANES].as_mut_ptr();
                // SAFETY: sixteen of a row.
                unsafe { s.store(total, s.add(s.load(total), sum)) };
            }
        }
    }
}

/// Pairs `start..start + count` of a block of so many rows.
#[derive(Clone, Copy)]
struct Piece {
    start: usize,
    count: usize,
    block: usize,
}
