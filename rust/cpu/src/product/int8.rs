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

use super::quantize::Codes;
use super::weight::{Packed, Strip};
use super::{Product, few};
use crate::simd::{FOUR, FOUR_BYTES, Int8, Int8Grid, Int8Kernel, LANES, Simd, run_int8};

/// Numbers of `x` that stay in the second-level cache beside a panel, in bytes.
const BLOCK_BYTES: usize = 128 << 10;

/// Rows of the tallest tiles: blocks are multiples.
const TALLEST: usize = 12;

/// One strip of a part of int8.
pub(super) fn strip(product: &Product<'_>, strip: usize) {
    // SAFETY: the instruction set is that of the pool that runs the product.
    unsafe { run_int8(product.isa, &Rows(product), strip) };
}

struct Rows<'a>(&'a Product<'a>);

impl Int8Kernel for Rows<'_> {
    #[inline(always)]
    fn run<I: Int8>(&self, i: I, strip: usize) {
        let product = self.0;
        let codes = product.forms.codes.expect("a product with int8 has them");
        let strip = product.weight.strips()[strip];
        let num_rows = product.x.num_rows();
        let block = (BLOCK_BYTES / codes.row_bytes() / TALLEST).max(1) * TALLEST;
        for first in (0..num_rows).step_by(block) {
            let rows = block.min(num_rows - first);
            i.cover(&Block { product, codes, strip, first, rows }, rows, strip.num_panels);
        }
    }
}

/// A block of rows by a strip.
struct Block<'a> {
    product: &'a Product<'a>,
    codes: &'a Codes,
    strip: Strip,
    first: usize,
    rows: usize,
}

impl Int8Grid for Block<'_> {
    #[inline(always)]
    fn tile<I: Int8, const R: usize, const P: usize>(&self, i: I, row: usize, panel: usize) {
        let (s, strip) = (i.simd(), self.strip);
        let part = &self.product.weight.parts()[strip.part];
        let num_fours = part.num_cols().div_ceil(FOUR);
        let mut rows = [std::ptr::null(); R];
        for (r, to) in rows.iter_mut().enumerate() {
            // Where there are fewer rows than the tile has, the last is computed again.
            *to = self.codes.row(self.first + (row + r).min(self.rows - 1));
        }
        let mut panels = [std::ptr::null(); P];
        for (p, to) in panels.iter_mut().enumerate() {
            *to = part.panel(strip.first_panel + panel + p);
        }
        // SAFETY: rows of `x` are whole vectors of fours in the form of the instruction set, panels of
        // this part have as many positions, and `Packed::new` has seen that they are not too many.
        let sums = unsafe { i.sums::<R, P>(rows, panels, num_fours) };
        for (row, sums) in (self.first + row..self.first + self.rows).zip(&sums) {
            for (p, &sum) in sums.iter().enumerate() {
                // SAFETY: a row of the product; sixteen scales behind the numbers of a panel; this
                // strip's columns of the row are this thread's alone.
                unsafe {
                    let scales = s.load(panels[p].add(num_fours * FOUR_BYTES).cast());
                    let scale = s.mul(s.splat(self.codes.scale(row)), scales);
                    let at = (panel + p) * LANES;
                    few::finish(s, self.product, row, strip, at, s.mul(sum, scale));
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
