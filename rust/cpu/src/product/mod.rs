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
mod gated;
mod gather;
mod int8;
mod many;
mod pack;
mod pairs;
mod prepare;
mod quantize;
mod stored;
mod tile;
mod weight;

pub use decode::decode;
pub use encode::encode;
pub use gather::gather;
pub use prepare::Input;
pub use weight::{Packed, Weight, WeightFormat};

use crate::element::{Bf16, DType};
use crate::error::{ArgumentError, require};
use crate::isa::Isa;
use crate::pool::Pool;
use crate::simd::{FEW_ROWS, Kernel, Lanes, Simd};
use crate::view::{Matrix, MatrixMut};
use prepare::{Forms, Needs};
use weight::Strip;

/// Positions of K that are summed on their own: whole groups of every format.
const PIECE: usize = 128;

/// `out = x @ weight.T`, plus `bias` where there is one.
///
/// `x` is `[rows, weight.num_cols()]`, `out` is `[rows, weight.num_rows()]`, `bias` one row of that;
/// each of either type. Sums are `f32` and rounded once, when they are stored. Where `x` is a
/// [`Norm`](crate::norm::Norm), that is computed first, in the pass that prepares `x` for the product.
///
/// # Errors
///
/// Shapes that do not fit each other, named by argument; nothing is computed.
pub fn linear<'a>(
    pool: &Pool,
    x: impl Into<Input<'a>>,
    weight: &Weight,
    bias: Option<&Matrix<'_>>,
    out: &mut MatrixMut<'_>,
) -> Result<(), ArgumentError> {
    let input = x.into();
    check(&input, weight, bias, out.as_matrix(), weight.num_rows())?;
    start(pool, &input, weight, bias, out, false);
    Ok(())
}

/// `out = silu(gate) * up`, where gate and up are the halves of `x @ weight.T + bias`, rounded to the
/// type of `out`.
///
/// As [`linear`], but `out` has half as many columns as the weight has rows.
///
/// # Errors
///
/// As for [`linear`], or `weight` is not two halves of equal parts.
pub fn linear_silu_mul<'a>(
    pool: &Pool,
    x: impl Into<Input<'a>>,
    weight: &Weight,
    bias: Option<&Matrix<'_>>,
    out: &mut MatrixMut<'_>,
) -> Result<(), ArgumentError> {
    let input = x.into();
    weight.check_halves("weight")?;
    check(&input, weight, bias, out.as_matrix(), weight.num_rows() / 2)?;
    start(pool, &input, weight, bias, out, true);
    Ok(())
}

fn check(
    input: &Input<'_>,
    weight: &Weight,
    bias: Option<&Matrix<'_>>,
    out: &Matrix<'_>,
    num_cols: usize,
) -> Result<(), ArgumentError> {
    if let Input::Norm(norm) = input {
        norm.check()?;
    }
    let x = input.matrix();
    require(
        x.num_cols() == weight.num_cols(),
        "x",
        || x.describe(),
        || format!("{} columns, as many as the weight has", weight.num_cols()),
    )?;
    require(
        out.num_rows() == x.num_rows() && out.num_cols() == num_cols,
        "out",
        || out.describe(),
        || format!("[{}, {num_cols}]", x.num_rows()),
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
    fn of(format: WeightFormat, x: DType, isa: Isa) -> Self {
        match format {
            WeightFormat::I8 => Self::Int8,
            WeightFormat::Bf16 if x == DType::Bf16 && isa == Isa::Avx512Bf16 => Self::Pairs,
            _ => Self::Wide,
        }
    }
}

/// A product in progress.
struct Product<'a> {
    isa: Isa,
    /// As it was given.
    x: &'a Matrix<'a>,
    forms: &'a Forms<'a>,
    weight: &'a Weight,
    bias: Option<&'a Matrix<'a>>,
    out: &'a MatrixMut<'a>,
    is_gated: bool,
    /// Strips of an item; of a gated product, of each half.
    strips_per_item: usize,
    num_threads: usize,
}

impl Product<'_> {
    /// Strips that are shared out; of a gated product, of each half.
    #[inline(always)]
    fn num_strips(&self) -> usize {
        self.weight.strips().len() / if self.is_gated { 2 } else { 1 }
    }

    /// The strip that a thread will probably compute after `strip` of an item: the next one there, or the
    /// first of the item that comes when every other thread has taken one.
    #[inline(always)]
    fn after(&self, item: usize, strip: usize) -> usize {
        let next = match strip + 1 {
            next if next < (item + 1) * self.strips_per_item => next,
            _ => (item + self.num_threads) * self.strips_per_item,
        };
        next.min(self.num_strips() - 1)
    }
}

/// Compute a product whose parts fit each other.
fn start(
    pool: &Pool,
    input: &Input<'_>,
    weight: &Weight,
    bias: Option<&Matrix<'_>>,
    out: &MatrixMut<'_>,
    is_gated: bool,
) {
    let (x, isa) = (input.matrix(), pool.isa());
    if x.num_rows() == 0 {
        return;
    }
    let has = |way| weight.parts().iter().any(|part| Way::of(part.format(), x.dtype(), isa) == way);
    let needs = Needs { wide: has(Way::Wide), pairs: has(Way::Pairs), codes: has(Way::Int8) };
    Forms::of(pool, input, needs, |forms| {
        let num_strips = weight.strips().len() / if is_gated { 2 } else { 1 };
        // A few items a thread, so that one that comes late or is slow costs little.
        let strips_per_item = num_strips.div_ceil(8 * pool.num_threads()).max(1);
        let num_threads = pool.num_threads();
        let product =
            Product { isa, x, forms, weight, bias, out, is_gated, strips_per_item, num_threads };
        let work = x.num_rows() * weight.num_rows() * weight.num_cols();
        // About 16 multiply-adds a nanosecond, twice as many of narrow numbers, and no weight faster
        // than memory brings it.
        let is_narrow = needs.codes || needs.pairs;
        let work_ns = (work / if is_narrow { 32 } else { 16 }).max(weight.num_bytes() / 16);
        pool.run(&product, num_strips.div_ceil(strips_per_item), work_ns);
    });
}

impl Kernel for Product<'_> {
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, item: usize) {
        let first = item * self.strips_per_item;
        for strip in first..self.num_strips().min(first + self.strips_per_item) {
            let next = self.after(item, strip);
            if self.is_gated {
                gated::strips(s, self, strip, next);
                continue;
            }
            let strip = self.weight.strips()[strip];
            let task = Task {
                product: self,
                strip,
                next,
                first_row: 0,
                end_row: self.x.num_rows(),
                out: self.out,
                first_col: strip.first_row,
            };
            s.call(&task, 0);
        }
    }
}

/// Some rows of a product by a strip.
struct Task<'a> {
    product: &'a Product<'a>,
    strip: Strip,
    /// The strip that probably comes next: memory is asked for it.
    next: usize,
    first_row: usize,
    end_row: usize,
    /// What its sums are stored in: `first_row` in its first row, the strip from `first_col` on. These
    /// columns of these rows are the thread's alone.
    out: &'a MatrixMut<'a>,
    first_col: usize,
}

impl Task<'_> {
    #[inline(always)]
    fn num_rows(&self) -> usize {
        self.end_row - self.first_row
    }

    #[inline(always)]
    fn part(&self) -> &Packed {
        &self.product.weight.parts()[self.strip.part]
    }

    /// Add the bias to sixteen columns of a row, counted from the task's first, from `at` of the strip on,
    /// and store them.
    ///
    /// # Safety
    ///
    /// The task has this row, and this thread has the task.
    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, s: S, row: usize, at: usize, mut sum: S::V) {
        let Strip { first_row: first, num_rows: num_cols, .. } = self.strip;
        if at >= num_cols {
            return;
        }
        let (col, len) = (self.first_col + at, num_cols - at);
        // SAFETY: `len` columns of the strip from `at` on are columns of the bias and of `out`.
        unsafe {
            if let Some(bias) = self.product.bias {
                let bias = match bias.dtype() {
                    DType::F32 => f32::load_first(s, bias.row::<f32>(0).add(first + at), len),
                    DType::Bf16 => Bf16::load_first(s, bias.row::<Bf16>(0).add(first + at), len),
                };
                sum = s.add(sum, bias);
            }
            match self.out.as_matrix().dtype() {
                DType::F32 => f32::store_first(s, self.out.row::<f32>(row).add(col), len, sum),
                DType::Bf16 => Bf16::store_first(s, self.out.row::<Bf16>(row).add(col), len, sum),
            }
        }
    }
}

impl Kernel for Task<'_> {
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, _item: usize) {
        let Forms { codes, pairs, .. } = self.product.forms;
        match (self.part().format(), codes, pairs) {
            (WeightFormat::I8, Some(codes), _) => int8::run(self, codes),
            // SAFETY: there are pairs where the pool's instruction set multiplies them.
            #[cfg(target_arch = "x86_64")]
            (WeightFormat::Bf16, _, Some(pairs)) => unsafe { bf16::run(self, pairs) },
            _ if self.num_rows() <= FEW_ROWS => few::run(s, self),
            _ => s.call(&many::Block(self), 0),
        }
    }
}
