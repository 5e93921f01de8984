//! Root-mean-square norm, with the addition to the residual stream in front.
//!
//! Rows are independent. The sum of squares is four chains of vectors, added in a fixed order, so
//! a row's bits depend on the row alone.

use std::marker::PhantomData;

use crate::element::{Bf16, DType};
use crate::error::{ArgumentError, require};
use crate::pool::Pool;
use crate::simd::{Kernel, LANES, Lanes, Simd};
use crate::view::{Matrix, MatrixMut};

/// Rows of one item: enough to be worth a claim.
const ROWS_PER_ITEM: usize = 8;

/// `out = x / rms(x) * weight` for every row.
///
/// With a `residual`, `residual += x` first, rounded to its type, and the norm is of that. `x`,
/// `out` and `residual` have one shape and type; `weight` is one row of either type.
///
/// # Errors
///
/// Shapes that do not fit each other, named by argument; nothing is computed.
pub fn rms_norm(
    pool: &Pool,
    x: &Matrix<'_>,
    weight: &Matrix<'_>,
    eps: f32,
    out: &mut MatrixMut<'_>,
    residual: Option<&mut MatrixMut<'_>>,
) -> Result<(), ArgumentError> {
    let residual = residual.map(|r| &*r);
    check(x, weight, out, residual)?;
    match (x.dtype(), weight.dtype()) {
        (DType::F32, DType::F32) => run::<f32, f32>(pool, x, weight, eps, out, residual),
        (DType::F32, DType::Bf16) => run::<f32, Bf16>(pool, x, weight, eps, out, residual),
        (DType::Bf16, DType::F32) => run::<Bf16, f32>(pool, x, weight, eps, out, residual),
        (DType::Bf16, DType::Bf16) => run::<Bf16, Bf16>(pool, x, weight, eps, out, residual),
    }
    Ok(())
}

/// The root of the mean of squares, inverted: `1 / sqrt(mean(x²) + eps)`.
///
/// # Safety
///
/// `len` elements are readable at `x`.
#[inline(always)]
pub(crate) unsafe fn inverse_rms<S: Simd, X: Lanes>(
    s: S,
    x: *const X,
    len: usize,
    eps: f32,
) -> f32 {
    let mut sums = [s.splat(0.0); 4];
    let mut at = 0;
    while at < len {
        for sum in &mut sums {
            if at < len {
                // SAFETY: the caller's promise: lanes past `len` are not read.
                let v = unsafe { X::load_first(s, x.add(at), len - at) };
                *sum = s.fma(v, v, *sum);
            }
            at += LANES;
        }
    }
    let sum = s.sum(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3])));
    1.0 / (sum / len as f32 + eps).sqrt()
}

struct Norm<'a, X, W> {
    x: &'a Matrix<'a>,
    weight: &'a Matrix<'a>,
    eps: f32,
    out: &'a MatrixMut<'a>,
    residual: Option<&'a MatrixMut<'a>>,
    types: PhantomData<(X, W)>,
}

fn run<X: Lanes, W: Lanes>(
    pool: &Pool,
    x: &Matrix<'_>,
    weight: &Matrix<'_>,
    eps: f32,
    out: &MatrixMut<'_>,
    residual: Option<&MatrixMut<'_>>,
) {
    let kernel = Norm::<X, W> { x, weight, eps, out, residual, types: PhantomData };
    let work_ns = x.num_rows() * x.num_cols() / 8;
    pool.run(&kernel, x.num_rows().div_ceil(ROWS_PER_ITEM), work_ns);
}

impl<X: Lanes, W: Lanes> Kernel for Norm<'_, X, W> {
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, item: usize) {
        let len = self.x.num_cols();
        let end = self.x.num_rows().min((item + 1) * ROWS_PER_ITEM);
        for row in item * ROWS_PER_ITEM..end {
            let mut source = self.x.row::<X>(row);
            if let Some(residual) = self.residual {
                let sum = residual.row::<X>(row);
                for at in (0..len).step_by(LANES) {
                    // SAFETY: both rows have `len` elements; this item alone has this row.
                    unsafe {
                        let x = X::load_first(s, source.add(at), len - at);
                        let r = X::load_first(s, sum.add(at), len - at);
                        X::store_first(s, sum.add(at), len - at, s.add(r, x));
                    }
                }
                source = sum;
            }
            // SAFETY: the row has `len` elements.
            let inverse = s.splat(unsafe { inverse_rms(s, source, len, self.eps) });
            let (weight, out) = (self.weight.row::<W>(0), self.out.row::<X>(row));
            for at in (0..len).step_by(LANES) {
                // SAFETY: all three have `len` elements; this item alone has this row of `out`.
                unsafe {
                    let x = s.mul(X::load_first(s, source.add(at), len - at), inverse);
                    let w = W::load_first(s, weight.add(at), len - at);
                    X::store_first(s, out.add(at), len - at, s.mul(x, w));
                }
            }
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
        || format!("[{}]", x.num_cols()),
    )?;
    require(same(out.as_matrix()), "out", || out.as_matrix().describe(), || x.describe())?;
    let residual = residual.map_or(x, MatrixMut::as_matrix);
    require(same(residual), "residual", || residual.describe(), || x.describe())
}
