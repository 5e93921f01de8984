//! Gated products: `silu(x @ gate.T) * (x @ up.T)`, where neither of the two ever lies in memory whole.
//!
//! A thread computes the same columns of both for a block of rows, into memory of its own, and multiplies
//! them there. What it keeps is rounded to the type of the result, so the bits are those of the two steps.

use std::cell::UnsafeCell;

use super::weight::{PANELS_PER_STRIP, Strip};
use super::{Product, Task};
use crate::element::{Bf16, DType};
use crate::gate;
use crate::simd::{Kernel, LANES, Simd};
use crate::view::MatrixMut;

/// Rows of a block: as many as products take at a time.
const BLOCK_ROWS: usize = 192;

/// Columns of a strip.
const STRIP: usize = PANELS_PER_STRIP * LANES;

/// A row of a block: columns of the gate, then of up.
type Row = [f32; 2 * STRIP];

thread_local! {
    static SCRATCH: UnsafeCell<Box<[Row]>> =
        UnsafeCell::new(vec![[0.0; 2 * STRIP]; BLOCK_ROWS].into_boxed_slice());
}

/// A strip of the gate, that of up, and what becomes of them; `next` is that of the gate which probably
/// comes next.
#[inline(always)]
pub(super) fn strips<S: Simd>(s: S, product: &Product<'_>, gate: usize, next: usize) {
    let up = gate + product.weight.strips().len() / 2;
    let (num_rows, dtype) = (product.x.num_rows(), product.out.as_matrix().dtype());
    let memory = SCRATCH.with(UnsafeCell::get);
    for first_row in (0..num_rows).step_by(BLOCK_ROWS) {
        let end_row = num_rows.min(first_row + BLOCK_ROWS);
        // SAFETY: this thread's own, and nothing below asks for it again. A number of it has room for one
        // of either type.
        let both = unsafe {
            let rows = (*memory).as_mut_ptr().cast();
            MatrixMut::from_raw(rows, dtype, end_row - first_row, 2 * STRIP, 2 * STRIP)
        };
        for (strip, next, first_col) in [(gate, up, 0), (up, next, STRIP)] {
            let strip = product.weight.strips()[strip];
            let task = Task { product, strip, next, first_row, end_row, out: &both, first_col };
            s.call(&task, 0);
        }
        let strip = product.weight.strips()[gate];
        s.call(&Activate { product, both: &both, strip }, first_row);
    }
}

/// From a block's gate and up to the result; the item is the first row.
struct Activate<'a> {
    product: &'a Product<'a>,
    both: &'a MatrixMut<'a>,
    strip: Strip,
}

impl Kernel for Activate<'_> {
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, first_row: usize) {
        let (out, both) = (self.product.out, self.both);
        let Strip { first_row: col, num_rows: len, .. } = self.strip;
        for row in 0..both.as_matrix().num_rows() {
            // SAFETY: `len` columns of each half of the row, and of the result from `col` on, which are
            // this thread's alone.
            unsafe {
                match out.as_matrix().dtype() {
                    DType::F32 => {
                        let (gate, out) = (both.row::<f32>(row), out.row::<f32>(first_row + row));
                        gate::columns(s, gate, gate.add(STRIP), out.add(col), len);
                    }
                    DType::Bf16 => {
                        let (gate, out) = (both.row::<Bf16>(row), out.row::<Bf16>(first_row + row));
                        gate::columns(s, gate, gate.add(STRIP), out.add(col), len);
                    }
                }
            }
        }
    }
}
