//! Who computes what: rows are cut into tiles, and tiles that are too large for an even share, or whose
//! first keys other rows have too, into runs of ranges, whose partials are parked until the last of
//! them is done.
//!
//! Rows that share leading blocks are stacked: one item computes their partials over the ranges that
//! all of them have, so that these keys and values are read once for all. What is left of each is its
//! own item.

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

/// Query rows of one KV head over some ranges: a part of one row of the call, or some rows whole.
#[derive(Debug, Clone)]
pub(super) struct Item {
    /// First row of the call, and how many are stacked.
    pub(super) row: usize,
    pub(super) num_stacked: usize,
    /// KV head.
    pub(super) head: usize,
    /// First query row and their number, in each row of the call. Query row j is token `j / group`,
    /// head `j % group`.
    pub(super) first: usize,
    pub(super) per_row: usize,
    /// Ranges to compute.
    pub(super) ranges: Range<usize>,
    /// Index of its [`Split`], the first of as many as are stacked, if this is not a whole tile.
    pub(super) split: Option<usize>,
    work_ns: usize,
}

impl Item {
    /// Query rows in all.
    pub(super) const fn count(&self) -> usize {
        self.num_stacked * self.per_row
    }
}

/// A tile that is several items.
#[derive(Debug)]
pub(super) struct Split {
    /// Ranges of the whole tile.
    pub(super) ranges: Range<usize>,
    /// Items that are not done.
    pub(super) num_left: AtomicU32,
    /// Where its partials are parked: `[ranges, per_row, partial_len]` from here.
    pub(super) partials: usize,
}

/// The items of a call.
#[derive(Debug, Default)]
pub(super) struct Workspace {
    pub(super) items: Vec<Item>,
    pub(super) splits: Vec<Split>,
    pub(super) partials: Vec<f32>,
    /// Elements of `partials` in use.
    num_parked: usize,
}

/// Elements of a parked partial: its statistics, then its values from [`LANES`] on.
pub(super) const fn partial_len(head_dim: usize) -> usize {
    LANES + head_dim.next_multiple_of(LANES)
}

/// Query rows of a tile: whole tokens, if one fits.
const fn rows_per_tile(group: usize) -> usize {
    if group >= MAX_ROWS { MAX_ROWS } else { MAX_ROWS / group * group }
}

/// Query heads of a KV head.
fn group_of(args: &Attention<'_>) -> usize {
    let layout = args.kv.layout();
    args.q.num_cols() / layout.head_dim / layout.num_kv_heads
}

fn num_tokens(args: &Attention<'_>, row: usize) -> usize {
    (args.query_indptr[row + 1] - args.query_indptr[row]) as usize
}

/// Whole ranges of keys that a row has in common with the one before.
fn num_shared_ranges(args: &Attention<'_>, row: usize) -> usize {
    let num_blocks = args.num_shared_blocks.get(row).map_or(0, |&num| num as usize);
    num_blocks * args.kv.layout().block_size / RANGE
}

/// Nanoseconds of one core for `count` query rows over `num_keys` keys: arithmetic at some 30
/// operations each, or reading at some 10 bytes.
fn work_ns(args: &Attention<'_>, num_keys: usize, count: usize) -> usize {
    let elements = num_keys * args.kv.layout().head_dim;
    (elements * count * 4 / 30).max(elements * 2 * args.kv.dtype().size() / 10).max(200)
}

impl Workspace {
    /// List the items of a call; returns their work in nanoseconds of one core.
    pub(super) fn plan(&mut self, args: &Attention<'_>, pool: &Pool) -> usize {
        self.items.clear();
        self.splits.clear();
        self.num_parked = 0;
        let mut row = 0;
        while row < args.row_slots.len() {
            let num_stacked = stackable(args, row);
            if num_stacked > 1 {
                self.add_stack(args, row, num_stacked);
            } else {
                self.add_row(args, row);
            }
            row += num_stacked;
        }
        let work_ns = self.items.iter().map(|item| item.work_ns).sum();
        if pool.shares(work_ns) {
            let share_ns = work_ns / (pool.num_threads() * SHARES_PER_THREAD);
            self.cut(share_ns.max(MIN_SHARE_NS), args.kv.layout().head_dim);
        }
        for item in &self.items {
            if let Some(first) = item.split {
                for split in &mut self.splits[first..first + item.num_stacked] {
                    *split.num_left.get_mut() += 1;
                }
            }
        }
        if self.partials.len() < self.num_parked {
            self.partials.resize(self.num_parked, 0.0);
        }
        work_ns
    }

    /// The tiles of a row, later tokens first: they see more keys, and large items should not be
    /// the last to be claimed.
    fn add_row(&mut self, args: &Attention<'_>, row: usize) {
        if args.seq_lens[row] == 0 {
            return;
        }
        let group = group_of(args);
        let (num_rows, per_tile) = (num_tokens(args, row) * group, rows_per_tile(group));
        for first in (0..num_rows).step_by(per_tile).rev() {
            let per_row = per_tile.min(num_rows - first);
            let keys = Span::of(args, row, first / group).low
                ..Span::of(args, row, (first + per_row - 1) / group).high;
            let work_ns = work_ns(args, keys.len(), per_row);
            let ranges = keys.start / RANGE..keys.end.div_ceil(RANGE);
            for head in 0..args.kv.layout().num_kv_heads {
                let (ranges, split) = (ranges.clone(), None);
                let num_stacked = 1;
                self.items.push(Item {
                    row,
                    num_stacked,
                    head,
                    first,
                    per_row,
                    ranges,
                    split,
                    work_ns,
                });
            }
        }
    }

    /// Rows that [`stackable`] found: what they share, then what each has alone.
    fn add_stack(&mut self, args: &Attention<'_>, row: usize, num_stacked: usize) {
        let layout = args.kv.layout();
        let per_row = num_tokens(args, row) * group_of(args);
        let num_shared = num_shared_ranges(args, row + 1);
        for head in 0..layout.num_kv_heads {
            let first_split = self.splits.len();
            self.items.push(Item {
                row,
                num_stacked,
                head,
                first: 0,
                per_row,
                ranges: 0..num_shared,
                split: Some(first_split),
                work_ns: work_ns(args, num_shared * RANGE, num_stacked * per_row),
            });
            for row in row..row + num_stacked {
                let num_keys = args.seq_lens[row] as usize;
                let ranges = 0..num_keys.div_ceil(RANGE);
                let split = Some(self.splits.len());
                self.items.push(Item {
                    row,
                    num_stacked: 1,
                    head,
                    first: 0,
                    per_row,
                    ranges: num_shared..ranges.end,
                    split,
                    work_ns: work_ns(args, num_keys - num_shared * RANGE, per_row),
                });
                self.add_split(ranges, per_row, layout.head_dim);
            }
        }
    }

    /// A tile in several items, which are counted when all of them are known.
    fn add_split(&mut self, ranges: Range<usize>, per_row: usize, head_dim: usize) {
        let partials = self.num_parked;
        self.num_parked += ranges.len() * per_row * partial_len(head_dim);
        self.splits.push(Split { ranges, num_left: AtomicU32::new(0), partials });
    }

    /// Cut items larger than two shares.
    fn cut(&mut self, share_ns: usize, head_dim: usize) {
        for index in 0..self.items.len() {
            let mut whole = self.items[index].clone();
            let num_ranges = whole.ranges.len();
            if whole.work_ns <= 2 * share_ns || num_ranges < 2 {
                continue;
            }
            if whole.split.is_none() {
                whole.split = Some(self.splits.len());
                self.add_split(whole.ranges.clone(), whole.per_row, head_dim);
            }
            let ranges_per_item = num_ranges.div_ceil(whole.work_ns / share_ns).max(1);
            for (i, from) in whole.ranges.clone().step_by(ranges_per_item).enumerate() {
                let ranges = from..whole.ranges.end.min(from + ranges_per_item);
                let item = Item { ranges, ..whole.clone() };
                if i == 0 {
                    self.items[index] = item;
                } else {
                    self.items.push(item);
                }
            }
        }
    }
}

/// How many rows from `row` on are worth to be stacked: rows of equally many tokens that fit one tile,
/// each with at least the whole ranges in common with the one before that the second has. 1: none.
fn stackable(args: &Attention<'_>, row: usize) -> usize {
    let tokens = num_tokens(args, row);
    let per_row = tokens * group_of(args);
    let end = args.row_slots.len();
    if tokens == 0 || 2 * per_row > MAX_ROWS || row + 1 == end || !sees_all(args, row) {
        return 1;
    }
    let num_shared = num_shared_ranges(args, row + 1);
    if num_shared == 0 {
        return 1;
    }
    let most = (MAX_ROWS / per_row).min(end - row);
    let follows = |&next: &usize| {
        num_tokens(args, next) == tokens
            && num_shared_ranges(args, next) >= num_shared
            && sees_all(args, next)
    };
    1 + (row + 1..row + most).take_while(follows).count()
}

/// Whether no token of the row has a window that cuts off keys.
fn sees_all(args: &Attention<'_>, row: usize) -> bool {
    args.window == 0 || args.seq_lens[row] as usize <= args.window
}
