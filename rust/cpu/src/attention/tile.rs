//! A tile from queries to output: its ranges one by one, combined in ascending order.

use std::marker::PhantomData;
use std::sync::atomic::Ordering;

use super::cached::Cached;
use super::partial::{self, Logits, Source, Weights};
use super::scratch::{STRIDE, Scratch, Stats, scratch};
use super::work::{Item, Split, Workspace, partial_len};
use super::{Attention, RANGE};
use crate::element::{Bf16, DType};
use crate::isa::Isa;
use crate::math;
use crate::simd::{Kernel, LANES, Lanes, Pair, Simd};
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

/// Some items of a call.
pub(super) struct Tiles<'a, C> {
    args: &'a Attention<'a>,
    out: &'a MatrixMut<'a>,
    items: &'a [Item],
    splits: &'a [Split],
    partials: *mut f32,
    group: usize,
    weights: Weights,
    types: PhantomData<C>,
}

// SAFETY: items write disjoint rows of `out` and disjoint parked partials; the latter are read
// only by the item that counts a split down to zero, after acquiring what the others wrote. Totals
// that a tile goes on from are of items of an earlier call of the pool.
unsafe impl<C: Cached> Sync for Tiles<'_, C> {}

impl<'a, C: Cached> Tiles<'a, C> {
    /// `items`, all stacks of `work` or all of its other items, on `args` and `out`.
    pub(super) fn new(
        args: &'a Attention<'a>,
        out: &'a MatrixMut<'a>,
        items: &'a [Item],
        work: &'a Workspace,
        partials: *mut f32,
        isa: Isa,
    ) -> Self {
        let layout = args.kv.layout();
        let group = args.q.num_cols() / layout.head_dim / layout.num_kv_heads;
        let weights = match args.q.dtype() {
            DType::Bf16 if C::IS_PAIRED && isa == Isa::Avx512Bf16 => Weights::Pairs,
            DType::Bf16 if C::IS_PAIRED => Weights::Narrow,
            _ => Weights::Wide,
        };
        let splits = &work.splits;
        Self { args, out, items, splits, partials, group, weights, types: PhantomData }
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

    /// What each query row of an item sees. Rows that are stacked all see the ranges of their tile.
    #[inline(always)]
    fn spans(&self, item: &Item) -> [Span; MAX_ROWS] {
        let end = item.split.map_or(item.ranges.end, |split| self.splits[split].ranges.end);
        let mut spans = [Span { low: 0, high: end * RANGE }; MAX_ROWS];
        if item.num_stacked == 1 {
            for (index, span) in spans.iter_mut().enumerate().take(item.per_row) {
                *span = self.span(item.row, item.first + index);
            }
        }
        spans
    }

    /// Load the queries of an item, in the form that they are multiplied in.
    #[inline(always)]
    fn load<S: Simd>(&self, s: S, item: &Item, scratch: &mut Scratch) {
        if self.weights == Weights::Pairs {
            return self.load_pairs(item, scratch);
        }
        for (index, to) in scratch.q.iter_mut().enumerate().take(item.count()) {
            match self.args.q.dtype() {
                DType::F32 => self.load_row::<S, f32>(s, self.place(item, index), to),
                DType::Bf16 => self.load_row::<S, Bf16>(s, self.place(item, index), to),
            }
        }
    }

    fn load_pairs(&self, item: &Item, scratch: &mut Scratch) {
        let num_pairs = self.args.kv.layout().head_dim / 2;
        for (index, to) in scratch.q_pairs.iter_mut().enumerate().take(item.count()) {
            let (token, column) = self.place(item, index);
            let q: *const Pair = self.args.q.row::<Bf16>(token).wrapping_add(column).cast();
            // SAFETY: the head is inside the row of q, and its size is even.
            let q = unsafe { std::slice::from_raw_parts(q, num_pairs) };
            for (to, &[first, second]) in to.iter_mut().zip(q) {
                *to = [second, first];
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

    /// Where partial number `index` from `start` on is parked.
    #[inline(always)]
    fn parked(&self, start: usize, index: usize) -> *mut f32 {
        self.partials.wrapping_add(start + index * partial_len(self.args.kv.layout().head_dim))
    }

    /// Where the partials of `range` of a tile of `count` query rows are parked.
    #[inline(always)]
    fn parked_range(&self, split: &Split, count: usize, range: usize) -> usize {
        let index = (range - split.ranges.start) * count;
        split.partials + index * partial_len(self.args.kv.layout().head_dim)
    }

    /// Park one partial, or one total.
    ///
    /// # Safety
    ///
    /// `partial_len` elements at `to` are this item's alone.
    #[inline(always)]
    unsafe fn park<S: Simd>(&self, s: S, to: *mut f32, stats: Stats, values: &[f32; STRIDE]) {
        // SAFETY: the caller's promise; a row of scratch holds any head.
        unsafe {
            to.write(stats.max);
            to.add(1).write(stats.sum);
            for at in (0..self.args.kv.layout().head_dim).step_by(LANES) {
                s.store(to.add(LANES + at), s.load(values.as_ptr().add(at)));
            }
        }
    }

    /// Start the totals of an item's tile: of no keys, or of those that its rows' stack has seen.
    #[inline(always)]
    fn start<S: Simd>(&self, s: S, item: &Item, scratch: &mut Scratch) {
        let head_dim = self.args.kv.layout().head_dim;
        let Some(from) = item.goes_on_from else {
            return clear(s, head_dim, item.count(), scratch);
        };
        for index in 0..item.count() {
            let from = self.parked(from, index);
            // SAFETY: parked by a stack, all of which are done.
            unsafe {
                scratch.total_stats[index] = Stats { max: from.read(), sum: from.add(1).read() };
                for at in (0..head_dim).step_by(LANES) {
                    let x = s.load(from.add(LANES + at));
                    s.store(scratch.total[index].as_mut_ptr().add(at), x);
                }
            }
        }
    }

    /// Combine all parked partials of a tile that was split.
    #[inline(always)]
    fn unpark<S: Simd>(&self, s: S, split: &Split, spans: &[Span], scratch: &mut Scratch) {
        let head_dim = self.args.kv.layout().head_dim;
        for range in split.ranges.clone() {
            let start = self.parked_range(split, spans.len(), range);
            for (index, span) in spans.iter().enumerate() {
                if span.meets(range) {
                    let from = self.parked(start, index);
                    // SAFETY: parked by an item that is done.
                    unsafe {
                        let stats = Stats { max: from.read(), sum: from.add(1).read() };
                        let total = (&mut scratch.total[index], &mut scratch.total_stats[index]);
                        combine(s, head_dim, stats, from.add(LANES), total);
                    }
                }
            }
        }
    }

    /// Park the totals, or divide them by the sums and write the output.
    #[inline(always)]
    fn finish<S: Simd>(&self, s: S, item: &Item, scratch: &Scratch) {
        for index in 0..item.count() {
            let (from, stats) = (&scratch.total[index], scratch.total_stats[index]);
            if let Some(at) = item.parks_at {
                // SAFETY: the tile's own, and this is its last item.
                unsafe { self.park(s, self.parked(at, index), stats, from) };
                continue;
            }
            let (inverse, place) = (1.0 / stats.sum, self.place(item, index));
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
        let item = &self.items[index];
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
        let split = item.split.map(|split| &self.splits[split]);
        if split.is_none() {
            self.start(s, item, scratch);
        }
        for range in item.ranges.clone() {
            // SAFETY: `load` filled in the queries; the tables were checked.
            unsafe { partial::compute(s, &source, spans, logits, self.weights, scratch, range) };
            let start = split.map(|split| self.parked_range(split, item.count(), range));
            for (row, span) in spans.iter().enumerate() {
                if !span.meets(range) {
                    continue;
                }
                let stats = scratch.stats[row];
                // SAFETY: the partial is this item's to park; a row of scratch holds any head, rounded
                // up to whole vectors.
                unsafe {
                    if let Some(start) = start {
                        self.park(s, self.parked(start, row), stats, &scratch.values[row]);
                    } else {
                        let values = scratch.values[row].as_ptr();
                        let total = (&mut scratch.total[row], &mut scratch.total_stats[row]);
                        combine(s, layout.head_dim, stats, values, total);
                    }
                }
            }
        }
        if let Some(split) = split {
            if split.num_left.fetch_sub(1, Ordering::AcqRel) > 1 {
                return;
            }
            self.start(s, item, scratch);
            self.unpark(s, split, spans, scratch);
        }
        self.finish(s, item, scratch);
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
