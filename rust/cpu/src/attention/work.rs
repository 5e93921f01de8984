//! Who computes what: rows are cut into tiles, and tiles that are too large for an even share into runs
//! of ranges, whose partials are parked until the last of them is done.
//!
//! Rows that share leading blocks are stacked first: one tile goes over the ranges that all of them have,
//! so that these keys and values are read once for all, and parks what it has come to for each row.
//! When all stacks are done, the rows' own tiles go on from there.

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

/// Query rows of one KV head over some ranges: a tile, or a part of one.
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
    /// Index of its [`Split`], if this is not the whole tile.
    pub(super) split: Option<usize>,
    /// Where the totals are parked that the tile goes on from, of each of its query rows; `None`: of no
    /// keys.
    pub(super) goes_on_from: Option<usize>,
    /// Where the tile parks its totals; `None`: it writes the output.
    pub(super) parks_at: Option<usize>,
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
    /// Where its partials are parked: `[ranges, count, partial_len]` from here.
    pub(super) partials: usize,
}

/// The items of a call.
#[derive(Debug, Default)]
pub(super) struct Workspace {
    /// Of stacked rows: all of them are done before the first of `items` is begun.
    pub(super) stacks: Vec<Item>,
    pub(super) items: Vec<Item>,
    pub(super) splits: Vec<Split>,
    pub(super) partials: Vec<f32>,
    /// Elements of `partials` in use.
    num_parked: usize,
}

/// Work of a call, in nanoseconds of one core.
#[derive(Debug, Clone, Copy)]
pub(super) struct WorkNs {
    pub(super) stacks: usize,
    pub(super) items: usize,
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
    /// List the items of a call; returns their work.
    pub(super) fn plan(&mut self, args: &Attention<'_>, pool: &Pool) -> WorkNs {
        self.stacks.clear();
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
        let (mut stacks, mut items) =
            (std::mem::take(&mut self.stacks), std::mem::take(&mut self.items));
        let work_ns = WorkNs {
            stacks: self.cut(&mut stacks, args, pool),
            items: self.cut(&mut items, args, pool),
        };
        (self.stacks, self.items) = (stacks, items);
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
            let item = Item {
                row,
                num_stacked: 1,
                head: 0,
                first,
                per_row,
                ranges: keys.start / RANGE..keys.end.div_ceil(RANGE),
                split: None,
                goes_on_from: None,
                parks_at: None,
                work_ns: work_ns(args, keys.len(), per_row),
            };
            for head in 0..args.kv.layout().num_kv_heads {
                self.items.push(Item { head, ..item.clone() });
            }
        }
    }

    /// Rows that [`stackable`] found: what they share, and what each has alone.
    fn add_stack(&mut self, args: &Attention<'_>, row: usize, num_stacked: usize) {
        let layout = args.kv.layout();
        let per_row = num_tokens(args, row) * group_of(args);
        let num_shared = num_shared_ranges(args, row + 1);
        let row_len = per_row * partial_len(layout.head_dim);
        for head in 0..layout.num_kv_heads {
            let parked = self.park(num_stacked * row_len);
            let stack = Item {
                row,
                num_stacked,
                head,
                first: 0,
                per_row,
                ranges: 0..num_shared,
                split: None,
                goes_on_from: None,
                parks_at: Some(parked),
                work_ns: work_ns(args, num_shared * RANGE, num_stacked * per_row),
            };
            for stacked in 0..num_stacked {
                let num_keys = args.seq_lens[row + stacked] as usize;
                self.items.push(Item {
                    row: row + stacked,
                    num_stacked: 1,
                    ranges: num_shared..num_keys.div_ceil(RANGE),
                    goes_on_from: Some(parked + stacked * row_len),
                    parks_at: None,
                    work_ns: work_ns(args, num_keys - num_shared * RANGE, per_row),
                    ..stack.clone()
                });
            }
            self.stacks.push(stack);
        }
    }

    /// Room for so many elements among the parked ones.
    fn park(&mut self, len: usize) -> usize {
        let at = self.num_parked;
        self.num_parked += len;
        at
    }

    /// Cut items larger than two shares, where there is somebody to share with; returns their work.
    fn cut(&mut self, items: &mut Vec<Item>, args: &Attention<'_>, pool: &Pool) -> usize {
        let work_ns = items.iter().map(|item| item.work_ns).sum();
        if !pool.shares(work_ns) {
            return work_ns;
        }
        let share_ns = (work_ns / (pool.num_threads() * SHARES_PER_THREAD)).max(MIN_SHARE_NS);
        let len = partial_len(args.kv.layout().head_dim);
        for index in 0..items.len() {
            let whole = items[index].clone();
            let num_ranges = whole.ranges.len();
            if whole.work_ns <= 2 * share_ns || num_ranges < 2 {
                continue;
            }
            let ranges_per_item = num_ranges.div_ceil(whole.work_ns / share_ns).max(1);
            let num_items = num_ranges.div_ceil(ranges_per_item);
            let split = Some(self.splits.len());
            let partials = self.park(num_ranges * whole.count() * len);
            self.splits.push(Split {
                ranges: whole.ranges.clone(),
                num_left: AtomicU32::new(num_items as u32),
                partials,
            });
            for (i, from) in whole.ranges.clone().step_by(ranges_per_item).enumerate() {
                let ranges = from..whole.ranges.end.min(from + ranges_per_item);
                let item = Item { ranges, split, ..whole.clone() };
                if i == 0 {
                    items[index] = item;
                } else {
                    items.push(item);
                }
            }
        }
        work_ns
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::layout::{KvDType, KvLayout};
    use crate::view::{KvView, Matrix};

    /// What stacks park grows with rows and heads, and not with what the rows share.
    #[test]
    fn a_stack_parks_one_total_a_query_row() {
        const ROWS: usize = 40;
        for num_shared in [16, 64, 256] {
            let per_row = num_shared + 1;
            let num_blocks = num_shared + ROWS;
            let (block_size, head_dim, dtype) = (16, 8, KvDType::F32);
            let layout = KvLayout { num_blocks, num_kv_heads: 2, block_size, head_dim, dtype };
            let kv = vec![0.0; layout.layer_len()];
            let q = vec![0.0; ROWS * 4 * 8];
            let block = |i: usize| {
                let (row, index) = (i / per_row, i % per_row);
                if index < num_shared { index as i32 } else { (num_shared + row) as i32 }
            };
            let numbers = |last: usize| (0..=last as i32).collect::<Vec<_>>();
            let mut num_shared_blocks = vec![num_shared as i32; ROWS];
            num_shared_blocks[0] = 0;
            let args = Attention {
                q: Matrix::f32(&q, 4 * 8),
                kv: KvView::new(&kv, layout),
                block_tables: &(0..ROWS * per_row).map(block).collect::<Vec<_>>(),
                max_blocks: per_row,
                row_slots: &numbers(ROWS - 1),
                query_indptr: &numbers(ROWS),
                seq_lens: &[num_shared as i32 * 16 + 3; ROWS],
                num_shared_blocks: &num_shared_blocks,
                scale: 1.0,
                window: 0,
                softcap: 0.0,
            };
            let mut workspace = Workspace::default();
            workspace.plan(&args, &Pool::new(1, Isa::detect()));
            assert_eq!(workspace.stacks.len(), 2 * 2, "24 rows of two heads fit a tile");
            assert_eq!(workspace.items.len(), 2 * ROWS);
            assert_eq!(workspace.partials.len(), ROWS * 4 * partial_len(8));
        }
    }
}
