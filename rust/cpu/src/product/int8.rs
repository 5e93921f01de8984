//! Products with weights of int8: exact sums of integers, scaled once.
//!
//! ```text
//! out[r][c] = f32(sum over k of x[r][k] * w[c][k]) * (scale of x[r] * scale of w[c]) + bias[c]
//! ```
//!
//! in that order, each step rounded once; `x` and `w` are the integers of `quantize`. A sum of integers
//! is the same in any order, so an element's bits depend on its row and its column alone, and are the
//! same on every instruction set.
//!
//! A tile goes through all of K with its sums in registers. The rows of a block pass by a panel, which
//! stays in the cache meanwhile.

use super::Task;
use super::quantize::Codes;
use super::weight::Packed;
use crate::simd::{FOUR, FOUR_BYTES, Int8, Int8Grid, Int8Kernel, LANES, Simd, run_int8};

/// Numbers of `x` that stay in the second-level cache beside a panel, in bytes.
const BLOCK_BYTES: usize = 128 << 10;

/// Rows of the tallest tiles: blocks are multiples.
const TALLEST: usize = 12;

/// A task whose strip is of int8, with the codes of the product's `x`.
pub(super) fn run(task: &Task<'_>, codes: &Codes) {
    // SAFETY: the instruction set is that of the pool that runs the product.
    unsafe { run_int8(task.product.isa, &Rows { task, codes }, 0) };
}

struct Rows<'a> {
    task: &'a Task<'a>,
    codes: &'a Codes,
}

impl Int8Kernel for Rows<'_> {
    #[inline(always)]
    fn run<I: Int8>(&self, i: I, _item: usize) {
        let Self { task, codes } = *self;
        let block = (BLOCK_BYTES / codes.row_bytes() / TALLEST).max(1) * TALLEST;
        for first in (0..task.num_rows()).step_by(block) {
            let rows = block.min(task.num_rows() - first);
            i.cover(&Block { task, codes, first, rows }, rows, task.strip.num_panels);
        }
    }
}

/// A block of a task's rows.
struct Block<'a> {
    task: &'a Task<'a>,
    codes: &'a Codes,
    /// Counted from the task's first.
    first: usize,
    rows: usize,
}

impl Int8Grid for Block<'_> {
    #[inline(always)]
    fn tile<I: Int8, const R: usize, const P: usize>(&self, i: I, row: usize, panel: usize) {
        let (s, task) = (i.simd(), self.task);
        let (part, first_row) = (task.part(), task.first_row + self.first);
        let num_fours = part.num_cols().div_ceil(FOUR);
        let mut rows = [std::ptr::null(); R];
        for (r, to) in rows.iter_mut().enumerate() {
            // Where there are fewer rows than the tile has, the last is computed again.
            *to = self.codes.row(first_row + (row + r).min(self.rows - 1));
        }
        let mut panels = [std::ptr::null(); P];
        for (p, to) in panels.iter_mut().enumerate() {
            *to = part.panel(task.strip.first_panel + panel + p);
        }
        // SAFETY: rows of `x` are whole vectors of fours in the form of the instruction set, panels of
        // this part have as many positions, and `Packed::new` has seen that they are not too many.
        let sums = unsafe { i.sums::<R, P>(rows, panels, num_fours) };
        for (row, sums) in (row..self.rows).zip(&sums) {
            for (p, &sum) in sums.iter().enumerate() {
                // SAFETY: a row of the codes; sixteen scales behind the numbers of a panel; a row of the
                // task, which is this thread's.
                unsafe {
                    let scales = s.load(panels[p].add(num_fours * FOUR_BYTES).cast());
                    let scale = s.mul(s.splat(self.codes.scale(first_row + row)), scales);
                    let at = (panel + p) * LANES;
                    task.finish(s, self.first + row, at, s.mul(sum, scale));
                }
            }
        }
    }
}

/// Call `body` with each position of a row and the number there: integer times scale, rounded once.
#[inline(always)]
pub(super) fn each_number(part: &Packed, row: usize, body: impl Fn(usize, f32)) {
    let (panel, lane) = (part.panel(row / LANES), row % LANES);
    let num_fours = part.num_cols().div_ceil(FOUR);
    let scales: *const f32 = panel.wrapping_add(num_fours * FOUR_BYTES).cast();
    // SAFETY: a panel has a scale for each lane behind its numbers.
    let scale = unsafe { scales.add(lane).read() };
    for four in 0..num_fours {
        let numbers: *const [i8; FOUR] = panel.wrapping_add(four * FOUR_BYTES).cast();
        // SAFETY: a panel has so many fours of sixteen rows.
        let numbers = unsafe { numbers.add(lane).read() };
        for (at, number) in (four * FOUR..part.num_cols()).zip(numbers) {
            body(at, f32::from(number) * scale);
        }
    }
}
