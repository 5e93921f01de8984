//! Few rows: straight from the stored weights, once through memory.

use std::marker::PhantomData;

use super::stored::{ForFormat, Stored, for_format};
use super::tile::{Groups, tile};
use super::weight::Strip;
use super::{PIECE, Product};
use crate::element::{Bf16, DType};
use crate::simd::{Grid, Kernel, LANES, Lanes, Simd};

/// One strip, whatever it is stored as. Each format is a function of its own.
#[inline(always)]
pub(super) fn strip<S: Simd>(s: S, product: &Product<'_>, strip: usize) {
    let part = product.weight.strips()[strip].part;
    for_format(s, product.weight.parts()[part].format(), &Call { product, strip });
}

struct Call<'a> {
    product: &'a Product<'a>,
    strip: usize,
}

impl ForFormat for Call<'_> {
    #[inline(always)]
    fn run<S: Simd, W: Stored>(&self, s: S) {
        s.call(&Few::<W> { product: self.product, format: PhantomData }, self.strip);
    }
}

struct Few<'a, W> {
    product: &'a Product<'a>,
    format: PhantomData<fn() -> W>,
}

impl<W: Stored> Kernel for Few<'_, W> {
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, strip: usize) {
        let strip = self.product.weight.strips()[strip];
        let grid = Rows::<W> { product: self.product, strip, format: PhantomData };
        s.cover_few(&grid, self.product.x.num_rows(), strip.num_panels);
    }
}

/// All rows by a strip.
struct Rows<'a, W> {
    product: &'a Product<'a>,
    strip: Strip,
    format: PhantomData<fn() -> W>,
}

impl<W: Stored> Grid for Rows<'_, W> {
    #[inline(always)]
    fn tile<S: Simd, const R: usize, const P: usize>(&self, s: S, row: usize, panel: usize) {
        let (x, weight, strip) = (self.product.forms.wide, self.product.weight, self.strip);
        let (num_rows, len) = (x.num_rows(), x.num_cols());
        // Where there are fewer rows than the tile has, the last is computed again.
        let mut rows = [x.row::<f32>(row); R];
        for (r, to) in rows.iter_mut().enumerate() {
            *to = x.row((row + r).min(num_rows - 1));
        }
        let part = &weight.parts()[strip.part];
        let mut panels = [part.panel(strip.first_panel + panel); P];
        for (p, to) in panels.iter_mut().enumerate() {
            *to = part.panel(strip.first_panel + panel + p);
        }
        let mut totals = [[s.splat(0.0); P]; R];
        for start in (0..len).step_by(PIECE) {
            let mut sums = [[s.splat(0.0); P]; R];
            let groups = Groups::between::<W>(start, PIECE.min(len - start));
            // SAFETY: rows of x have `len` numbers, panels of this part have as many positions.
            unsafe { tile::<S, W, R, P>(s, rows, panels, groups, &mut sums) };
            for r in 0..R {
                rows[r] = rows[r].wrapping_add(PIECE);
                for p in 0..P {
                    totals[r][p] = s.add(totals[r][p], sums[r][p]);
                }
            }
        }
        for (row, sums) in (row..num_rows).zip(&totals) {
            for (p, &sum) in sums.iter().enumerate() {
                let at = (panel + p) * LANES;
                // SAFETY: this strip's columns of the row are this thread's alone.
                unsafe { finish(s, self.product, row, strip, at, sum) };
            }
        }
    }
}

/// Add the bias to sixteen columns of a row, from `at` of the strip on, and store them.
///
/// # Safety
///
/// No other thread has these columns.
#[inline(always)]
pub(super) unsafe fn finish<S: Simd>(
    s: S,
    product: &Product<'_>,
    row: usize,
    strip: Strip,
    at: usize,
    mut sum: S::V,
) {
    if at >= strip.num_rows {
        return;
    }
    let (col, len) = (strip.first_row + at, strip.num_rows - at);
    // SAFETY: `len` columns of the strip from `col` on are columns of the result and of the bias.
    unsafe {
        if let Some(bias) = product.bias {
            let bias = match bias.dtype() {
                DType::F32 => f32::load_first(s, bias.row::<f32>(0).add(col), len),
                DType::Bf16 => Bf16::load_first(s, bias.row::<Bf16>(0).add(col), len),
            };
            sum = s.add(sum, bias);
        }
        match product.out.as_matrix().dtype() {
            DType::F32 => f32::store_first(s, product.out.row::<f32>(row).add(col), len, sum),
            DType::Bf16 => Bf16::store_first(s, product.out.row::<Bf16>(row).add(col), len, sum),
        }
    }
}
