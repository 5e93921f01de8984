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
//! all of K would round as often, but on larger numbers.) A weight is made `f32` by the operations that
//! define its format. Tiles, panels and threads choose when an element is computed, never how: one row or
//! a thousand, one thread or many, and a quantized weight or the same numbers stored as `f32`, give the
//! same bits.
//!
//! Where `x` and the weight are both bfloat16, their products are exact in `f32`, so that fused or not is
//! the same. Instructions for pairs of them make the same chain (`bf16`), with one difference: they take
//! numbers nearer to zero than 2^-126 for zero, those given and those that come out. Where there are
//! none, the bits are those of every instruction set, the portable one included; where there are, an
//! element has still the same bits in any company, since the instruction set is one.

#[cfg(target_arch = "x86_64")]
mod bf16;
mod block;
mod decode;
mod encode;
mod few;
mod gather;
mod int8;
mod many;
mod pack;
mod pairs;
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
use pairs::Pairs;
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
    let has = |way| {
        weight.parts().iter().any(|part| Way::of(part.format(), x.dtype(), pool.isa()) == way)
    };
    let product = |forms: Forms<'_>| run(pool, x, forms, weight, bias, out);
    let with_codes = |forms: Forms<'_>| {
        if has(Way::Int8) {
            Codes::of(pool, x, |codes| product(Forms { codes: Some(codes), ..forms }));
        } else {
            product(forms);
        }
    };
    let with_pairs = |forms: Forms<'_>| {
        if has(Way::Pairs) {
            Pairs::of(pool, x, |pairs| with_codes(Forms { pairs: Some(pairs), ..forms }));
        } else {
            with_codes(forms);
        }
    };
    let forms = Forms { wide: x, pairs: None, codes: None };
    if x.dtype() == DType::Bf16 && has(Way::Wide) {
        many::with_wide(x, |wide| with_pairs(Forms { wide, ..forms }));
    } else {
        with_pairs(forms);
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

/// How a part of a weight is multiplied.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// As `f32`.
    Wide,
    /// As bfloat16, by instructions for pairs of them.
    Pairs,
    /// As integers.
    Int8,
}

impl Way {
    #[inline(always)]
    fn of(format: WeightFormat, x: DType, isa: Isa) -> Self {
        match format {
            WeightFormat::I8 => Self::Int8,
            WeightFormat::Bf16 if x == DType::Bf16 && isa == Isa::Avx512Bf16 => Self::Pairs,
            _ => Self::Wide,
        }
    }
}

/// `x` in the form that each way takes. Those that are not made are not needed.
#[derive(Clone, Copy)]
struct Forms<'a> {
    /// `f32` where a part is multiplied as such.
    wide: &'a Matrix<'a>,
    pairs: Option<&'a Pairs>,
    codes: Option<&'a Codes>,
}

/// A product in progress.
struct Product<'a> {
    isa: Isa,
    /// As it was given.
    x: &'a Matrix<'a>,
    forms: Forms<'a>,
    weight: &'a Weight,
    bias: Option<&'a Matrix<'a>>,
    out: &'a MatrixMut<'a>,
    /// Strips of an item.
    strips_per_item: usize,
}

fn run(
    pool: &Pool,
    x: &Matrix<'_>,
    forms: Forms<'_>,
    weight: &Weight,
    bias: Option<&Matrix<'_>>,
    out: &MatrixMut<'_>,
) {
    let num_strips = weight.strips().len();
    // A few items a thread, so that one that comes late or is slow costs little.
    let strips_per_item = num_strips.div_ceil(8 * pool.num_threads()).max(1);
    let isa = pool.isa();
    let product = Product { isa, x, forms, weight, bias, out, strips_per_item };
    let work = x.num_rows() * weight.num_rows() * weight.num_cols();
    // About 16 multiply-adds a nanosecond, twice as many of narrow numbers, and no weight faster than
    // memory brings it.
    let is_narrow = forms.codes.is_some() || forms.pairs.is_some();
    let work_ns = (work / if is_narrow { 32 } else { 16 }).max(weight.num_bytes() / 16);
    pool.run(&product, num_strips.div_ceil(strips_per_item), work_ns);
}

impl Kernel for Product<'_> {
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, item: usize) {
        let strips = self.weight.strips().len();
        let first = item * self.strips_per_item;
        for strip in first..strips.min(first + self.strips_per_item) {
            let part = &self.weight.parts()[self.weight.strips()[strip].part];
            match Way::of(part.format(), self.x.dtype(), self.isa) {
                Way::Int8 => int8::strip(self, strip),
                // SAFETY: the way is that of an instruction set that has them, the pool's.
                #[cfg(target_arch = "x86_64")]
                Way::Pairs => unsafe { bf16::strip(self, strip) },
                #[cfg(not(target_arch = "x86_64"))]
                Way::Pairs => unreachable!("instructions of x86"),
                Way::Wide if self.x.num_rows() <= FEW_ROWS => few::strip(s, self, strip),
                Way::Wide => s.call(&many::Strip(self), strip),
            }
        }
    }
}
