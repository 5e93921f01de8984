//! A tile from queries to output: its ranges one by one, combined in ascending order.

use std::marker::PhantomData;
use std::sync::atomic::Ordering;

use super::Attention;
use super::cached::Cached;
use super::partial::{self, Logits, Source};
use super::scratch::{STRIDE, Scratch, Stats, scratch};
use super::work::{Item, Workspace, partial_len};
use crate::element::{Bf16, DType};
use crate::math;
use crate::simd::{Kernel, LANES, Lanes, Simd};
use crate::view::MatrixMut;

/// Most query rows of a tile.
pub(super) const MAX_ROWS: usize = 48;

/// Keys that a token sees: positions `low..high`.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Span {
    pub(super) low: usize,
    pub(super) high: usize,
}

impl Span {
    /// Those of token `token` of row `row`'s.
    #[inline(always)]
    pub(super) fn of(args: &Attention<'_>, row: usize, token: usize) -> Self {
        let num_tokens = (args.query_indptr[row + 1] - args.query_indptr[row]) as usize;
        let high = args.seq_lens[row] as usize - num_tokens + token + 1;
        let low = if args.window == 0 { 0 } else { high.saturating_sub(args.window) };
        Self { low, high }
    }

    /// Whether any of them is in range number `range`.
    #[inline(always)]
    const fn meets(self, range: usize) -> bool {
        self.low < (range + 1) * super::RANGE && self.high > range * super::RANGE
    }
}

/// The items of a call.
pub(super) struct Tiles<'a, C> {
    args: &'a Attention<'a>,
    out: &'a MatrixMut<'a>,
    work: &'a Workspace,
    partials: *mut f32,
    group: usize,
    types: PhantomData<C>,
}

// SAFETY: items write disjoint rows of `out` and disjoint parked partials; the latter are read
// only by the item that counts a split down to zero, after acquiring what the others wrote.
unsafe impl<C: Cached> Sync for Tiles<'_, C> {}

/// An item and what its rows see.
struct Tile<'a> {
    item: &'a Item,
    spans: [Span; MAX_ROWS],
}

impl<'a, C: Cached> Tiles<'a, C> {
    /// The items of `work` on `args` and `out`.
    pub(super) fn new(
        args: &'a Attention<'a>,
        out: &'a MatrixMut<'a>,
        work: &'a Workspace,
        partials: *mut f32,
    ) -> Self {
        let layout = args.kv.layout();
        let group = args.q.num_cols() / layout.head_dim / layout.num_kv_heads;
        Self { args, out, work, partials, group, types: PhantomData }
    }

    /// Zero the output of padding rows.
    pub(super) fn zero_padding(&self) {
        for row in 0..self.args.row_slots.len() {
            if self.args.seq_lens[row] == 0 {
                for token in self.args.query_indptr[row]..self.args.query_indptr[row + 1] {
                    self.out.zero_row(token as usize);
                }
            }
        }
    }

    /// Token of the call and first column of a row of the tile, in q and in out.
    #[inline(always)]
    fn place(&self, item: &Item, row: usize) -> (usize, usize) {
        let (token, head) = ((item.first + row) / self.group, (item.first + row) % self.group);
        let column = (item.head * self.group + head) * self.args.kv.layout().head_dim;
        (self.args.query_indptr[item.row] as usize + token, column)
    }

    /// Find what the rows of an item see, and load its queries.
    #[inline(always)]
    fn load<S: Simd>(&self, s: S, item: &'a Item, scratch: &mut Scratch) -> Tile<'a> {
        let mut spans = [Span::default(); MAX_ROWS];
        for (row, span) in spans.iter_mut().enumerate().take(item.count) {
            *span = Span::of(self.args, item.row, (item.first + row) / self.group);
            let to = &mut scratch.q[row];
            match self.args.q.dtype() {
                DType::F32 => self.load_row::<S, f32>(s, self.place(item, row), to),
                DType::Bf16 => self.load_row::<S, Bf16>(s, self.place(item, row), to),
            }
        }
        Tile { item, spans }
    }

    #[inline(always)]
    fn load_row<S: Simd, X: Lanes>(
        &self,
        s: S,
        (token, column): (usize, usize),
        to: &mut [f32; STRIDE],
    ) {
        let head_dim = self.args.kv.layout().head_dim;
        let q = self.args.q.row::<X>(token);
        for at in (0..head_dim).step_by(LANES) {
            // SAFETY: the head is inside the row of q; a row of scratch holds any head.
            unsafe {
                let x = X::load_first(s, q.add(column + at), head_dim - at);
                s.store(to.as_mut_ptr().add(at), x);
            }
        }
    }

    /// Where the partial of (range, row of the tile) is parked.
    #[inline(always)]
    fn parked(&self, tile: &Tile<'_>, split: usize, range: usize, row: usize) -> *mut f32 {
        let split = &self.work.splits[split];
        let index = (range - split.ranges.start) * tile.item.count + row;
        let len = partial_len(self.args.kv.layout().head_dim);
        self.partials.wrapping_add(split.partials + index * len)
    }

    /// Park the partials of `range`.
    #[inline(always)]
    fn park<S: Simd>(&self, s: S, tile: &Tile<'_>, split: usize, range: usize, from: &Scratch) {
        for row in 0..tile.item.count {
            if tile.spans[row].meets(range) {
                let to = self.parked(tile, split, range, row);
                // SAFETY: `partial_len` elements that this item alone writes.
                unsafe {
                    to.write(from.stats[row].max);
                    to.add(1).write(from.stats[row].sum);
                    for at in (0..self.args.kv.layout().head_dim).step_by(LANES) {
                        let x = s.load(from.values[row].as_ptr().add(at));
                        s.store(to.add(LANES + at), x);
                    }
                }
            }
        }
    }

    /// Combine all parked partials of the tile.
    #[inline(always)]
    fn unpark<S: Simd>(&self, s: S, tile: &Tile<'_>, split: usize, scratch: &mut Scratch) {
        let head_dim = self.args.kv.layout().head_dim;
        for range in self.work.splits[split].ranges.clone() {
            for row in 0..tile.item.count {
                if tile.spans[row].meets(range) {
                    let from = self.parked(tile, split, range, row);
                    // SAFETY: parked by an item that is done.
                    unsafe {
                        let stats = Stats { max: from.read(), sum: from.add(1).read() };
                        let total = (&mut scratch.total[row], &mut scratch.total_stats[row]);
                        combine(s, head_dim, stats, from.add(LANES), total);
                    }
                }
            }
        }
    }

    /// Divide by the sums and write the output.
    #[inline(always)]
    fn finish<S: Simd>(&self, s: S, tile: &Tile<'_>, scratch: &Scratch) {
        for row in 0..tile.item.count {
            let inverse = 1.0 / scratch.total_stats[row].sum;
            let (from, place) = (&scratch.total[row], self.place(tile.item, row));
            match self.args.q.dtype() {
                DType::F32 => self.finish_row::<S, f32>(s, from, inverse, place),
                DType::Bf16 => self.finish_row::<S, Bf16>(s, from, inverse, place),
            }
        }
    }

    #[inline(always)]
    fn finish_row<S: Simd, X: Lanes>(
        &self,
        s: S,
        from: &[f32; STRIDE],
        inverse: f32,
        (token, column): (usize, usize),
    ) {
        let head_dim = self.args.kv.layout().head_dim;
        let out = self.out.row::<X>(token);
        for at in (0..head_dim).step_by(LANES) {
            // SAFETY: a head of a row of `out`, which this item alone writes.
            unsafe {
                let x = s.mul(s.load(from.as_ptr().add(at)), s.splat(inverse));
                X::store_first(s, out.add(column + at), head_dim - at, x);
            }
        }
    }
}

impl<C: Cached> Kernel for Tiles<'_, C> {
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, index: usize) {
        let item = &self.work.items[index];
        let args = self.args;
        let layout = args.kv.layout();
        // SAFETY: kernels do not nest, so this is the only use of the thread's scratch.
        let scratch = unsafe { &mut *scratch() };
        let tile = self.load(s, item, scratch);
        let spans = &tile.spans[..item.count];
        let slot = args.row_slots[item.row] as usize;
        let source = Source::<C> {
            base: args.kv.base::<C>(),
            layout,
            table: &args.block_tables[slot * args.max_blocks..][..args.max_blocks],
            head: item.head,
        };
        let logits = Logits { scale: args.scale, softcap: args.softcap };
        clear(s, layout.head_dim, item.count, scratch);
        for range in item.ranges.clone() {
            // SAFETY: `load` filled in the queries; the tables were checked.
            unsafe { partial::compute(s, &source, spans, logits, scratch, range) };
            if let Some(split) = item.split {
                self.park(s, &tile, split, range, scratch);
                continue;
            }
            for (row, span) in spans.iter().enumerate() {
                if span.meets(range) {
                    let (stats, values) = (scratch.stats[row], scratch.values[row].as_ptr());
                    let total = (&mut scratch.total[row], &mut scratch.total_stats[row]);
                    // SAFETY: a row of scratch holds any head, rounded up to whole vectors.
                    unsafe { combine(s, layout.head_dim, stats, values, total) };
                }
            }
        }
        if let Some(split) = item.split {
            if self.work.splits[split].num_left.fetch_sub(1, Ordering::AcqRel) > 1 {
                return;
            }
            self.unpark(s, &tile, split, scratch);
        }
        self.finish(s, &tile, scratch);
    }
}

/// Start the totals of `count` rows.
#[inline(always)]
fn clear<S: Simd>(s: S, head_dim: usize, count: usize, scratch: &mut Scratch) {
    for row in 0..count {
        scratch.total_stats[row] = Stats::EMPTY;
        for at in (0..head_dim).step_by(LANES) {
            // SAFETY: a row of scratch holds any head, rounded up to whole vectors.
            unsafe { s.store(scratch.total[row].as_mut_ptr().add(at), s.splat(0.0)) };
        }
    }
}

/// Add a partial to a total.
///
/// # Safety
///
/// `values` has `head_dim` elements, rounded up to whole vectors.
#[inline(always)]
unsafe fn combine<S: Simd>(
    s: S,
    head_dim: usize,
    stats: Stats,
    values: *const f32,
    (total, total_stats): (&mut [f32; STRIDE], &mut Stats),
) {
    let old = *total_stats;
    let max = if old.max > stats.max { old.max } else { stats.max };
    let mut factors = [0.0; LANES];
    let maxima = s.select(1, s.splat(old.max), s.splat(stats.max));
    let x = math::exp2(s, s.sub(maxima, s.splat(max)));
    // SAFETY: an array of sixteen.
    unsafe { s.store(factors.as_mut_ptr(), x) };
    let [keep, take, ..] = factors;
    *total_stats = Stats { max, sum: old.sum * keep + stats.sum * take };
    let total = total.as_mut_ptr();
    for at in (0..head_dim).step_by(LANES) {
        // SAFETY: the caller's promise for `values`; a row of scratch holds any head.
        unsafe {
            let kept = s.mul(s.load(total.add(at)), s.splat(keep));
            s.store(total.add(at), s.fma(s.load(values.add(at)), s.splat(take), kept));
        }
    }
}
