//! Gated activation: `silu(gate) * up`.

use std::marker::PhantomData;

use crate::element::{Bf16, DType};
use crate::error::{ArgumentError, require};
use crate::math;
use crate::pool::Pool;
use crate::simd::{Kernel, LANES, Lanes, Simd};
use crate::view::{Matrix, MatrixMut};

/// Columns of one item: a row of a wide model is several items. A multiple of [`LANES`].
const COLS_PER_ITEM: usize = 2048;

/// `out = silu(gate) * up`, where a row of `gate_up` is the gate's half followed by up's.
///
/// # Errors
///
/// Shapes that do not fit each other, named by argument; nothing is computed.
pub fn silu_mul(
    pool: &Pool,
    gate_up: &Matrix<'_>,
    out: &mut MatrixMut<'_>,
) -> Result<(), ArgumentError> {
    let o = out.as_matrix();
    require(
        o.num_rows() == gate_up.num_rows()
            && o.num_cols() * 2 == gate_up.num_cols()
            && o.dtype() == gate_up.dtype(),
        "out",
        || o.describe(),
        || format!("half the columns of gate_up, {}", gate_up.describe()),
    )?;
    match o.dtype() {
        DType::F32 => run::<f32>(pool, gate_up, out),
        DType::Bf16 => run::<Bf16>(pool, gate_up, out),
    }
    Ok(())
}

struct SiluMul<'a, X> {
    gate_up: &'a Matrix<'a>,
    out: &'a MatrixMut<'a>,
    items_per_row: usize,
    types: PhantomData<X>,
}

fn run<X: Lanes>(pool: &Pool, gate_up: &Matrix<'_>, out: &MatrixMut<'_>) {
    let (rows, cols) = (out.as_matrix().num_rows(), out.as_matrix().num_cols());
    let items_per_row = cols.div_ceil(COLS_PER_ITEM);
    let kernel = SiluMul::<X> { gate_up, out, items_per_row, types: PhantomData };
    pool.run(&kernel, rows * items_per_row, rows * cols / 2);
}

impl<X: Lanes> Kernel for SiluMul<'_, X> {
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, item: usize) {
        let (row, part) = (item / self.items_per_row, item % self.items_per_row);
        let len = self.out.as_matrix().num_cols();
        let end = len.min((part + 1) * COLS_PER_ITEM);
        let (gate, out) = (self.gate_up.row::<X>(row), self.out.row::<X>(row));
        let first = part * COLS_PER_ITEM;
        // SAFETY: a row of `gate_up` has 2 * len elements and one of `out` len; this item alone has
        // these columns of this row.
        unsafe {
            let up = gate.add(len + first);
            columns(s, gate.add(first), up, out.add(first), end - first);
        }
    }
}

/// `out = silu(gate) * up` for `len` neighbours.
///
/// # Safety
///
/// `len` elements are readable at `gate` and `up`, and writable at `out`.
#[inline(always)]
pub(crate) unsafe fn columns<S: Simd, X: Lanes>(
    s: S,
    gate: *const X,
    up: *const X,
    out: *mut X,
    len: usize,
) {
    for at in (0..len).step_by(LANES) {
        // SAFETY: the caller's promise: lanes past `len` are not read or written.
        unsafe {
            let g = X::load_first(s, gate.add(at), len - at);
            let u = X::load_first(s, up.add(at), len - at);
            X::store_first(s, out.add(at), len - at, s.mul(math::silu(s, g), u));
        }
    }
}
