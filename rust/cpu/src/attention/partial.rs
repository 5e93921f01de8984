//! One partial for each row of a tile: softmax attention over one range of keys.

use super::RANGE;
use super::cached::{Cached, OCTET};
use super::micro::{Scores, Values, max_rows};
use super::scratch::{PAIR_STRIDE, Scales, Scratch, Stats};
use super::tile::{MAX_ROWS, Span};
use crate::element::Bf16;
use crate::layout::KvLayout;
use crate::math;
use crate::simd::{LANES, Pair, Simd};

/// Keys whose tiles stay in the first-level cache while all rows pass over them.
const KEYS_PER_PASS: usize = 4 * LANES;

/// Where the keys of a tile are.
pub(super) struct Source<'a, C> {
    pub(super) base: *const C,
    pub(super) layout: &'a KvLayout,
    /// Block ids of the sequence.
    pub(super) table: &'a [i32],
    /// KV head.
    pub(super) head: usize,
}

/// How scores become logits in base 2.
#[derive(Debug, Clone, Copy)]
pub(super) struct Logits {
    /// Factor of the scores.
    pub(super) scale: f32,
    /// Cap, or 0.
    pub(super) softcap: f32,
}

/// What the weights of the values are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Weights {
    /// `f32`.
    Wide,
    /// Rounded to bfloat16.
    Narrow,
    /// The same, and everything is multiplied by pairs.
    Pairs,
}

/// Keys of a range that a row sees: `from..to`, empty where it sees none.
#[derive(Debug, Clone, Copy)]
struct Seen {
    from: usize,
    to: usize,
}

impl Seen {
    const NONE: Self = Self { from: 0, to: 0 };

    fn new(span: Span, start: usize) -> Self {
        let (from, to) = (span.low.max(start), span.high.min(start + RANGE));
        if from < to { Self { from: from - start, to: to - start } } else { Self::NONE }
    }

    const fn is_empty(self) -> bool {
        self.from >= self.to
    }

    /// What all of them see.
    fn common(all: &[Self]) -> Self {
        let from = all.iter().map(|seen| seen.from).max().unwrap_or(0);
        let to = all.iter().map(|seen| seen.to).min().unwrap_or(0);
        Self { from, to: to.max(from) }
    }

    /// What any of them sees, and what lies between.
    fn union(all: &[Self]) -> Self {
        let some = || all.iter().filter(|seen| !seen.is_empty());
        let from = some().map(|seen| seen.from).min().unwrap_or(0);
        Self { from, to: some().map(|seen| seen.to).max().unwrap_or(from) }
    }

    /// The part of it in `from..to`.
    fn within(self, from: usize, to: usize) -> Self {
        let from = self.from.max(from);
        Self { from, to: self.to.min(to).max(from) }
    }
}

/// Compute the partials of range number `range` for the rows with `spans`, into `scratch.values`
/// and `scratch.stats`. Those of a row that sees none of its keys are left undefined.
///
/// # Safety
///
/// `scratch.q` holds the rows, or `scratch.q_pairs` for [`Weights::Pairs`], for which the cache is one of
/// bfloat16 and the machine has the instructions; `source.base` is a layer of
/// `source.layout`; blocks of keys that any row sees are in `source.table`.
#[inline(always)]
pub(super) unsafe fn compute<S: Simd, C: Cached>(
    s: S,
    source: &Source<'_, C>,
    spans: &[Span],
    logits: Logits,
    weights: Weights,
    scratch: &mut Scratch,
    range: usize,
) {
    let start = range * RANGE;
    let mut seen = [Seen::NONE; MAX_ROWS];
    for (seen, &span) in seen.iter_mut().zip(spans) {
        *seen = Seen::new(span, start);
    }
    let seen = &seen[..spans.len()];
    let union = Seen::union(seen);
    let end = spans.last().map_or(0, |span| span.high);
    // SAFETY: the caller's promise; the octets of `union` are found first, and `seen` has as many rows
    // as `scratch.q`.
    unsafe {
        find_octets(source, start, union, scratch);
        find_next_octets(source, start, union, end, scratch);
        if !S::MANY_REGISTERS || source.layout.key_group() == OCTET {
            scores::<S, C, true>(s, source.layout, seen, union, weights, scratch);
        } else {
            scores::<S, C, false>(s, source.layout, seen, union, weights, scratch);
        }
        let scales = if C::IS_SCALED { Some(&scratch.scales) } else { None };
        for (row, &seen) in seen.iter().enumerate() {
            if !seen.is_empty() {
                let (scores, pairs) = (&mut scratch.scores[row], &mut scratch.weight_pairs[row]);
                let pairs =
                    if C::IS_PAIRED && weights != Weights::Wide { Some(pairs) } else { None };
                scratch.stats[row] = weigh(s, scores, pairs, scales, seen, logits);
                for at in (0..source.layout.head_dim).step_by(LANES) {
                    s.store(scratch.values[row].as_mut_ptr().add(at), s.splat(0.0));
                }
            }
        }
        values::<S, C>(s, source.layout.head_dim, seen, union, weights, scratch);
    }
}

/// Fill in the octet pointers of the keys of `union`, and of what shares a vector with them; and the
/// scales of the former.
///
/// # Safety
///
/// `source.base` is a layer of `source.layout`.
#[inline(always)]
unsafe fn find_octets<C: Cached>(
    source: &Source<'_, C>,
    start: usize,
    union: Seen,
    scratch: &mut Scratch,
) {
    let layout = source.layout;
    if union.is_empty() {
        return;
    }
    let (first, last) = (union.from / OCTET, (union.to - 1) / OCTET);
    let is_grouped_by_16 = layout.key_group() != OCTET;
    for octet in first..=last {
        let key = start + octet * OCTET;
        let (index, offset) = (key / layout.block_size, key % layout.block_size);
        // Checked before the call; checked again because foreign memory may have changed.
        let block = source.table[index] as usize;
        assert!(block < layout.num_blocks, "block {block} is outside the pool");
        let (keys, values) =
            (layout.key_tile(block, source.head), layout.value_tile(block, source.head));
        let place =
            |tile: usize, offset: usize| source.base.wrapping_add(tile + offset * layout.head_dim);
        scratch.value_octets[octet] = place(values, offset).cast();
        scratch.key_octets[octet] = if is_grouped_by_16 {
            place(keys, offset - offset % LANES).wrapping_add(offset % LANES * C::KEY_STEP).cast()
        } else {
            place(keys, offset).cast()
        };
        if C::IS_SCALED {
            let tiles = source.base.cast::<u8>().wrapping_add(layout.scale_at(offset));
            let [keys, values] = [keys, values].map(|tile| tiles.wrapping_add(tile).cast());
            // SAFETY: both tiles are in the layer, and elements of tiles with scales are bytes.
            unsafe { scratch.scales.read(octet, keys, values) };
        }
    }
    // A vector of keys at either end may have one octet that nobody sees. It must be readable.
    if first % 2 == 1 {
        let same_group = scratch.key_octets[first].cast::<C>().wrapping_sub(OCTET * C::KEY_STEP);
        scratch.key_octets[first - 1] =
            if is_grouped_by_16 { same_group.cast() } else { scratch.key_octets[first] };
    }
    if last % 2 == 0 {
        let same_group = scratch.key_octets[last].cast::<C>().wrapping_add(OCTET * C::KEY_STEP);
        scratch.key_octets[last + 1] =
            if is_grouped_by_16 { same_group.cast() } else { scratch.key_octets[last] };
    }
}

/// Fill in where the keys of the next range are, for the octets of `union`, as far as any row sees
/// them.
#[inline(always)]
fn find_next_octets<C: Cached>(
    source: &Source<'_, C>,
    start: usize,
    union: Seen,
    end: usize,
    scratch: &mut Scratch,
) {
    let layout = source.layout;
    for octet in union.from / OCTET..union.to.div_ceil(OCTET) {
        let key = start + RANGE + octet * OCTET;
        scratch.next_octets[octet] = if key < end {
            // Not followed, so that any id will do.
            let block = source.table[key / layout.block_size] as usize;
            let tile = block.wrapping_mul(layout.num_kv_heads).wrapping_add(source.head);
            let at = tile.wrapping_mul(2 * layout.tile_len());
            source
                .base
                .wrapping_add(at)
                .wrapping_add(key % layout.block_size * layout.head_dim)
                .cast()
        } else {
            scratch.value_octets[octet]
        };
    }
}

/// Rows of a block, so that blocks of `count` rows are about equal.
#[inline(always)]
const fn rows_per_block<S: Simd>(count: usize) -> usize {
    count.div_ceil(count.div_ceil(max_rows::<S>()))
}

/// Scores of every row against the keys that it sees, and against some that it does not.
///
/// # Safety
///
/// The octets of `union` are found, and there are `seen.len()` rows in `scratch.q`.
#[inline(always)]
unsafe fn scores<S: Simd, C: Cached, const SPLIT: bool>(
    s: S,
    layout: &KvLayout,
    seen: &[Seen],
    union: Seen,
    weights: Weights,
    scratch: &mut Scratch,
) {
    let per_block = rows_per_block::<S>(seen.len());
    for pass in union.from / KEYS_PER_PASS..union.to.div_ceil(KEYS_PER_PASS) {
        let keys = (pass * KEYS_PER_PASS, (pass + 1) * KEYS_PER_PASS);
        for first in (0..seen.len()).step_by(per_block) {
            let rows = per_block.min(seen.len() - first);
            let block = Seen::union(&seen[first..first + rows]).within(keys.0, keys.1);
            if block.is_empty() {
                continue;
            }
            let vector = block.from / LANES;
            let scores = Scores::<C> {
                q: scratch.q[first..].as_ptr().cast(),
                q_pairs: scratch.q_pairs[first..].as_ptr().cast(),
                by_pairs: weights == Weights::Pairs,
                rows,
                head_dim: layout.head_dim,
                to_value: layout.tile_len(),
                group: layout.key_group(),
                octets: scratch.key_octets[vector * 2..].as_ptr().cast(),
                num_vectors: block.to.div_ceil(LANES) - vector,
                out: scratch.scores[first..]
                    .as_mut_ptr()
                    .cast::<f32>()
                    .wrapping_add(vector * LANES),
            };
            // SAFETY: the rows are there, and the octets of both halves of each vector are found.
            unsafe { scores.compute::<S, SPLIT>(s) };
        }
    }
}

/// Turn a row of scores into weights relative to their maximum; zero where a key is not seen.
///
/// With `scales`, a score is multiplied by its key's before anything else, and a weight by its value's
/// after everything else: the sum of weights is without it, and where a key is not seen it may be NaN.
/// With `pairs`, weights are rounded to bfloat16 and stored there too.
///
/// # Safety
///
/// The row has the scores of the keys in `seen`, rounded out to whole vectors.
#[inline(always)]
unsafe fn weigh<S: Simd>(
    s: S,
    row: &mut [f32],
    mut pairs: Option<&mut [Pair; PAIR_STRIDE]>,
    scales: Option<&Scales>,
    seen: Seen,
    logits: Logits,
) -> Stats {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    let Logits { scale, softcap } = logits;
    let vectors = seen.from / LANES..seen.to.div_ceil(LANES);
    let row = row.as_mut_ptr();
    let mut max = s.splat(f32::NEG_INFINITY);
    for vector in vectors.clone() {
        // SAFETY: the caller's promise.
        unsafe {
            let at = row.add(vector * LANES);
            let mut x = s.load(at);
            if let Some(scales) = scales {
                x = s.mul(x, s.load(scales.keys.as_ptr().add(vector * LANES)));
            }
            if softcap == 0.0 {
                x = s.mul(x, s.splat(scale * LOG2_E));
            } else {
                x = math::tanh(s, s.mul(x, s.splat(scale / softcap)));
                x = s.mul(x, s.splat(softcap * LOG2_E));
            }
            x = s.select(lanes_seen(vector * LANES, seen), x, s.splat(f32::NEG_INFINITY));
            max = s.max(x, max);
            s.store(at, x);
        }
    }
    let max = s.max_lane(max);
    let mut sum = s.splat(0.0);
    for vector in vectors {
        // SAFETY: the caller's promise.
        unsafe {
            let at = row.add(vector * LANES);
            let mut weight = math::exp2(s, s.sub(s.load(at), s.splat(max)));
            if let Some(pairs) = &mut pairs {
                let mut narrow = [Bf16::default(); LANES];
                s.store_bf16(narrow.as_mut_ptr(), weight);
                weight = s.load_bf16(narrow.as_ptr());
                let to = &mut pairs[vector * LANES / 2..][..LANES / 2];
                for (to, &[first, second]) in to.iter_mut().zip(narrow.as_chunks().0) {
                    *to = [second, first];
                }
            }
            sum = s.add(sum, weight);
            if let Some(scales) = scales {
                weight = s.mul(weight, s.load(scales.values.as_ptr().add(vector * LANES)));
            }
            s.store(at, weight);
        }
    }
    Stats { max, sum: s.sum(sum) }
}

/// Bit i is set where key `first + i` is seen.
#[inline(always)]
fn lanes_seen(first: usize, seen: Seen) -> u16 {
    let below = |key: usize| (1_u32 << key.saturating_sub(first).min(LANES)) - 1;
    (below(seen.to) & !below(seen.from)) as u16
}

/// Weighted values of every row over the keys that it sees.
///
/// # Safety
///
/// The octets of `union` are found, `scratch.scores` has the weights of `seen.len()` rows.
#[inline(always)]
unsafe fn values<S: Simd, C: Cached>(
    s: S,
    head_dim: usize,
    seen: &[Seen],
    union: Seen,
    weights: Weights,
    scratch: &mut Scratch,
) {
    let at = |first, count| Rows { head_dim, weights, first, count };
    let per_block = rows_per_block::<S>(seen.len());
    for pass in union.from / KEYS_PER_PASS..union.to.div_ceil(KEYS_PER_PASS) {
        let keys = (pass * KEYS_PER_PASS, (pass + 1) * KEYS_PER_PASS);
        for first in (0..seen.len()).step_by(per_block) {
            let rows = per_block.min(seen.len() - first);
            let block = &seen[first..first + rows];
            let common = Seen::common(block).within(keys.0, keys.1);
            // Ascending for each row: before what all see, then that, then the rest.
            // SAFETY: every row sees the keys it is given.
            unsafe {
                for (row, seen) in (first..).zip(block) {
                    let to = if common.is_empty() { keys.1 } else { common.from };
                    accumulate::<S, C>(s, at(row, 1), seen.within(keys.0, to), scratch);
                }
                if common.is_empty() {
                    continue;
                }
                accumulate::<S, C>(s, at(first, rows), common, scratch);
                for (row, seen) in (first..).zip(block) {
                    accumulate::<S, C>(s, at(row, 1), seen.within(common.to, keys.1), scratch);
                }
            }
        }
    }
}

/// Rows that values are added to.
#[derive(Debug, Clone, Copy)]
struct Rows {
    head_dim: usize,
    weights: Weights,
    first: usize,
    count: usize,
}

/// Add the weighted values of `keys` to some rows.
///
/// # Safety
///
/// All of them see the keys, whose octets are found.
#[inline(always)]
unsafe fn accumulate<S: Simd, C: Cached>(
    s: S,
    Rows { head_dim, weights, first, count }: Rows,
    keys: Seen,
    scratch: &mut Scratch,
) {
    if keys.is_empty() {
        return;
    }
    let values = Values::<C> {
        weights: scratch.scores[first..].as_ptr().cast(),
        weight_pairs: scratch.weight_pairs[first..].as_ptr().cast(),
        by_pairs: weights == Weights::Pairs,
        rows: count,
        head_dim,
        octets: scratch.value_octets.as_ptr().cast(),
        next: scratch.next_octets.as_ptr().cast(),
        from: keys.from,
        to: keys.to,
        out: scratch.values[first..].as_mut_ptr().cast(),
    };
    // SAFETY: the caller's promise.
    unsafe { values.accumulate(s) };
}
