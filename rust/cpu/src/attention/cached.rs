//! Reading keys and values from a cache of any type. The layout is that of [`crate::layout`].

use crate::element::{Bf16, KvElement};
use crate::simd::Simd;

/// Keys or values behind one pointer: a block of any size is a whole number of these.
pub(super) const OCTET: usize = 8;

/// A type that keys and values are stored as.
///
/// An octet pointer points to the first dimension of the first key or value of an octet.
pub(super) trait Cached: KvElement {
    /// Elements from one key of a group to the next.
    const KEY_STEP: usize;

    /// Whether tiles have scales, of which what is read here knows nothing.
    const IS_SCALED: bool;

    /// Whether they come in pairs of bfloat16.
    const IS_PAIRED: bool = false;

    /// Dimensions `dim` (even) and `dim + 1` of sixteen keys: those of the two octets at `octets`,
    /// which the cache holds in groups of `group` keys. Unless `SPLIT`, `group` is sixteen and the
    /// second octet lies beside the first.
    ///
    /// # Safety
    ///
    /// `octets` points to two octet pointers of tiles that have `dim`.
    unsafe fn keys<S: Simd, const SPLIT: bool>(
        s: S,
        octets: *const *const Self,
        group: usize,
        dim: usize,
    ) -> (S::V, S::V);

    /// Sixteen dimensions (eight if `HALF`) from `at` of the values `key` (even) and `key + 1` of an
    /// octet.
    ///
    /// # Safety
    ///
    /// `octet` is an octet pointer of a tile of `head_dim` dimensions, which has those.
    unsafe fn values<S: Simd, const HALF: bool>(
        s: S,
        octet: *const Self,
        head_dim: usize,
        key: usize,
        at: usize,
    ) -> (S::V, S::V);

    /// The same of the value `key` alone.
    ///
    /// # Safety
    ///
    /// As for [`Cached::values`].
    unsafe fn value<S: Simd, const HALF: bool>(
        s: S,
        octet: *const Self,
        head_dim: usize,
        key: usize,
        at: usize,
    ) -> S::V;
}

/// Types whose dimensions and values lie one after the other.
macro_rules! one_by_one {
    ($type:ty, $is_scaled:literal, $load:ident, $load_half:ident, $load_split:ident) => {
        impl Cached for $type {
            const KEY_STEP: usize = 1;
            const IS_SCALED: bool = $is_scaled;

            #[inline(always)]
            unsafe fn keys<S: Simd, const SPLIT: bool>(
                s: S,
                octets: *const *const Self,
                group: usize,
                dim: usize,
            ) -> (S::V, S::V) {
                // SAFETY: the caller's promise; a dimension of a group is `group` elements.
                unsafe {
                    if SPLIT {
                        let (low, high) = (*octets, *octets.add(1));
                        let (low, high) = (low.add(dim * group), high.add(dim * group));
                        let next = s.$load_split(low.add(group), high.add(group));
                        (s.$load_split(low, high), next)
                    } else {
                        let from = (*octets).add(dim * 16);
                        (s.$load(from), s.$load(from.add(16)))
                    }
                }
            }

            #[inline(always)]
            unsafe fn values<S: Simd, const HALF: bool>(
                s: S,
                octet: *const Self,
                head_dim: usize,
                key: usize,
                at: usize,
            ) -> (S::V, S::V) {
                // SAFETY: the caller's promise.
                unsafe {
                    (
                        Self::value::<S, HALF>(s, octet, head_dim, key, at),
                        Self::value::<S, HALF>(s, octet, head_dim, key + 1, at),
                    )
                }
            }

            #[inline(always)]
            unsafe fn value<S: Simd, const HALF: bool>(
                s: S,
                octet: *const Self,
                head_dim: usize,
                key: usize,
                at: usize,
            ) -> S::V {
                // SAFETY: the caller's promise.
                unsafe {
                    let from = octet.add(key * head_dim + at);
                    if HALF { s.$load_half(from) } else { s.$load(from) }
                }
            }
        }
    };
}

one_by_one!(f32, false, load, load_half, load_split);
one_by_one!(i8, true, load_i8, load_i8_half, load_i8_split);

impl Cached for Bf16 {
    const KEY_STEP: usize = 2;
    const IS_SCALED: bool = false;
    const IS_PAIRED: bool = true;

    #[inline(always)]
    unsafe fn keys<S: Simd, const SPLIT: bool>(
        s: S,
        octets: *const *const Self,
        group: usize,
        dim: usize,
    ) -> (S::V, S::V) {
        // SAFETY: the caller's promise; a pair of dimensions of a group is 2 * `group` elements.
        unsafe {
            let (second, first) = if SPLIT {
                let (low, high) = ((*octets).add(dim * group), (*octets.add(1)).add(dim * group));
                s.load_pairs_split(low, high)
            } else {
                s.load_pairs((*octets).add(dim * 16))
            };
            (first, second)
        }
    }

    #[inline(always)]
    unsafe fn values<S: Simd, const HALF: bool>(
        s: S,
        octet: *const Self,
        head_dim: usize,
        key: usize,
        at: usize,
    ) -> (S::V, S::V) {
        // SAFETY: the caller's promise; `key` is even, so it begins a pair.
        unsafe {
            let from = octet.add(key * head_dim + at * 2);
            let (second, first) = if HALF { s.load_pairs_half(from) } else { s.load_pairs(from) };
            (first, second)
        }
    }

    #[inline(always)]
    unsafe fn value<S: Simd, const HALF: bool>(
        s: S,
        octet: *const Self,
        head_dim: usize,
        key: usize,
        at: usize,
    ) -> S::V {
        // SAFETY: the caller's promise.
        let pair = unsafe { Self::values::<S, HALF>(s, octet, head_dim, key & !1, at) };
        if key & 1 == 0 { pair.0 } else { pair.1 }
    }
}
