//! Who computes what: rows are cut into tiles, and tiles too large for an even share into runs of
//! ranges, whose partials are parked until the last of them is done.

use std::ops::Range;
use std::sync::atomic::AtomicU32;

use super::tile::{MAX_ROWS, Span};
use super::{Attention, RANGE};
use crate::pool::Pool;
use crate::simd::LANES;

/// Shares per thread to aim for: a thread that is done early finds something left to claim.
const SHARES_PER_THREAD: usize = 4;

/// Least work, in nanoseconds, that a tile is cut into.
const MIN_SHARE_NS: usize = 5_000;

/// Query rows of one sequence row and KV head over some ranges.
#[derive(Debug, Clone)]
pub(super) struct Item {
    /// Row of the call.
    pub(super) row: usize,
    /// KV head.
    pub(super) head: usize,
    /// First query row and their number. Query row j is token `j / group`, head `j % group`.
    pub(super) first: usize,
    pub(super) count: usize,
    /// Ranges to compute.
    pub(super) ranges: Range<usize>,
    /// Index of its [`Split`], if this is not the whole tile.
    pub(super) split: Option<usize>,
    work_ns: usize,
}

/// A tile that is several items.
#[derive(Debug)]
pub(super) struct Split {
    /// Ranges of the whole tile.
    pub(super) ranges: Range<usize>,
    /// Items that are not done.
    pub(super) num_left: AtomicU32,
    /// Where its partials are parked: `[ranges, count, partial_len]` from here.
    pub(super) partials: usize,
}

/// The items of a call.
#[derive(Debug, Default)]
pub(super) struct Workspace {
    pub(super) items: Vec<Item>,
    pub(super) splits: Vec<Split>,
    pub(super) partials: Vec<f32>,
}

/// Elements of a parked partial: its statistics, then its values from [`LANES`] on.
pub(super) const fn partial_len(head_dim: usize) -> usize {
    LANES + head_dim.next_multiple_of(LANES)
}

/// Query rows of a tile: whole tokens, if one fits.
const fn rows_per_tile(group: usize) -> usize {
    if group >= MAX_ROWS { MAX_ROWS } else { MAX_ROWS / group * group }
}

impl Workspace {
    /// List the items of a call; returns their work in nanoseconds of one core.
    pub(super) fn plan(&mut self, args: &Attention<'_>, pool: &Pool) -> usize {
        self.items.clear();
        self.splits.clear();
        (0..args.row_slots.len()).for_each(|row| self.add_row(args, row));
        let work_ns = self.items.iter().map(|item| item.work_ns).sum();
        if pool.shares(work_ns) {
            let share_ns = work_ns / (pool.num_threads() * SHARES_PER_THREAD);
            self.split(share_ns.max(MIN_SHARE_NS), args.kv.layout().head_dim);
        }
        work_ns
    }

    /// The tiles of a row, later tokens first: they see more keys, and large items should not be
    /// the last to be claimed.
    fn add_row(&mut self, args: &Attention<'_>, row: usize) {
        if args.seq_lens[row] == 0 {
            return;
        }
        let layout = args.kv.layout();
        let group = args.q.num_cols() / layout.head_dim / layout.num_kv_heads;
        let num_tokens = (args.query_indptr[row + 1] - args.query_indptr[row]) as usize;
        let (num_rows, per_tile) = (num_tokens * group, rows_per_tile(group));
        for first in (0..num_rows).step_by(per_tile).rev() {
            let count = per_tile.min(num_rows - first);
            let keys = Span::of(args, row, first / group).low
                ..Span::of(args, row, (first + count - 1) / group).high;
            let ranges = keys.start / RANGE..keys.end.div_ceil(RANGE);
            // Arithmetic at some 30 operations a nanosecond, or reading at some 10 bytes.
            let elements = keys.len() * layout.head_dim;
            let work_ns = (elements * count * 4 / 30)
                .max(elements * 2 * args.kv.dtype().size() / 10)
                .max(200);
            for head in 0..layout.num_kv_heads {
                let ranges = ranges.clone();
                self.items.push(Item { row, head, first, count, ranges, split: None, work_ns });
            }
        }
    }

    /// Cut items larger than two shares.
    fn split(&mut self, share_ns: usize, head_dim: usize) {
        let mut num_partials = 0;
        for index in 0..self.items.len() {
            let whole = self.items[index].clone();
            let num_ranges = whole.ranges.len();
            if whole.work_ns <= 2 * share_ns || num_ranges < 2 {
                continue;
            }
            let ranges_per_item = num_ranges.div_ceil(whole.work_ns / share_ns).max(1);
            let num_items = num_ranges.div_ceil(ranges_per_item);
            let split = Some(self.splits.len());
            self.splits.push(Split {
                ranges: whole.ranges.clone(),
                num_left: AtomicU32::new(num_items as u32),
                partials: num_partials,
            });
            num_partials += num_ranges * whole.count * partial_len(head_dim);
            for (i, from) in whole.ranges.clone().step_by(ranges_per_item).enumerate() {
                let ranges = from..whole.ranges.end.min(from + ranges_per_item);
                let item = Item { ranges, split, ..whole.clone() };
                if i == 0 {
                    self.items[index] = item;
                } else {
                    self.items.push(item);
                }
            }
        }
        if self.partials.len() < num_partials {
            self.partials.resize(num_partials, 0.0);
        }
    }
}
