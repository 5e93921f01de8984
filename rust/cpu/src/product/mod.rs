//! Matrix products with packed weights: `out = x @ weight.T + bias`.
//!
//! ```text
//!   weight   rows of the checkpoint, 16 to a panel, in the format of the file   (weight, pack)
//!   panel    16 columns of the result; its numbers in the order of use          (stored)
//!   tile     a few rows of x by a few panels, sums in registers                 (tile)
//! ```
//!
//! Weights of int8 are multiplied as integers and have a definition of their own ([`int8`]); the rest of
//! this page is about the others.
//!
//! Few rows: a tile goes through all of K and reads the weights once, as they are stored. Many rows:
//! a piece of K of a few panels is made `f32` first, then all rows use it ([`many`]).
//!
//! # The same bits in any company
//!
//! An element of the result is a sum over pieces of 128 positions of K in ascending order, then the
//! bias; a piece is one chain of fused multiply-adds from zero, in ascending order too. (One chain over
//! all of K would round as often, but on larger numbers.) A weight is made `f32` by the operations that define its format. Tiles,
//! panels and threads choose when an element is computed, never how: one row or a thousand, one thread
//! or many, and a quantized weight or the same numbers stored as `f32`, give the same bits.

mod block;
mod decode;
mod encode;
mod few;
mod gather;
mod int8;
mod many;
mod pack;
mod quantize;
mod stored;
mod tile;
mod weight;

pub use decode::decode;
pub use encode::encode;
pub use gather::gather;
pub use weight::{Packed, Weight, WeightFormat};

use crate::element::DType;
use crate::error::{ArgumentError, require};
use crate::isa::Isa;
use crate::pool::Pool;
use crate::simd::{FEW_ROWS, Kernel, Simd};
use crate::view::{Matrix, MatrixMut};
use quantize::Codes;

/// Positions of K that are summed on their own: whole groups of every format.
const PIECE: usize = 128;

/// `out = x @ weight.T`, plus `bias` where there is one.
///
/// `x` is `[rows, weight.num_cols()]`, `out` is `[rows, weight.num_rows()]`, `bias` one row of that;
/// each of either type. Sums are `f32` and rounded once, when they are stored.
///
/// # Errors
///
/// Shapes that do not fit each other, named by argument; nothing is computed.
pub fn linear(
    pool: &Pool,
    x: &Matrix<'_>,
    weight: &Weight,
    bias: Option<&Matrix<'_>>,
    out: &mut MatrixMut<'_>,
) -> Result<(), ArgumentError> {
    check(x, weight, bias, out.as_matrix())?;
    if x.num_rows() == 0 {
        return Ok(());
    }
    let num_int8 = weight.parts().iter().filter(|part| part.format() == WeightFormat::I8).count();
    let product = |x: &Matrix<'_>| match num_int8 {
        0 => run(pool, x, weight, None, bias, out),
        _ => Codes::of(pool, x, |codes| run(pool, x, weight, Some(codes), bias, out)),
    };
    // Only products of int8 read bfloat16 themselves.
    if x.dtype() == DType::F32 || num_int8 == weight.parts().len() {
        product(x);
    } else {
        many::with_wide(x, product);
    }
    Ok(())
}

fn check(
    x: &Matrix<'_>,
    weight: &Weight,
    bias: Option<&Matrix<'_>>,
    out: &Matrix<'_>,
) -> Result<(), ArgumentError> {
    require(
        x.num_cols() == weight.num_cols(),
        "x",
        || x.describe(),
        || format!("{} columns, as many as the weight has", weight.num_cols()),
    )?;
    require(
        out.num_rows() == x.num_rows() && out.num_cols() == weight.num_rows(),
        "out",
        || out.describe(),
        || format!("[{}, {}]", x.num_rows(), weight.num_rows()),
    )?;
    if let Some(bias) = bias {
        require(
            bias.num_rows() == 1 && bias.num_cols() == weight.num_rows(),
            "bias",
            || bias.describe(),
            || format!("[{}]", weight.num_rows()),
        )?;
    }
    Ok(())
}

/// A product in progress. `x` is `f32` where a part is not int8.
struct Product<'a> {
    isa: Isa,
    x: &'a Matrix<'a>,
    /// `x` again, for parts of int8.
    codes: Option<&'a Codes>,
    weight: &'a Weight,
    bias: Option<&'a Matrix<'a>>,
    out: &'a MatrixMut<'a>,
    /// Strips of an item.
    strips_per_item: usize,
}

fn run(
    pool: &Pool,
    x: &Matrix<'_>,
    weight: &Weight,
    codes: Option<&Codes>,
    bias: Option<&Matrix<'_>>,
    out: &MatrixMut<'_>,
) {
    let num_strips = weight.strips().len();
    // A few items a thread, so that one that comes late or is slow costs little.
    let strips_per_item = num_strips.div_ceil(8 * pool.num_threads()).max(1);
    let product = Product { isa: pool.isa(), x, codes, weight, bias, out, strips_per_item };
    let work = x.num_rows() * weight.num_rows() * weight.num_cols();
    // About 16 multiply-adds a nanosecond, or 32 of int8, and no weight faster than memory brings it.
    let work_ns = (work / if codes.is_some() { 32 } else { 16 }).max(weight.num_bytes() / 16);
    pool.run(&product, num_strips.div_ceil(strips_per_item), work_ns);
}

impl Kernel for Product<'_> {
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, item: usize) {
        let strips = self.weight.strips().len();
        let first = item * self.strips_per_item;
        for strip in first..strips.min(first + self.strips_per_item) {
            let part = self.weight.strips()[strip].part;
            if self.weight.parts()[part].format() == WeightFormat::I8 {
                int8::strip(self, strip);
            } else if self.x.num_rows() <= FEW_ROWS {
                few::strip(s, self, strip);
            } else {
                s.call(&many::Strip(self), strip);
            }
        }
    }
}
