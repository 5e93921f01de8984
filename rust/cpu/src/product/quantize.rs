//! From `f32` to int8, symmetric and by rows: weights when they are packed, `x` in every product.
//!
//! ```text
//! scale   largest magnitude of the row / 127
//! number  the row's element / scale, rounded to the nearest integer, ties to even, -127 to 127
//! ```
//!
//! Each operation is one of `f32`, rounded. Where the scale is 0 (a row of zeros, or of numbers below
//! 127 times half the smallest subnormal) the numbers are too.

use super::pack::Rows;
use crate::element::{Bf16, DType};
use crate::error::{ArgumentError, require};
use crate::simd::{FOUR, FOUR_BYTES, Form, LANES, Lanes, Simd};
use crate::symmetric::{INTEGER, LARGEST, magnitude, nearest};
use crate::view::Matrix;

/// Bytes of a panel behind its numbers: scales and starts.
pub(super) const TAIL_BYTES: usize = 2 * 4 * LANES;

/// What a row's elements are divided by.
#[inline(always)]
fn divisor(scale: f32) -> f32 {
    if scale > 0.0 { scale } else { f32::INFINITY }
}

fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes))
}

/// Refuse numbers that have no scale.
pub(super) fn check_finite(rows: &[u8]) -> Result<(), ArgumentError> {
    let strange = floats(rows).find(|number| !number.is_finite());
    require(
        strange.is_none(),
        "rows",
        || format!("{}", strange.unwrap_or_default()),
        || "finite numbers, for int8".to_owned(),
    )
}

/// Store one row of a weight, `bytes` of finite `f32`.
pub(super) fn pack(Rows { panel, lane }: Rows<'_>, bytes: &[u8]) {
    let scale = floats(bytes).fold(0.0, |most: f32, number| most.max(number.abs())) / LARGEST;
    let divisor = divisor(scale);
    let mut sum = 0;
    let (numbers, tail) = panel.split_at_mut(bytes.len().div_ceil(4 * FOUR) * FOUR_BYTES);
    let places = numbers.chunks_exact_mut(FOUR_BYTES);
    for (place, four) in places.zip(bytes.chunks(4 * FOUR)) {
        let mut codes = [0; FOUR];
        for (code, number) in codes.iter_mut().zip(floats(four)) {
            let near = (number / divisor).clamp(-LARGEST, LARGEST) + INTEGER;
            let near = near.to_bits() as i8;
            sum += i32::from(near);
            *code = near.cast_unsigned();
        }
        place[lane * FOUR..][..FOUR].copy_from_slice(&codes);
    }
    let start = -128 * sum;
    tail[lane * 4..][..4].copy_from_slice(&scale.to_ne_bytes());
    tail[4 * (LANES + lane)..][..4].copy_from_slice(&start.to_ne_bytes());
}

/// Rows of `x` in the form that an instruction set takes, and their scales.
#[derive(Clone, Copy)]
pub(super) struct Codes {
    pub(super) form: Form,
    /// Numbers from the start of a row to the next: whole vectors.
    pub(super) stride: usize,
    /// Row after row.
    pub(super) numbers: *mut u64,
    /// One a row.
    pub(super) scales: *mut f32,
}

// SAFETY: while they are written each row is one thread's alone, and then they are only read.
unsafe impl Sync for Codes {}

impl Codes {
    /// Bytes from the start of a row to the next.
    pub(super) fn row_bytes(&self) -> usize {
        self.stride * self.form.size()
    }

    /// The numbers of a row.
    #[inline(always)]
    pub(super) fn row(&self, row: usize) -> *const u64 {
        self.at(row, 0)
    }

    /// The numbers of a row from `at` on, a multiple of 16.
    #[inline(always)]
    fn at(&self, row: usize, at: usize) -> *mut u64 {
        self.numbers.wrapping_add((row * self.stride + at) * self.form.size() / size_of::<u64>())
    }

    /// The scale of a row.
    ///
    /// # Safety
    ///
    /// There is such a row.
    #[inline(always)]
    pub(super) unsafe fn scale(&self, row: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { self.scales.add(row).read() }
    }

    /// Store sixteen numbers of a row from `at` on: the last bits of `near`.
    ///
    /// # Safety
    ///
    /// There is such a row, this thread's alone, and `at` is a multiple of 16 inside it.
    #[inline(always)]
    unsafe fn put(&self, row: usize, at: usize, near: [f32; LANES]) {
        let to = self.at(row, at);
        // SAFETY: the caller's promise: a row is whole vectors.
        unsafe {
            match self.form {
                Form::Wide => {
                    to.cast::<[i16; LANES]>().write(near.map(|near| near.to_bits() as i16));
                }
                Form::Biased => {
                    to.cast::<[u8; LANES]>().write(near.map(|near| near.to_bits() as u8 ^ 128));
                }
            }
        }
    }
    /// Quantize a row.
    ///
    /// One with NaN or infinity has a scale of NaN, so that all its results are NaN.
    ///
    /// # Safety
    ///
    /// `x` has such a row, and so have the codes, of as many numbers; no other thread uses theirs.
    #[inline(always)]
    pub(super) unsafe fn quantize<S: Simd>(&self, s: S, x: &Matrix<'_>, row: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            match x.dtype() {
                DType::F32 => self.quantize_as::<S, f32>(s, x, row),
                DType::Bf16 => self.quantize_as::<S, Bf16>(s, x, row),
            }
        }
    }

    /// # Safety
    ///
    /// As for [`quantize`](Self::quantize).
    #[inline(always)]
    unsafe fn quantize_as<S: Simd, T: Lanes>(&self, s: S, x: &Matrix<'_>, row: usize) {
        let (x, len) = (x.row::<T>(row), x.num_cols());
        // SAFETY: a row of `len` elements.
        let scale = unsafe { magnitude(s, x, len) } / LARGEST;
        let divisor = s.splat(divisor(scale));
        for at in (0..len).step_by(LANES) {
            // SAFETY: a row of `len` elements, and as many numbers, which are this thread's.
            unsafe {
                let near = nearest(s, T::load_first(s, x.add(at), len - at), divisor);
                let mut lanes = [0.0; LANES];
                s.store(lanes.as_mut_ptr(), near);
                self.put(row, at, lanes);
            }
        }
        // SAFETY: one scale a row.
        unsafe { self.scales.add(row).write(scale) };
    }
}
