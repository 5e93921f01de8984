//! Rows of `x` as products of pairs of bfloat16 take them: the second of each pair first, zero where an odd
//! K has none. See [`simd::bf16`](crate::simd).

use crate::element::Bf16;
use crate::simd::Pair;
use crate::view::Matrix;

/// Rows of pairs.
#[derive(Clone, Copy)]
pub(super) struct Pairs {
    /// Of a row.
    pub(super) num_pairs: usize,
    /// Row after row.
    pub(super) memory: *mut Pair,
}

// SAFETY: while they are written each row is one thread's alone, and then they are only read.
unsafe impl Sync for Pairs {}

impl Pairs {
    /// The pairs of a row.
    #[inline(always)]
    pub(super) fn row(&self, row: usize) -> *const Pair {
        self.memory.wrapping_add(row * self.num_pairs)
    }

    /// Fill in a row.
    ///
    /// # Safety
    ///
    /// `x` is bfloat16 and has such a row, and so have the pairs, of as many numbers; no other thread uses
    /// theirs.
    #[inline(always)]
    pub(super) unsafe fn turn(&self, x: &Matrix<'_>, row: usize) {
        // SAFETY: the caller's promise.
        let (from, to) = unsafe {
            (
                std::slice::from_raw_parts(x.row::<Bf16>(row), x.num_cols()),
                std::slice::from_raw_parts_mut(self.row(row).cast_mut(), self.num_pairs),
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
