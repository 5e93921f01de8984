//! Gated activation: `silu(gate) * up`.

use crate::error::{ArgumentError, require};
use crate::norm::{get, set};
use crate::pool::Pool;
use crate::view::{Matrix, MatrixMut};

/// `out = silu(gate) * up`, where a row of `gate_up` is the gate's half followed by up's.
pub fn silu_mul(
    _pool: &Pool,
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
        || format!("half the columns of gate_up {}", gate_up.describe()),
    )?;
    for row in 0..o.num_rows() {
        for i in 0..o.num_cols() {
            let g = get(gate_up, row, i);
            set(out, row, i, g / (1.0 + (-g).exp()) * get(gate_up, row, i + o.num_cols()));
        }
    }
    Ok(())
}
