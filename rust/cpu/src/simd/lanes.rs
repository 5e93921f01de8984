//! Loading and storing vectors of any element type, and the parts of a row that fill no vector.

use super::{LANES, Simd};
use crate::element::{Bf16, Element};

/// An element type that vectors are made of.
pub(crate) trait Lanes: Element {
    /// Sixteen elements.
    ///
    /// # Safety
    ///
    /// They are readable.
    unsafe fn load<S: Simd>(s: S, from: *const Self) -> S::V;

    /// Write sixteen elements.
    ///
    /// # Safety
    ///
    /// They are writable.
    unsafe fn store<S: Simd>(s: S, to: *mut Self, a: S::V);

    /// The first `len` of sixteen lanes; the others are zero.
    ///
    /// # Safety
    ///
    /// `len` elements are readable.
    #[inline(always)]
    unsafe fn load_first<S: Simd>(s: S, from: *const Self, len: usize) -> S::V {
        if len >= LANES {
            // SAFETY: the caller's promise.
            return unsafe { Self::load(s, from) };
        }
        let mut lanes = [0.0; LANES];
        for (i, lane) in lanes.iter_mut().take(len).enumerate() {
            // SAFETY: the caller's promise.
            *lane = unsafe { from.add(i).read() }.widen();
        }
        // SAFETY: an array of sixteen.
        unsafe { s.load(lanes.as_ptr()) }
    }

    /// Write the first `len` lanes.
    ///
    /// # Safety
    ///
    /// `len` elements are writable.
    #[inline(always)]
    unsafe fn store_first<S: Simd>(s: S, to: *mut Self, len: usize, a: S::V) {
        if len >= LANES {
            // SAFETY: the caller's promise.
            return unsafe { Self::store(s, to, a) };
        }
        let mut lanes = [0.0; LANES];
        // SAFETY: an array of sixteen.
        unsafe { s.store(lanes.as_mut_ptr(), a) };
        for (i, &lane) in lanes.iter().take(len).enumerate() {
            // SAFETY: the caller's promise.
            unsafe { to.add(i).write(Self::narrow(lane)) };
        }
    }
}

impl Lanes for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, from: *const Self) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { s.load(from) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, to: *mut Self, a: S::V) {
        // SAFETY: the caller's promise.
        unsafe { s.store(to, a) }
    }
}

impl Lanes for Bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, from: *const Self) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { s.load_bf16(from) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, to: *mut Self, a: S::V) {
        // SAFETY: the caller's promise.
        unsafe { s.store_bf16(to, a) }
    }
}
