//! Root-mean-square norm, with the addition to the residual stream in front.
//!
//! Rows are independent. The sum of squares is four chains of vectors, added in a fixed order, so
//! a row's bits depend on the row alone.

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
#[derive(Debug)]
pub struct Norm<'a> {
    /// What is added to `residual`; without one, what the norm is of.
    pub x: Matrix<'a>,
    /// The residual stream.
    pub residual: Option<MatrixMut<'a>>,
    /// Scale of each column.
    pub weight: Matrix<'a>,
    /// Added to the mean square.
    pub eps: f32,
    /// The norm.
    pub out: MatrixMut<'a>,
}

/// Compute a [`Norm`].
///
/// # Errors
///
/// Shapes that do not fit each other, named by argument; nothing is computed.
pub fn rms_norm(pool: &Pool, norm: &Norm<'_>) -> Result<(), ArgumentError> {
    norm.check()?;
    let num_rows = norm.x.num_rows();
    pool.run(&Items(norm), num_rows.div_ceil(ROWS_PER_ITEM), num_rows * norm.row_ns());
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

/// Some rows an item.
struct Items<'a>(&'a Norm<'a>);

impl Kernel for Items<'_> {
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, item: usize) {
        let end = self.0.x.num_rows().min((item + 1) * ROWS_PER_ITEM);
        for row in item * ROWS_PER_ITEM..end {
            s.call(self.0, row);
        }
    }
}

/// A row an item.
impl Kernel for Norm<'_> {
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, row: usize) {
        match (self.x.dtype(), self.weight.dtype()) {
            (DType::F32, DType::F32) => self.row::<S, f32, f32>(s, row),
            (DType::F32, DType::Bf16) => self.row::<S, f32, Bf16>(s, row),
            (DType::Bf16, DType::F32) => self.row::<S, Bf16, f32>(s, row),
            (DType::Bf16, DType::Bf16) => self.row::<S, Bf16, Bf16>(s, row),
        }
    }
}

impl Norm<'_> {
    /// About how long a row takes.
    pub(crate) fn row_ns(&self) -> usize {
        self.x.num_cols() / 8
    }

    #[inline(always)]
    fn row<S: Simd, X: Lanes, W: Lanes>(&self, s: S, row: usize) {
        let len = self.x.num_cols();
        let mut source = self.x.row::<X>(row);
        if let Some(residual) = &self.residual {
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

    /// Whether its parts fit each other.
    pub(crate) fn check(&self) -> Result<(), ArgumentError> {
        let (x, weight, out) = (&self.x, &self.weight, self.out.as_matrix());
        let same = |m: &Matrix<'_>| {
            (m.dtype(), m.num_rows(), m.num_cols()) == (x.dtype(), x.num_rows(), x.num_cols())
        };
        require(
            weight.num_rows() == 1 && weight.num_cols() == x.num_cols(),
            "weight",
            || weight.describe(),
            || format!("[{}]", x.num_cols()),
        )?;
        require(same(out), "out", || out.describe(), || x.describe())?;
        let residual = self.residual.as_ref().map_or(x, MatrixMut::as_matrix);
        require(same(residual), "residual", || residual.describe(), || x.describe())
    }
}
