//! Many rows: a piece of K of a strip is made `f32` and stays in the cache while all rows use it. It is
//! read as it is stored where it is `f32`, or bfloat16 and rows are few.
//!
//! Rows come in blocks, so that their piece of `x` stays in the second-level cache too. Between pieces
//! the totals are in memory, where they keep their bits.
//!
//! Making a piece `f32` waits for memory, and computing with it does not use any: so while a piece is
//! computed the next one is asked for, a few lines a tile.

use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;

use super::stored::{FOUR, ForFormat, Pairs, Plain, Stored, for_format};
use super::tile::{Groups, tile};
use super::weight::{LINE, PANELS_PER_STRIP, Packed, WeightFormat};
use super::{PIECE, Task};
use crate::simd::{Grid, Kernel, LANES, Lanes, Simd};

/// Rows of a block: their piece of `x` is 96 KiB.
const BLOCK_ROWS: usize = 192;

/// Columns of a strip.
const STRIP: usize = PANELS_PER_STRIP * LANES;

/// Rows of `x` whose distance in bytes is near a multiple of this fall on the same few sets of a
/// first-level cache, and push each other out.
const SET_PERIOD: usize = 4096;

/// How near: four sets.
const SET_NEAR: usize = 256;

/// Fewest rows of a block for which the next piece is asked for.
const FEWEST_AHEAD: usize = 16;

/// Most rows of a block for which bfloat16 is made `f32` in every tile, and not once for all.
const MOST_FOR_PAIRS: usize = 24;

/// Numbers from a row of a piece of `x` to the next, where it is copied.
const ROW: usize = PIECE + LANES;

/// A thread's working memory: half of a small second-level cache.
struct Scratch {
    /// A piece of each panel of a strip.
    panels: Box<[[[f32; LANES]; PIECE]]>,
    /// `[row][column]` of a block of rows by a strip.
    sums: Box<[[f32; STRIP]]>,
    /// A piece of a block of `x`, where its own rows lie badly.
    rows: Box<[[f32; ROW]]>,
}

impl Scratch {
    fn new() -> Self {
        Self {
            panels: vec![[[0.0; LANES]; PIECE]; PANELS_PER_STRIP].into_boxed_slice(),
            sums: vec![[0.0; STRIP]; BLOCK_ROWS].into_boxed_slice(),
            rows: vec![[0.0; ROW]; BLOCK_ROWS].into_boxed_slice(),
        }
    }
}

thread_local! {
    static SCRATCH: UnsafeCell<Scratch> = UnsafeCell::new(Scratch::new());
}

/// How tiles read a piece of a strip.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// As it is stored, in `f32`.
    Plain,
    /// As it is stored, in bfloat16.
    Pairs,
    /// Made `f32` before.
    Widened,
}

impl Way {
    #[inline(always)]
    fn of(format: WeightFormat, num_rows: usize) -> Self {
        match format {
            WeightFormat::F32 | WeightFormat::F16 => Self::Plain,
            WeightFormat::Bf16 if num_rows <= MOST_FOR_PAIRS => Self::Pairs,
            _ => Self::Widened,
        }
    }
}

/// A task of more than a few rows.
pub(super) struct Block<'a>(pub(super) &'a Task<'a>);

impl Kernel for Block<'_> {
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, _item: usize) {
        let task = self.0;
        let (strip, part, x) = (task.strip, task.part(), &task.product.forms.wide);
        let (num_rows, len, stride) = (task.num_rows(), x.num_cols(), x.row_stride());
        let collides = (size_of::<f32>() * stride + SET_NEAR) % SET_PERIOD < 2 * SET_NEAR;
        // SAFETY: this thread's own, and nothing below asks for it again.
        let scratch = unsafe { &mut *SCRATCH.with(UnsafeCell::get) };
        for first in (0..num_rows).step_by(BLOCK_ROWS) {
            let block = BLOCK_ROWS.min(num_rows - first);
            for sums in &mut scratch.sums[..block] {
                *sums = [0.0; STRIP];
            }
            for start in (0..len).step_by(PIECE) {
                let count = PIECE.min(len - start);
                let way = Way::of(part.format(), block);
                let mut panels = [std::ptr::null(); PANELS_PER_STRIP];
                for (panel, to) in panels[..strip.num_panels].iter_mut().enumerate() {
                    let (from, wide) = (strip.first_panel + panel, &mut scratch.panels[panel]);
                    *to = if way == Way::Widened {
                        widen(s, part, from, start, count, wide);
                        wide.as_ptr().cast()
                    } else {
                        part.panel(from)
                    };
                }
                let first_row = x.row::<f32>(task.first_row + first);
                let (mut x, mut row_len) = (first_row.wrapping_add(start), stride);
                if collides {
                    // SAFETY: `block` rows of `x` have `count` numbers there, and scratch has room.
                    unsafe { copy_rows(s, x, stride, count, &mut scratch.rows[..block]) };
                    (x, row_len) = (scratch.rows.as_ptr().cast(), ROW);
                }
                let piece = Piece {
                    x,
                    row_len,
                    block,
                    start: if way == Way::Widened { 0 } else { start },
                    count,
                    panels,
                    sums: scratch.sums.as_mut_ptr(),
                    ahead: Ahead::of(task, start + PIECE, block),
                };
                match way {
                    Way::Plain | Way::Widened => {
                        s.cover(&Of::<Plain>::new(&piece), block, strip.num_panels);
                    }
                    Way::Pairs => s.cover(&Of::<Pairs>::new(&piece), block, strip.num_panels),
                }
            }
            for (row, sums) in scratch.sums[..block].iter().enumerate() {
                for at in (0..strip.num_panels * LANES).step_by(LANES) {
                    // SAFETY: sixteen of a row of sums; a row of the task, which is this thread's.
                    unsafe {
                        let sum = s.load(sums.as_ptr().add(at));
                        task.finish(s, first + row, at, sum);
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

/// Copy `count` numbers, at most a piece, of each row from `x` on; rows are `stride` apart.
///
/// # Safety
///
/// They are readable.
#[inline(always)]
unsafe fn copy_rows<S: Simd>(
    s: S,
    x: *const f32,
    stride: usize,
    count: usize,
    to: &mut [[f32; ROW]],
) {
    for (row, to) in to.iter_mut().enumerate() {
        let from = x.wrapping_add(row * stride);
        for at in (0..count).step_by(LANES) {
            // SAFETY: the caller's promise: lanes past `count` are not read.
            unsafe {
                let numbers = f32::load_first(s, from.add(at), count - at);
                s.store(to.as_mut_ptr().add(at), numbers);
            }
        }
    }
}

/// What a piece asks of memory: the weights of the next one.
struct Ahead {
    panels: [*const u8; PANELS_PER_STRIP],
    num_panels: usize,
    num_bytes: usize,
    bytes_per_tile: usize,
    /// Panel and byte that come next.
    next: Cell<(usize, usize)>,
}

impl Ahead {
    /// Of the piece that starts at `start`, or of the strip that comes next after the last; `block` rows
    /// are computed meanwhile.
    #[inline(always)]
    fn of(task: &Task<'_>, start: usize, block: usize) -> Self {
        let weight = task.product.weight;
        let (strip, start) = match start {
            _ if start < weight.num_cols() => (task.strip, start),
            _ => (weight.strips()[task.next], 0),
        };
        let part = &weight.parts()[strip.part];
        // With few rows the memory is the limit, and asks for itself as early.
        let num_panels = if block < FEWEST_AHEAD { 0 } else { strip.num_panels };
        let mut panels = [std::ptr::null(); PANELS_PER_STRIP];
        for (panel, to) in panels[..num_panels].iter_mut().enumerate() {
            *to = part.panel(strip.first_panel + panel).wrapping_add(part.bytes_before(start));
        }
        let num_bytes = part.bytes_before(PIECE);
        // Tiles have up to twelve rows, most often six.
        let bytes_per_tile = (num_bytes * 12 / block).next_multiple_of(LINE);
        Self { panels, num_panels, num_bytes, bytes_per_tile, next: Cell::new((0, 0)) }
    }

    /// Ask for some lines.
    #[inline(always)]
    fn fetch<S: Simd>(&self, s: S) {
        let (panel, at) = self.next.get();
        if panel >= self.num_panels {
            return;
        }
        let end = at + self.bytes_per_tile;
        for at in (at..end.min(self.num_bytes)).step_by(LINE) {
            s.prefetch(self.panels[panel].wrapping_add(at));
        }
        self.next.set(if end < self.num_bytes { (panel, end) } else { (panel + 1, 0) });
    }
}

/// A block of rows by a piece of a strip.
struct Piece {
    /// The first row of the block, at the piece.
    x: *const f32,
    /// Numbers from a row to the next.
    row_len: usize,
    block: usize,
    count: usize,
    /// Panels of the strip, which have the piece from position `start` on.
    panels: [*const u8; PANELS_PER_STRIP],
    start: usize,
    /// [`BLOCK_ROWS`] rows of [`STRIP`].
    sums: *mut [f32; STRIP],
    ahead: Ahead,
}

/// A piece whose panels are stored as `W`.
struct Of<'a, W> {
    piece: &'a Piece,
    format: PhantomData<fn() -> W>,
}

impl<'a, W> Of<'a, W> {
    fn new(piece: &'a Piece) -> Self {
        Self { piece, format: PhantomData }
    }
}

impl<W: Stored> Grid for Of<'_, W> {
    #[inline(always)]
    fn tile<S: Simd, const R: usize, const P: usize>(&self, s: S, row: usize, panel: usize) {
        let piece = self.piece;
        let mut rows = [std::ptr::null(); R];
        let mut panels = [std::ptr::null(); P];
        let mut tiles = [[s.splat(0.0); P]; R];
        panels.copy_from_slice(&piece.panels[panel..panel + P]);
        for (r, to) in rows.iter_mut().enumerate() {
            // Where there are fewer rows than the tile has, the last is computed again.
            let row = (row + r).min(piece.block - 1);
            *to = piece.x.wrapping_add(row * piece.row_len);
        }
        piece.ahead.fetch(s);
        let groups = Groups::between::<W>(piece.start, piece.count);
        // SAFETY: rows of x have `count` numbers from the piece's start on, and the panels as many
        // positions, from `start` on.
        unsafe { tile::<S, W, R, P>(s, rows, panels, groups, &mut tiles) };
        for (row, tiles) in (row..piece.block).zip(&tiles) {
            for (p, &sum) in tiles.iter().enumerate() {
                let total = piece.sums_at(row, panel + p);
                // SAFETY: sixteen of a row of sums, which is this thread's alone.
                unsafe { s.store(total, s.add(s.load(total), sum)) };
            }
        }
    }
}

impl Piece {
    /// Sixteen sums.
    #[inline(always)]
    fn sums_at(&self, row: usize, panel: usize) -> *mut f32 {
        assert!(row < BLOCK_ROWS && panel < PANELS_PER_STRIP);
        self.sums.wrapping_add(row).cast::<f32>().wrapping_add(panel * LANES)
    }
}
