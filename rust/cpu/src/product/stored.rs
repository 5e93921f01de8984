//! From stored numbers to `f32`, sixteen rows and four positions of K at a time.
//!
//! The operations are those that define a format, in their order and each rounded: scale, then minimum.
//! So a weight has the bits that dequantizing it has.

use super::weight::WeightFormat;
use crate::element::Bf16;
use crate::simd::{LANES, Simd};

/// Positions of K that [`Stored::four`] gives.
pub(super) const FOUR: usize = 4;

/// A format of packed weights. See `pack` for the layouts.
pub(super) trait Stored {
    /// Positions of K with the same scales.
    const GROUP: usize;

    /// What a group's numbers have in common.
    type Scales<V: Copy>: Copy;

    /// Scales of a group, and where its numbers are.
    ///
    /// # Safety
    ///
    /// `panel` is a panel of this format with more than `group` groups.
    unsafe fn open<S: Simd>(
        s: S,
        panel: *const u8,
        group: usize,
    ) -> (Self::Scales<S::V>, *const u8);

    /// Numbers `4 * at ..` of a group.
    ///
    /// # Safety
    ///
    /// `numbers` is from [`open`](Self::open), and `at` below `GROUP / 4`.
    unsafe fn four<S: Simd>(
        s: S,
        scales: Self::Scales<S::V>,
        numbers: *const u8,
        at: usize,
    ) -> [S::V; FOUR];
}

/// `f32` as they are.
pub(super) struct Plain;

impl Stored for Plain {
    const GROUP: usize = FOUR;
    type Scales<V: Copy> = ();

    #[inline(always)]
    unsafe fn open<S: Simd>(_s: S, panel: *const u8, group: usize) -> ((), *const u8) {
        ((), panel.wrapping_add(group * FOUR * LANES * size_of::<f32>()))
    }
    #[inline(always)]
    unsafe fn four<S: Simd>(s: S, (): (), numbers: *const u8, _at: usize) -> [S::V; FOUR] {
        let from: *const f32 = numbers.cast();
        // SAFETY: the caller's promise: four times sixteen numbers.
        unsafe {
            [
                s.load(from),
                s.load(from.add(LANES)),
                s.load(from.add(2 * LANES)),
                s.load(from.add(3 * LANES)),
            ]
        }
    }
}

/// bfloat16 in pairs, the second of each first.
pub(super) struct Pairs;

impl Stored for Pairs {
    const GROUP: usize = FOUR;
    type Scales<V: Copy> = ();

    #[inline(always)]
    unsafe fn open<S: Simd>(_s: S, panel: *const u8, group: usize) -> ((), *const u8) {
        ((), panel.wrapping_add(group * FOUR * LANES * size_of::<Bf16>()))
    }
    #[inline(always)]
    unsafe fn four<S: Simd>(s: S, (): (), numbers: *const u8, _at: usize) -> [S::V; FOUR] {
        let from: *const Bf16 = numbers.cast();
        // SAFETY: the caller's promise: two times sixteen pairs.
        let ((b, a), (d, c)) = unsafe { (s.load_pairs(from), s.load_pairs(from.add(2 * LANES))) };
        [a, b, c, d]
    }
}

/// `scale * number`, bytes.
struct Q8;

impl Stored for Q8 {
    const GROUP: usize = 32;
    type Scales<V: Copy> = V;

    #[inline(always)]
    unsafe fn open<S: Simd>(s: S, panel: *const u8, group: usize) -> (S::V, *const u8) {
        let block = panel.wrapping_add(group * 34 * LANES);
        // SAFETY: the caller's promise.
        (unsafe { s.load_f16(block.cast()) }, block.wrapping_add(2 * LANES))
    }
    #[inline(always)]
    unsafe fn four<S: Simd>(s: S, scale: S::V, numbers: *const u8, at: usize) -> [S::V; FOUR] {
        let from = numbers.wrapping_add(at * FOUR * LANES).cast::<i8>();
        let mut out = [scale; FOUR];
        for (i, out) in out.iter_mut().enumerate() {
            // SAFETY: the caller's promise: four times sixteen bytes.
            *out = s.mul(unsafe { s.load_i8(from.wrapping_add(i * LANES)) }, scale);
        }
        out
    }
}

/// What position i of four half bytes comes too large by, see [`Simd::load_fours_u4`]. Powers of two, so
/// that a scale takes them back without a rounding: no scale here is below 2^-24.
const TOO_LARGE: [f32; FOUR] = [1.0, 16.0, 256.0, 4096.0];

/// Positions `4 * at ..` of a group of half bytes, too large.
///
/// # Safety
///
/// `numbers` has more than `at` times sixteen times two bytes.
#[inline(always)]
unsafe fn half_bytes<S: Simd>(s: S, numbers: *const u8, at: usize) -> [S::V; FOUR] {
    // SAFETY: the caller's promise; fours come in twos.
    unsafe { s.load_fours_u4(numbers.add(at / 2 * 4 * LANES), at % 2) }
}

/// A scale for each of four positions that come too large.
#[inline(always)]
fn scales_of_four<S: Simd>(s: S, scale: S::V) -> [S::V; FOUR] {
    let mut out = [scale; FOUR];
    for (out, by) in out.iter_mut().zip(TOO_LARGE) {
        *out = s.mul(scale, s.splat(1.0 / by));
    }
    out
}

/// `scale * (number - 8)`, half bytes.
struct Q4Signed;

impl Stored for Q4Signed {
    const GROUP: usize = 32;
    type Scales<V: Copy> = [V; FOUR];

    #[inline(always)]
    unsafe fn open<S: Simd>(s: S, panel: *const u8, group: usize) -> ([S::V; FOUR], *const u8) {
        let block = panel.wrapping_add(group * 18 * LANES);
        // SAFETY: the caller's promise.
        let scale = unsafe { s.load_f16(block.cast()) };
        (scales_of_four(s, scale), block.wrapping_add(2 * LANES))
    }
    #[inline(always)]
    unsafe fn four<S: Simd>(
        s: S,
        scales: [S::V; FOUR],
        numbers: *const u8,
        at: usize,
    ) -> [S::V; FOUR] {
        // SAFETY: the caller's promise: eight fours.
        let mut out = unsafe { half_bytes(s, numbers, at) };
        for i in 0..FOUR {
            out[i] = s.mul(s.sub(out[i], s.splat(8.0 * TOO_LARGE[i])), scales[i]);
        }
        out
    }
}

/// `scale * number + min`, half bytes.
struct Q4Min;

impl Stored for Q4Min {
    const GROUP: usize = 32;
    type Scales<V: Copy> = ([V; FOUR], V);

    #[inline(always)]
    unsafe fn open<S: Simd>(
        s: S,
        panel: *const u8,
        group: usize,
    ) -> (Self::Scales<S::V>, *const u8) {
        let block = panel.wrapping_add(group * 20 * LANES);
        // SAFETY: the caller's promise.
        let (scale, min) =
            unsafe { (s.load_f16(block.cast()), s.load_f16(block.add(2 * LANES).cast())) };
        ((scales_of_four(s, scale), min), block.wrapping_add(4 * LANES))
    }
    #[inline(always)]
    unsafe fn four<S: Simd>(
        s: S,
        (scales, min): Self::Scales<S::V>,
        numbers: *const u8,
        at: usize,
    ) -> [S::V; FOUR] {
        // SAFETY: the caller's promise: eight fours.
        let mut out = unsafe { half_bytes(s, numbers, at) };
        for i in 0..FOUR {
            out[i] = s.add(s.mul(out[i], scales[i]), min);
        }
        out
    }
}

/// `scale * number - min`, half bytes; scale and minimum are bytes times a scale of 256 numbers.
struct Q4K;

impl Stored for Q4K {
    const GROUP: usize = 32;
    type Scales<V: Copy> = ([V; FOUR], V);

    #[inline(always)]
    unsafe fn open<S: Simd>(
        s: S,
        panel: *const u8,
        group: usize,
    ) -> (Self::Scales<S::V>, *const u8) {
        let block = panel.wrapping_add(group / 8 * 148 * LANES);
        let own = block.wrapping_add((4 + group % 8 * 18) * LANES);
        // SAFETY: the caller's promise.
        let scales = unsafe {
            let scale = s.mul(s.load_u8(own), s.load_f16(block.cast()));
            let min = s.mul(s.load_u8(own.add(LANES)), s.load_f16(block.add(2 * LANES).cast()));
            (scales_of_four(s, scale), min)
        };
        (scales, own.wrapping_add(2 * LANES))
    }
    #[inline(always)]
    unsafe fn four<S: Simd>(
        s: S,
        (scales, min): Self::Scales<S::V>,
        numbers: *const u8,
        at: usize,
    ) -> [S::V; FOUR] {
        // SAFETY: the caller's promise: eight fours.
        let mut out = unsafe { half_bytes(s, numbers, at) };
        for i in 0..FOUR {
            out[i] = s.sub(s.mul(out[i], scales[i]), min);
        }
        out
    }
}

/// `scale * (number - 32)`, six bits; the scale is a byte times a scale of 256 numbers.
struct Q6K;

impl Stored for Q6K {
    const GROUP: usize = 16;
    type Scales<V: Copy> = V;

    #[inline(always)]
    unsafe fn open<S: Simd>(s: S, panel: *const u8, group: usize) -> (S::V, *const u8) {
        let block = panel.wrapping_add(group / 16 * 210 * LANES);
        let own = block.wrapping_add((2 + group % 16 * 13) * LANES);
        // SAFETY: the caller's promise.
        let scale = unsafe { s.mul(s.load_i8(own.cast()), s.load_f16(block.cast())) };
        (scale, own.wrapping_add(LANES))
    }
    #[inline(always)]
    unsafe fn four<S: Simd>(s: S, scale: S::V, numbers: *const u8, at: usize) -> [S::V; FOUR] {
        let low = numbers.wrapping_add(at * 2 * LANES);
        let high = numbers.wrapping_add((8 + at) * LANES);
        // SAFETY: the caller's promise: 32 and 16 bytes.
        let mut out = unsafe { s.load_fours_u6(low, high) };
        for out in &mut out {
            *out = s.mul(s.sub(*out, s.splat(32.0)), scale);
        }
        out
    }
}

/// Something to do with a format that is known at run time only.
pub(super) trait ForFormat {
    /// Do it.
    fn run<S: Simd, W: Stored>(&self, s: S);
}

/// Do something with the type that stands for `format`.
#[inline(always)]
pub(super) fn for_format<S: Simd>(s: S, format: WeightFormat, what: &impl ForFormat) {
    match format {
        WeightFormat::F32 | WeightFormat::F16 => what.run::<S, Plain>(s),
        WeightFormat::Bf16 => what.run::<S, Pairs>(s),
        WeightFormat::Q8_0 => what.run::<S, Q8>(s),
        WeightFormat::Q4_0 => what.run::<S, Q4Signed>(s),
        WeightFormat::Q4_1 => what.run::<S, Q4Min>(s),
        WeightFormat::Q4K => what.run::<S, Q4K>(s),
        WeightFormat::Q6K => what.run::<S, Q6K>(s),
        WeightFormat::I8 => unreachable!("its products are of integers"),
    }
}
