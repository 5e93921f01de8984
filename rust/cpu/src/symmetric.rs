//! int8 around zero: what quantized activations and quantized keys and values have in common.
//!
//! ```text
//! scale    largest magnitude / 127
//! integer  number / scale, rounded to the nearest, ties to even, -127 to 127
//! ```
//!
//! Each operation is one of `f32`, rounded. What is done with a scale near zero is the callers' own.

use crate::simd::{LANES, Lanes, Simd};

/// The largest integer.
pub(crate) const LARGEST: f32 = 127.0;

/// A sum with it has an integer for its last bits: a float of 2^23 to 2^24 has no fraction.
pub(crate) const INTEGER: f32 = 12_582_912.0;

/// Largest magnitude of `len` numbers; NaN where one of them is NaN or infinite.
///
/// # Safety
///
/// They are readable at `from`.
#[inline(always)]
pub(crate) unsafe fn magnitude<S: Simd, T: Lanes>(s: S, from: *const T, len: usize) -> f32 {
    let zero = s.splat(0.0);
    let (mut largest, mut strange) = (zero, zero);
    for at in (0..len).step_by(LANES) {
        // SAFETY: the caller's promise.
        let value = unsafe { T::load_first(s, from.add(at), len - at) };
        largest = s.max(s.max(value, s.sub(zero, value)), largest);
        // Zero times a number is zero, and times NaN or infinity NaN: a maximum may pass over it.
        strange = s.fma(value, zero, strange);
    }
    s.max_lane(largest) + s.sum(strange)
}

/// The integers nearest to sixteen numbers over `divisor`, plus [`INTEGER`]: they are the last bits.
#[inline(always)]
pub(crate) fn nearest<S: Simd>(s: S, numbers: S::V, divisor: S::V) -> S::V {
    let near = s.min(s.max(s.div(numbers, divisor), s.splat(-LARGEST)), s.splat(LARGEST));
    s.add(near, s.splat(INTEGER))
}
