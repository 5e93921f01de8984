//! Storing a key or a value in its slot.
//!
//! `f32` is stored as it is and bfloat16 rounded. For `int8` the numbers x of one head of one token
//! have one scale:
//!
//! ```text
//! scale = max |x| / 127          q = x / scale, rounded to the nearest integer, ties to even
//! ```
//!
//! all in `f32`, so that x is within scale / 2 of q · scale (and a rounding of the quotient). Numbers
//! that are all below 127 · 2^−126, where a scale would lose its precision, become zero with scale zero.
//! Where one of them is NaN or infinite the scale is NaN, and so is whatever is computed with it.
//!
//! Elements are stored one by one with relaxed atomic stores, which cost the same as plain ones: two
//! tokens of one call may name the same slot, or neighbours in one cache line. Which of the two wins is
//! then open for each element, the scale being one of them, but no element is torn.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, Ordering};

use crate::element::{Bf16, KvElement};
use crate::layout::{KvLayout, MAX_HEAD_DIM};
use crate::simd::{LANES, Simd};
use crate::symmetric::{INTEGER, LARGEST, magnitude, nearest};

/// One head, with room for a whole vector at its end.
pub(crate) type Head = [f32; MAX_HEAD_DIM + LANES];

/// Where `(offset, dim)` lies in a tile.
pub(crate) type Place = fn(&KvLayout, usize, usize) -> usize;

/// What keys and values are stored as.
pub(crate) trait Stored: KvElement {
    /// Whether the numbers of a head are divided by a scale, which is stored behind them.
    const IS_SCALED: bool;

    /// Store one element so that a concurrent store is no data race.
    ///
    /// # Safety
    ///
    /// `to` is a writable element.
    unsafe fn store_relaxed(to: *mut Self, value: f32);
}

impl Stored for f32 {
    const IS_SCALED: bool = false;

    #[inline(always)]
    unsafe fn store_relaxed(to: *mut Self, value: f32) {
        // SAFETY: the caller's promise; an `f32` is as large and as aligned as an `AtomicU32`.
        unsafe { AtomicU32::from_ptr(to.cast()) }.store(value.to_bits(), Ordering::Relaxed);
    }
}

impl Stored for Bf16 {
    const IS_SCALED: bool = false;

    #[inline(always)]
    unsafe fn store_relaxed(to: *mut Self, value: f32) {
        let bits = Self::from_f32(value).0;
        // SAFETY: the caller's promise; a `Bf16` is as large and as aligned as an `AtomicU16`.
        unsafe { AtomicU16::from_ptr(to.cast()) }.store(bits, Ordering::Relaxed);
    }
}

impl Stored for i8 {
    const IS_SCALED: bool = true;

    #[inline(always)]
    unsafe fn store_relaxed(to: *mut Self, value: f32) {
        let byte = (value as Self).cast_unsigned();
        // SAFETY: the caller's promise; a byte is an `AtomicU8`.
        unsafe { AtomicU8::from_ptr(to.cast()) }.store(byte, Ordering::Relaxed);
    }
}

/// Store the first `head_dim` of `head` as the token at `offset` of `tile`. What is left in `head` is
/// open.
///
/// # Safety
///
/// `tile` is a writable tile of `layout`, and `place` gives places in it.
#[inline(always)]
pub(crate) unsafe fn store<S: Simd, C: Stored>(
    s: S,
    head: &mut Head,
    tile: *mut C,
    layout: &KvLayout,
    offset: usize,
    place: Place,
) {
    if C::IS_SCALED {
        let scale = quantize(s, head, layout.head_dim);
        let to = tile.cast::<u8>().wrapping_add(layout.scale_at(offset));
        // SAFETY: the caller's promise: the tile's scales are behind its numbers.
        unsafe { f32::store_relaxed(to.cast(), scale) };
    }
    // Every layout repeats after two dimensions.
    let [first, second, third] = [0, 1, 2].map(|dim| place(layout, offset, dim));
    let mut to = tile.wrapping_add(first);
    for pair in head[..layout.head_dim].chunks_exact(2) {
        // SAFETY: places are inside the tile.
        unsafe {
            C::store_relaxed(to, pair[0]);
            C::store_relaxed(to.wrapping_add(second).wrapping_sub(first), pair[1]);
        }
        to = to.wrapping_add(third - first);
    }
}

/// Replace the first `dim` numbers by the integers that stand for them; returns their scale.
#[inline(always)]
fn quantize<S: Simd>(s: S, head: &mut Head, dim: usize) -> f32 {
    let head = head.as_mut_ptr();
    // SAFETY: a head has `dim` numbers.
    let largest = unsafe { magnitude(s, head.cast_const(), dim) };
    let scale = if largest < LARGEST * f32::MIN_POSITIVE { 0.0 } else { largest / LARGEST };
    let divisor = s.splat(if scale == 0.0 { 1.0 } else { scale });
    for at in (0..dim).step_by(LANES) {
        // SAFETY: a head has `dim` numbers, and room for a whole vector at its end.
        unsafe {
            let near = nearest(s, s.load(head.add(at)), divisor);
            s.store(head.add(at), s.sub(near, s.splat(INTEGER)));
        }
    }
    scale
}
