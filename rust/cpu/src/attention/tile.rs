//! A tile from queries to output: its ranges one by one, combined in ascending order.

use std::marker::PhantomData;
use std::sync::atomic::Ordering;

use super::cached::Cached;
use super::partial::{self, Logits, Source};
use super::scratch::{STRIDE, Scratch, Stats, scratch};
use super::work::{Item, Workspace, partial_len};
use super::{Attention, RANGE};
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
        self.low < (range + 1) * RANGE && self.high > range * RANGE
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

    /// Token of the call and first column of a query row of the item, in q and in out.
    #[inline(always)]
    fn place(&self, item: &Item, index: usize) -> (usize, usize) {
        let row = item.row + index / item.per_row;
        let query = item.first + index % item.per_row;
        let (token, head) = (query / self.group, query % self.group);
        let column = (item.head * self.group + head) * self.args.kv.layout().head_dim;
        (self.args.query_indptr[row] as usize + token, column)
    }

    /// What query row `query` of row `row` sees.
    #[inline(always)]
    fn span(&self, row: usize, query: usize) -> Span {
        Span::of(self.args, row, query / self.group)
    }

    /// What each query row of an item sees. Rows that are stacked all see the item's ranges.
    #[inline(always)]
    fn spans(&self, item: &Item) -> [Span; MAX_ROWS] {
        let mut spans = [Span { low: 0, high: item.ranges.end * RANGE }; MAX_ROWS];
        if item.num_stacked == 1 {
            for (index, span) in spans.iter_mut().enumerate().take(item.per_row) {
                *span = self.span(item.row, item.first + index);
            }
        }
        spans
    }

    /// Load the queries of an item.
    #[inline(always)]
    fn load<S: Simd>(&self, s: S, item: &Item, scratch: &mut Scratch) {
        for (index, to) in scratch.q.iter_mut().enumerate().take(item.count()) {
            match self.args.q.dtype() {
                DType::F32 => self.load_row::<S, f32>(s, self.place(item, index), to),
                DType::Bf16 => self.load_row::<S, Bf16>(s, self.place(item, index), to),
            }
        }
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

    /// Where the partial of (range, query row of the tile) is parked.
    #[inline(always)]
    fn parked(&self, split: usize, per_row: usize, range: usize, query: usize) -> *mut f32 {
        let split = &self.work.splits[split];
        let index = (range - split.ranges.start) * per_row + query;
        let len = partial_len(self.args.kv.layout().head_dim);
        self.partials.wrapping_add(split.partials + index * len)
    }

    /// Park the partials of `range`, each with the tile that its row is of.
    #[inline(always)]
    fn park<S: Simd>(&self, s: S, item: &Item, spans: &[Span], range: usize, from: &Scratch) {
        let first_split = item.split.expect("only parts of tiles are parked");
        for (index, span) in spans.iter().enumerate() {
            if span.meets(range) {
                let (split, query) = (first_split + index / item.per_row, index % item.per_row);
                let to = self.parked(split, item.per_row, range, query);
                // SAFETY: `partial_len` elements that this item alone writes.
                unsafe {
                    to.write(from.stats[index].max);
                    to.add(1).write(from.stats[index].sum);
                    for at in (0..self.args.kv.layout().head_dim).step_by(LANES) {
                        let x = s.load(from.values[index].as_ptr().add(at));
                        s.store(to.add(LANES + at), x);
                    }
                }
            }
        }
    }

    /// An item of tile number `split` is done, on row `row` of the call: if it was the last one,
    /// combine the tile's partials and write the output.
    #[inline(always)]
    fn done<S: Simd>(&self, s: S, item: &Item, row: usize, split: usize, scratch: &mut Scratch) {
        if self.work.splits[split].num_left.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        let head_dim = self.args.kv.layout().head_dim;
        clear(s, head_dim, item.per_row, scratch);
        for range in self.work.splits[split].ranges.clone() {
            for query in 0..item.per_row {
                if self.span(row, item.first + query).meets(range) {
                    let from = self.parked(split, item.per_row, range, query);
                    // SAFETY: parked by an item that is done.
                    unsafe {
                        let stats = Stats { max: from.read(), sum: from.add(1).read() };
                        let total = (&mut scratch.total[query], &mut scratch.total_stats[query]);
                        combine(s, head_dim, stats, from.add(LANES), total);
                    }
                }
            }
        }
        self.finish(s, item, row - item.row, scratch);
    }

    /// Divide by the sums and write the output of one row of those that are stacked.
    #[inline(always)]
    fn finish<S: Simd>(&self, s: S, item: &Item, stacked: usize, scratch: &Scratch) {
        for query in 0..item.per_row {
            let inverse = 1.0 / scratch.total_stats[query].sum;
            let from = &scratch.total[query];
            let place = self.place(item, stacked * item.per_row + query);
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
        self.load(s, item, scratch);
        let spans = self.spans(item);
        let spans = &spans[..item.count()];
        // Rows that are stacked have the same blocks in the item's ranges.
        let slot = args.row_slots[item.row] as usize;
        let source = Source::<C> {
            base: args.kv.base::<C>(),
            layout,
            table: &args.block_tables[slot * args.max_blocks..][..args.max_blocks],
            head: item.head,
        };
        let logits = Logits { scale: args.scale, softcap: args.softcap };
        if item.split.is_none() {
            clear(s, layout.head_dim, item.per_row, scratch);
        }
        for range in item.ranges.clone() {
            // SAFETY: `load` filled in the queries; the tables were checked.
            unsafe { partial::compute(s, &source, spans, logits, scratch, range) };
            if item.split.is_some() {
                self.park(s, item, spans, range, scratch);
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
        match item.split {
            None => self.finish(s, item, 0, scratch),
            Some(split) => {
                for stacked in 0..item.num_stacked {
                    self.done(s, item, item.row + stacked, split + stacked, scratch);
                }
            }
        }
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
