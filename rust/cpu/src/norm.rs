//! Root-mean-square norm, with the residual stream's addition in front.

use crate::element::{Bf16, DType, Element};
use crate::error::{ArgumentError, require};
use crate::pool::Pool;
use crate::view::{Matrix, MatrixMut};

/// `out = x / rms(x) * weight`, per row; with a residual, `residual += x` first and the norm is of
/// the residual as stored (rounded to its type).
pub fn rms_norm(
    _pool: &Pool,
    x: &Matrix<'_>,
    weight: &Matrix<'_>,
    eps: f32,
    out: &mut MatrixMut<'_>,
    residual: Option<&mut MatrixMut<'_>>,
) -> Result<(), ArgumentError> {
    check(x, weight, out, residual.as_deref())?;
    for row in 0..x.num_rows() {
        let n = x.num_cols();
        let mut h: Vec<f32> = (0..n).map(|i| get(x, row, i)).collect();
        if let Some(res) = residual.as_deref() {
            for i in 0..n {
                set(res, row, i, h[i] + get(res.as_matrix(), row, i));
                h[i] = get(res.as_matrix(), row, i);
            }
        }
        let mean = h.iter().map(|v| v * v).sum::<f32>() / n as f32;
        let inv = 1.0 / (mean + eps).sqrt();
        for i in 0..n {
            set(out, row, i, h[i] * inv * get(weight, 0, i));
        }
    }
    Ok(())
}

pub(crate) fn get(m: &Matrix<'_>, row: usize, col: usize) -> f32 {
    assert!(col < m.num_cols());
    // SAFETY: col is in the row.
    unsafe {
        match m.dtype() {
            DType::F32 => *m.row::<f32>(row).add(col),
            DType::Bf16 => (*m.row::<Bf16>(row).add(col)).widen(),
        }
    }
}

pub(crate) fn set(m: &MatrixMut<'_>, row: usize, col: usize, value: f32) {
    assert!(col < m.as_matrix().num_cols());
    // SAFETY: col is in the row.
    unsafe {
        match m.as_matrix().dtype() {
            DType::F32 => *m.row::<f32>(row).add(col) = value,
            DType::Bf16 => *m.row::<Bf16>(row).add(col) = Bf16::from_f32(value),
        }
    }
}

fn check(
    x: &Matrix<'_>,
    weight: &Matrix<'_>,
    out: &MatrixMut<'_>,
    residual: Option<&MatrixMut<'_>>,
) -> Result<(), ArgumentError> {
    let same = |m: &Matrix<'_>| {
        (m.dtype(), m.num_rows(), m.num_cols()) == (x.dtype(), x.num_rows(), x.num_cols())
    };
    require(
        weight.num_rows() == 1 && weight.num_cols() == x.num_cols(),
        "weight",
        || weight.describe(),
        || format!("[1, {}]", x.num_cols()),
    )?;
    require(same(out.as_matrix()), "out", || out.as_matrix().describe(), || x.describe())?;
    let residual = residual.map_or(x, MatrixMut::as_matrix);
    require(same(residual), "residual", || residual.describe(), || x.describe())
}
