//! Many rows: a piece of K of a strip is made `f32` and stays in the cache while all rows use it.
//!
//! Rows come in blocks, so that their piece of `x` stays in the second-level cache too. Between pieces
//! the totals are in memory, where they keep their bits.

use std::cell::UnsafeCell;

use super::stored::{FOUR, ForFormat, Plain, Stored, for_format};
use super::tile::{Groups, tile};
use super::weight::{PANELS_PER_STRIP, Packed};
use super::{PIECE, Product, few};
use crate::element::Bf16;
use crate::simd::{Grid, Kernel, LANES, Simd};
use crate::view::Matrix;

/// Rows of a block: their piece of `x` is 96 KiB.
const BLOCK_ROWS: usize = 192;

/// Columns of a strip.
const STRIP: usize = PANELS_PER_STRIP * LANES;

/// A thread's working memory: half of a small second-level cache.
struct Scratch {
    /// A piece of each panel of a strip.
    panels: Box<[[[f32; LANES]; PIECE]]>,
    /// `[row][column]` of a block of rows by a strip.
    sums: Box<[[f32; STRIP]]>,
}

impl Scratch {
    fn new() -> Self {
        Self {
            panels: vec![[[0.0; LANES]; PIECE]; PANELS_PER_STRIP].into_boxed_slice(),
            sums: vec![[0.0; STRIP]; BLOCK_ROWS].into_boxed_slice(),
        }
    }
}

thread_local! {
    static SCRATCH: UnsafeCell<Scratch> = UnsafeCell::new(Scratch::new());
    static WIDE: UnsafeCell<Vec<f32>> = const { UnsafeCell::new(Vec::new()) };
}

/// Lend `body` a copy of `x`, which is bfloat16, as `f32`.
pub(super) fn with_wide(x: &Matrix<'_>, body: impl FnOnce(&Matrix<'_>)) {
    WIDE.with(|cell| {
        // SAFETY: the only use, and `body` (a product) does not come here again.
        let wide = unsafe { &mut *cell.get() };
        let (num_rows, num_cols) = (x.num_rows(), x.num_cols());
        wide.clear();
        for row in 0..num_rows {
            // SAFETY: a row of the view.
            let row = unsafe { std::slice::from_raw_parts(x.row::<Bf16>(row), num_cols) };
            wide.extend(row.iter().map(|value| value.to_f32()));
        }
        body(&Matrix::f32(wide, num_cols));
    });
}

/// A strip of a product.
pub(super) struct Strip<'a>(pub(super) &'a Product<'a>);

impl Kernel for Strip<'_> {
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, strip: usize) {
        let product = self.0;
        let strip = product.weight.strips()[strip];
        let part = &product.weight.parts()[strip.part];
        let (num_rows, len) = (product.x.num_rows(), product.x.num_cols());
        // SAFETY: this thread's own, and nothing below asks for it again.
        let scratch = unsafe { &mut *SCRATCH.with(UnsafeCell::get) };
        for first in (0..num_rows).step_by(BLOCK_ROWS) {
            let block = BLOCK_ROWS.min(num_rows - first);
            for sums in &mut scratch.sums[..block] {
                *sums = [0.0; STRIP];
            }
            for start in (0..len).step_by(PIECE) {
                let count = PIECE.min(len - start);
                for panel in 0..strip.num_panels {
                    widen(
                        s,
                        part,
                        strip.first_panel + panel,
                        start,
                        count,
                        &mut scratch.panels[panel],
                    );
                }
                let piece = Piece {
                    product,
                    first,
                    block,
                    start,
                    count,
                    panels: &scratch.panels[..strip.num_panels],
                    sums: scratch.sums.as_mut_ptr(),
                };
                s.cover(&piece, block, strip.num_panels);
            }
            for (row, sums) in scratch.sums[..block].iter().enumerate() {
                for at in (0..strip.num_panels * LANES).step_by(LANES) {
                    // SAFETY: sixteen of a row of sums; this strip's columns are this thread's alone.
                    unsafe {
                        let sum = s.load(sums.as_ptr().add(at));
                        few::finish(s, product, first + row, strip, at, sum);
                    }
                }
            }
        }
    }
}

/// Call `body` with every piece of a panel, and the position where it starts. It sees numbers only, no
/// vectors, so it may be a closure.
#[inline(always)]
pub(super) fn each_piece<S: Simd>(
    s: S,
    part: &Packed,
    panel: usize,
    body: impl Fn(usize, &[[f32; LANES]]),
) {
    // SAFETY: this thread's own, and `body` does not ask for it again.
    let scratch = unsafe { &mut *SCRATCH.with(UnsafeCell::get) };
    for start in (0..part.num_cols()).step_by(PIECE) {
        let count = PIECE.min(part.num_cols() - start);
        widen(s, part, panel, start, count, &mut scratch.panels[0]);
        body(start, &scratch.panels[0][..count]);
    }
}

/// Positions `start..start + count` of a panel as `f32`.
#[inline(always)]
fn widen<S: Simd>(
    s: S,
    part: &Packed,
    panel: usize,
    start: usize,
    count: usize,
    to: &mut [[f32; LANES]; PIECE],
) {
    let to = to.as_mut_ptr().cast();
    for_format(s, part.format(), &Widen { panel: part.panel(panel), start, count, to });
}

struct Widen {
    panel: *const u8,
    start: usize,
    count: usize,
    to: *mut f32,
}

impl ForFormat for Widen {
    #[inline(always)]
    fn run<S: Simd, W: Stored>(&self, s: S) {
        let groups = self.start / W::GROUP..(self.start + self.count).div_ceil(W::GROUP);
        let mut to = self.to;
        for group in groups {
            // SAFETY: the panel has whole groups, filled up with zeros, and `to` has room for as many
            // since a piece is whole groups too.
            unsafe {
                let (scales, numbers) = W::open(s, self.panel, group);
                for at in 0..W::GROUP / FOUR {
                    for number in W::four(s, scales, numbers, at) {
                        s.store(to, number);
                        to = to.add(LANES);
                    }
                }
            }
        }
    }
}

/// A block of rows by a piece of a strip.
struct Piece<'a> {
    product: &'a Product<'a>,
    first: usize,
    block: usize,
    start: usize,
    count: usize,
    panels: &'a [[[f32; LANES]; PIECE]],
    /// [`BLOCK_ROWS`] rows of [`STRIP`].
    sums: *mut [f32; STRIP],
}

impl Grid for Piece<'_> {
    #[inline(always)]
    fn tile<S: Simd, const R: usize, const P: usize>(&self, s: S, row: usize, panel: usize) {
        let mut rows = [std::ptr::null(); R];
        let mut panels = [std::ptr::null(); P];
        let mut tiles = [[s.splat(0.0); P]; R];
        for (p, to) in panels.iter_mut().enumerate() {
            *to = self.panels[panel + p].as_ptr().cast();
        }
        for (r, to) in rows.iter_mut().enumerate() {
            // Where there are fewer rows than the tile has, the last is computed again.
            let row = (row + r).min(self.block - 1);
            *to = self.product.x.row::<f32>(self.first + row).wrapping_add(self.start);
        }
        let groups = Groups::between::<Plain<f32>>(0, self.count);
        // SAFETY: rows of x have `count` numbers from `start` on, and the pieces as many positions.
        unsafe { tile::<S, Plain<f32>, R, P>(s, rows, panels, groups, &mut tiles) };
        for (row, tiles) in (row..self.block).zip(&tiles) {
            for (p, &sum) in tiles.iter().enumerate() {
                let total = self.sums_at(row, panel + p);
                // SAFETY: sixteen of a row of sums, which is this thread's alone.
                unsafe { s.store(total, s.add(s.load(total), sum)) };
            }
        }
    }
}

impl Piece<'_> {
    /// Sixteen sums.
    #[inline(always)]
    fn sums_at(&self, row: usize, panel: usize) -> *mut f32 {
        assert!(row < BLOCK_ROWS && panel < PANELS_PER_STRIP);
        self.sums.wrapping_add(row).cast::<f32>().wrapping_add(panel * LANES)
    }
}
