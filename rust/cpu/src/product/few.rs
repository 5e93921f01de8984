//! Few rows: straight from the stored weights, once through memory.

use std::marker::PhantomData;

use super::stored::{ForFormat, Stored, for_format};
use super::tile::{Groups, tile};
use super::{PIECE, Task};
use crate::simd::{Grid, Kernel, LANES, Simd};

/// A task, whatever its strip is stored as. Each format is a function of its own.
#[inline(always)]
pub(super) fn run<S: Simd>(s: S, task: &Task<'_>) {
    for_format(s, task.part().format(), &Call(task));
}

struct Call<'a>(&'a Task<'a>);

impl ForFormat for Call<'_> {
    #[inline(always)]
    fn run<S: Simd, W: Stored>(&self, s: S) {
        s.call(&Few::<W> { task: self.0, format: PhantomData }, 0);
    }
}

struct Few<'a, W> {
    task: &'a Task<'a>,
    format: PhantomData<fn() -> W>,
}

impl<W: Stored> Kernel for Few<'_, W> {
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, _item: usize) {
        s.cover_few(self, self.task.num_rows(), self.task.strip.num_panels);
    }
}

impl<W: Stored> Grid for Few<'_, W> {
    #[inline(always)]
    fn tile<S: Simd, const R: usize, const P: usize>(&self, s: S, row: usize, panel: usize) {
        let (task, x) = (self.task, &self.task.product.forms.wide);
        let (num_rows, len) = (task.num_rows(), x.num_cols());
        // Where there are fewer rows than the tile has, the last is computed again.
        let mut rows = [std::ptr::null(); R];
        for (r, to) in rows.iter_mut().enumerate() {
            *to = x.row::<f32>(task.first_row + (row + r).min(num_rows - 1));
        }
        let (part, strip) = (task.part(), task.strip);
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
                // SAFETY: a row of the task, which is this thread's.
                unsafe { task.finish(s, row, at, sum) };
            }
        }
    }
}
