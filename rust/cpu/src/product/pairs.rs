//! Rows of `x` as products of pairs of bfloat16 take them: the second of each pair first, zero where an odd
//! K has none. See [`simd::bf16`](crate::simd).

use std::cell::UnsafeCell;

use crate::element::Bf16;
use crate::pool::Pool;
use crate::simd::{Kernel, Pair, Simd};
use crate::view::Matrix;

/// Rows of pairs.
#[derive(Clone, Copy)]
pub(super) struct Pairs {
    num_pairs: usize,
    memory: *mut Pair,
}

// SAFETY: while they are written each row is one thread's alone, and then they are only read.
unsafe impl Sync for Pairs {}

thread_local! {
    static SCRATCH: UnsafeCell<Vec<Pair>> = const { UnsafeCell::new(Vec::new()) };
}

impl Pairs {
    /// Lend `body` the rows of `x`, which is bfloat16.
    pub(super) fn of(pool: &Pool, x: &Matrix<'_>, body: impl FnOnce(&Self)) {
        let (num_rows, num_pairs) = (x.num_rows(), x.num_cols().div_ceil(2));
        // SAFETY: this thread's own, and `body` (a product) does not come here again.
        let scratch = unsafe { &mut *SCRATCH.with(UnsafeCell::get) };
        if scratch.len() < num_rows * num_pairs {
            scratch.resize(num_rows * num_pairs, Pair::default());
        }
        let pairs = Self { num_pairs, memory: scratch.as_mut_ptr() };
        // About four pairs a nanosecond.
        pool.run(&Turn { x, pairs }, num_rows, num_rows * num_pairs / 4);
        body(&pairs);
    }

    /// Pairs of a row.
    #[inline(always)]
    pub(super) fn num_pairs(&self) -> usize {
        self.num_pairs
    }

    /// The pairs of a row.
    #[inline(always)]
    pub(super) fn row(&self, row: usize) -> *const Pair {
        self.memory.wrapping_add(row * self.num_pairs)
    }
}

/// A row an item.
struct Turn<'a> {
    x: &'a Matrix<'a>,
    pairs: Pairs,
}

impl Kernel for Turn<'_> {
    #[inline(always)]
    fn run<S: Simd>(&self, _s: S, row: usize) {
        let to = self.pairs.row(row).cast_mut();
        // SAFETY: a row of the view, and one of the pairs, which is this item's alone.
        let (from, to) = unsafe {
            (
                std::slice::from_raw_parts(self.x.row::<Bf16>(row), self.x.num_cols()),
                std::slice::from_raw_parts_mut(to, self.pairs.num_pairs),
            )
        };
        let (pairs, last) = from.as_chunks();
        for (to, &[first, second]) in to.iter_mut().zip(pairs) {
            *to = [second, first];
        }
        if let (Some(to), &[first]) = (to.last_mut(), last) {
            *to = [Bf16::default(), first];
        }
    }
}
