//! Memory that a thread keeps between calls, so that none is allocated in a steady state.

use std::cell::UnsafeCell;

use super::RANGE;
use super::cached::OCTET;
use super::tile::MAX_ROWS;
use super::work::Workspace;
use crate::layout::MAX_HEAD_DIM;
use crate::simd::{LANES, Pair};

/// Distance between rows of scratch: one constant for heads and ranges, so that the rows of a block
/// are at constant offsets; not a power of two, so that they are not in one set of the cache.
pub(super) const STRIDE: usize = MAX_HEAD_DIM + LANES;

const _: () = assert!(RANGE <= MAX_HEAD_DIM && MAX_HEAD_DIM.is_multiple_of(LANES));

/// The same between rows of pairs.
pub(super) const PAIR_STRIDE: usize = STRIDE / 2;

/// [`MAX_ROWS`] rows.
type Rows = Box<[[f32; STRIDE]]>;

/// As many, of pairs: the second first.
type PairRows = Box<[[Pair; PAIR_STRIDE]]>;

/// What is known of a softmax besides its weighted values.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stats {
    /// Largest score, in base 2.
    pub(super) max: f32,
    /// Sum of 2^(score − max).
    pub(super) sum: f32,
}

impl Stats {
    /// Of no keys.
    pub(super) const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: 0.0 };
}

/// Scales of the keys of a range and of their values.
pub(super) struct Scales {
    pub(super) keys: [f32; RANGE],
    pub(super) values: [f32; RANGE],
}

impl Scales {
    /// Read those of octet number `octet` of the range.
    ///
    /// # Safety
    ///
    /// `keys` and `values` point to its first scales in its tiles.
    #[inline(always)]
    pub(super) unsafe fn read(&mut self, octet: usize, keys: *const f32, values: *const f32) {
        // SAFETY: the caller's promise: an octet lies in one block.
        unsafe {
            self.keys.as_chunks_mut().0[octet] = keys.cast::<[f32; OCTET]>().read();
            self.values.as_chunks_mut().0[octet] = values.cast::<[f32; OCTET]>().read();
        }
    }
}

/// One thread's working memory for a tile: fits in the second-level cache.
pub(super) struct Scratch {
    /// Queries, as `f32`.
    pub(super) q: Rows,
    /// Scores, then weights, of the current range.
    pub(super) scores: Rows,
    /// Queries and weights, where they are multiplied by pairs.
    pub(super) q_pairs: PairRows,
    pub(super) weight_pairs: PairRows,
    /// Of the current range, where the cache has them.
    pub(super) scales: Scales,
    /// Weighted values of the current range, and their statistics.
    pub(super) values: Rows,
    pub(super) stats: [Stats; MAX_ROWS],
    /// The same of all ranges so far.
    pub(super) total: Rows,
    pub(super) total_stats: [Stats; MAX_ROWS],
    /// Octet pointers of the current range's keys and values.
    pub(super) key_octets: [*const u8; RANGE / OCTET],
    pub(super) value_octets: [*const u8; RANGE / OCTET],
    /// Where the keys of the next range are, eight tokens each: only to ask the memory for them.
    pub(super) next_octets: [*const u8; RANGE / OCTET],
}

impl Scratch {
    fn new() -> Self {
        let rows = || vec![[0.0; STRIDE]; MAX_ROWS].into_boxed_slice();
        let pair_rows = || vec![[Pair::default(); PAIR_STRIDE]; MAX_ROWS].into_boxed_slice();
        Self {
            q: rows(),
            scores: rows(),
            q_pairs: pair_rows(),
            weight_pairs: pair_rows(),
            scales: Scales { keys: [0.0; RANGE], values: [0.0; RANGE] },
            values: rows(),
            stats: [Stats::EMPTY; MAX_ROWS],
            total: rows(),
            total_stats: [Stats::EMPTY; MAX_ROWS],
            key_octets: [std::ptr::null(); RANGE / OCTET],
            value_octets: [std::ptr::null(); RANGE / OCTET],
            next_octets: [std::ptr::null(); RANGE / OCTET],
        }
    }
}

thread_local! {
    static SCRATCH: UnsafeCell<Scratch> = UnsafeCell::new(Scratch::new());
    static WORKSPACE: UnsafeCell<Workspace> = UnsafeCell::new(Workspace::default());
}

/// This thread's scratch. Its user must be done with it before anyone else on this thread asks.
pub(super) fn scratch() -> *mut Scratch {
    SCRATCH.with(UnsafeCell::get)
}

/// Lend this thread's workspace to `body`, which must not ask for it again.
pub(super) fn with_workspace(body: impl FnOnce(&mut Workspace)) {
    // SAFETY: the only use, and `body` (in `attention::run`) does not come here again.
    WORKSPACE.with(|cell| body(unsafe { &mut *cell.get() }));
}
