//! A vector is two 256-bit registers: lanes 0 to 7 and 8 to 15.

#![expect(clippy::unused_self, reason = "`self` is the proof that the instructions exist")]

use std::arch::x86_64 as x86;
use std::arch::x86_64::{__m128i, __m256, __m256i};

use super::dispatch::run_avx2;
use super::{Grid, Kernel, LANES, Simd};
use crate::element::Bf16;

/// Proof that the machine has AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2(());

/// Sixteen lanes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Two(pub(super) __m256, pub(super) __m256);

/// Sum of eight lanes, halves first.
///
/// # Safety
///
/// The machine has AVX2.
#[inline(always)]
pub(super) unsafe fn sum_of_8(a: __m256) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        let a = x86::_mm_add_ps(x86::_mm256_castps256_ps128(a), x86::_mm256_extractf128_ps::<1>(a));
        let a = x86::_mm_add_ps(a, x86::_mm_movehl_ps(a, a));
        x86::_mm_cvtss_f32(x86::_mm_add_ss(a, x86::_mm_shuffle_ps::<1>(a, a)))
    }
}

/// Largest of eight lanes, halves first.
///
/// # Safety
///
/// The machine has AVX2.
#[inline(always)]
pub(super) unsafe fn max_of_8(a: __m256) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        let a = x86::_mm_max_ps(x86::_mm256_castps256_ps128(a), x86::_mm256_extractf128_ps::<1>(a));
        let a = x86::_mm_max_ps(a, x86::_mm_movehl_ps(a, a));
        x86::_mm_cvtss_f32(x86::_mm_max_ss(a, x86::_mm_shuffle_ps::<1>(a, a)))
    }
}

/// The low and the high half of each byte.
///
/// # Safety
///
/// The machine has AVX2.
#[inline(always)]
unsafe fn half_bytes(bytes: __m128i) -> (__m128i, __m128i) {
    // SAFETY: the caller's promise.
    unsafe {
        let mask = x86::_mm_set1_epi8(15);
        let high = x86::_mm_and_si128(x86::_mm_srli_epi16::<4>(bytes), mask);
        (x86::_mm_and_si128(bytes, mask), high)
    }
}

/// Sixteen times four numbers of six bits, as bytes. See [`Simd::load_fours_u6`].
///
/// # Safety
///
/// The machine has AVX2; 32 bytes are readable at `low`, sixteen at `high`.
#[inline(always)]
pub(super) unsafe fn fours_u6(low: *const u8, high: *const u8) -> [__m128i; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let (a, b) = half_bytes(x86::_mm_loadu_si128(low.cast()));
        let (c, d) = half_bytes(x86::_mm_loadu_si128(low.add(LANES).cast()));
        let high = x86::_mm_loadu_si128(high.cast());
        let upper = x86::_mm_set1_epi8(0x30);
        // The two bits of each number, moved to bits 4 and 5.
        let a2 = x86::_mm_and_si128(x86::_mm_slli_epi16::<4>(high), upper);
        let b2 = x86::_mm_and_si128(x86::_mm_slli_epi16::<2>(high), upper);
        let c2 = x86::_mm_and_si128(high, upper);
        let d2 = x86::_mm_and_si128(x86::_mm_srli_epi16::<2>(high), upper);
        [
            x86::_mm_or_si128(a, a2),
            x86::_mm_or_si128(b, b2),
            x86::_mm_or_si128(c, c2),
            x86::_mm_or_si128(d, d2),
        ]
    }
}

impl Avx2 {
    /// # Safety
    ///
    /// The machine has AVX2, FMA and F16C.
    #[inline(always)]
    pub(crate) const unsafe fn new() -> Self {
        Self(())
    }

    /// First and second of each pair: a bfloat16 is the upper half of an `f32`.
    #[inline(always)]
    fn widen_pairs(self, pairs: __m256i) -> (__m256, __m256) {
        // SAFETY: `self` is a proof of AVX2.
        unsafe {
            let upper = x86::_mm256_set1_epi32(0xffff_0000_u32 as i32);
            (
                x86::_mm256_castsi256_ps(x86::_mm256_slli_epi32::<16>(pairs)),
                x86::_mm256_castsi256_ps(x86::_mm256_and_si256(pairs, upper)),
            )
        }
    }

    /// Eight bfloat16 as eight `f32`.
    #[inline(always)]
    fn widen(self, narrow: __m128i) -> __m256 {
        // SAFETY: `self` is a proof of AVX2.
        unsafe {
            let wide = x86::_mm256_cvtepu16_epi32(narrow);
            x86::_mm256_castsi256_ps(x86::_mm256_slli_epi32::<16>(wide))
        }
    }

    /// Eight lanes rounded to bfloat16, each in the lower half of 32 bits.
    #[inline(always)]
    fn narrow(self, a: __m256) -> __m256i {
        // SAFETY: `self` is a proof of AVX2.
        unsafe {
            let bits = x86::_mm256_castps_si256(a);
            let upper = x86::_mm256_srli_epi32::<16>(bits);
            let odd = x86::_mm256_and_si256(upper, x86::_mm256_set1_epi32(1));
            let round = x86::_mm256_add_epi32(odd, x86::_mm256_set1_epi32(0x7fff));
            let rounded = x86::_mm256_srli_epi32::<16>(x86::_mm256_add_epi32(bits, round));
            let is_nan = x86::_mm256_cmp_ps::<{ x86::_CMP_UNORD_Q }>(a, a);
            let quiet = x86::_mm256_or_si256(upper, x86::_mm256_set1_epi32(0x40));
            x86::_mm256_blendv_epi8(rounded, quiet, x86::_mm256_castps_si256(is_nan))
        }
    }

    /// Sixteen bytes, without sign.
    #[inline(always)]
    fn bytes(self, bytes: __m128i) -> Two {
        // SAFETY: `self` is a proof of AVX2.
        unsafe {
            let low = x86::_mm256_cvtepu8_epi32(bytes);
            let high = x86::_mm256_cvtepu8_epi32(x86::_mm_unpackhi_epi64(bytes, bytes));
            Two(x86::_mm256_cvtepi32_ps(low), x86::_mm256_cvtepi32_ps(high))
        }
    }

    /// Eight bytes, with sign.
    ///
    /// # Safety
    ///
    /// They are readable.
    #[inline(always)]
    unsafe fn eight_i8(self, from: *const i8) -> __m256 {
        // SAFETY: the caller's promise, and `self` is a proof of AVX2.
        unsafe {
            let wide = x86::_mm256_cvtepi8_epi32(x86::_mm_loadl_epi64(from.cast()));
            x86::_mm256_cvtepi32_ps(wide)
        }
    }

    /// All bits of lane i set where bit i of `mask` is.
    #[inline(always)]
    fn lanes_of(self, mask: u8) -> __m256 {
        // SAFETY: `self` is a proof of AVX2.
        unsafe {
            let bits = x86::_mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let set = x86::_mm256_and_si256(x86::_mm256_set1_epi32(i32::from(mask)), bits);
            x86::_mm256_castsi256_ps(x86::_mm256_cmpeq_epi32(set, bits))
        }
    }
}

/// Operations that are one instruction for each half.
macro_rules! instructions {
    ($($name:ident($($arg:ident),+) = $instruction:ident;)+) => {$(
        #[inline(always)]
        fn $name(self, $($arg: Two),+) -> Two {
            // SAFETY: `self` is a proof of AVX2 and FMA.
            unsafe { Two(x86::$instruction($($arg.0),+), x86::$instruction($($arg.1),+)) }
        }
    )+};
}

impl Simd for Avx2 {
    type V = Two;
    const IS_PLAIN: bool = false;
    const MANY_REGISTERS: bool = false;
    #[inline(always)]
    fn cover<G: Grid>(self, grid: &G, num_rows: usize, num_panels: usize) {
        for panel in 0..num_panels {
            for row in (0..num_rows).step_by(6) {
                match num_rows - row {
                    1 | 2 => grid.tile::<Self, 2, 1>(self, row, panel),
                    3 | 4 => grid.tile::<Self, 4, 1>(self, row, panel),
                    _ => grid.tile::<Self, 6, 1>(self, row, panel),
                }
            }
        }
    }
    #[inline(always)]
    fn cover_few<G: Grid>(self, grid: &G, num_rows: usize, num_panels: usize) {
        let mut panel = 0;
        while num_rows == 1 && panel + 2 <= num_panels {
            grid.tile::<Self, 1, 2>(self, 0, panel);
            panel += 2;
        }
        for panel in panel..num_panels {
            match num_rows {
                1 | 2 => grid.tile::<Self, 2, 1>(self, 0, panel),
                _ => grid.tile::<Self, 4, 1>(self, 0, panel),
            }
        }
    }

    instructions! {
        add(a, b) = _mm256_add_ps;
        sub(a, b) = _mm256_sub_ps;
        mul(a, b) = _mm256_mul_ps;
        div(a, b) = _mm256_div_ps;
        fma(a, b, c) = _mm256_fmadd_ps;
        max(a, b) = _mm256_max_ps;
        min(a, b) = _mm256_min_ps;
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Two {
        // SAFETY: `self` is a proof of AVX2.
        let half = unsafe { x86::_mm256_set1_ps(value) };
        Two(half, half)
    }
    #[inline(always)]
    fn select(self, mask: u16, a: Two, b: Two) -> Two {
        let (low, high) = (self.lanes_of(mask as u8), self.lanes_of((mask >> 8) as u8));
        // SAFETY: `self` is a proof of AVX2.
        unsafe { Two(x86::_mm256_blendv_ps(b.0, a.0, low), x86::_mm256_blendv_ps(b.1, a.1, high)) }
    }
    #[inline(always)]
    fn exponent(self, a: Two) -> Two {
        // SAFETY: `self` is a proof of AVX2.
        unsafe {
            let bias = x86::_mm256_set1_epi32(127);
            let low = x86::_mm256_add_epi32(x86::_mm256_castps_si256(a.0), bias);
            let high = x86::_mm256_add_epi32(x86::_mm256_castps_si256(a.1), bias);
            Two(
                x86::_mm256_castsi256_ps(x86::_mm256_slli_epi32::<23>(low)),
                x86::_mm256_castsi256_ps(x86::_mm256_slli_epi32::<23>(high)),
            )
        }
    }
    #[inline(always)]
    fn sum(self, a: Two) -> f32 {
        // SAFETY: `self` is a proof of AVX2.
        unsafe { sum_of_8(x86::_mm256_add_ps(a.0, a.1)) }
    }
    #[inline(always)]
    fn max_lane(self, a: Two) -> f32 {
        // SAFETY: `self` is a proof of AVX2.
        unsafe { max_of_8(x86::_mm256_max_ps(a.0, a.1)) }
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Two {
        // SAFETY: the caller's promise, and `self` is a proof of AVX2.
        unsafe { Two(x86::_mm256_loadu_ps(from), x86::_mm256_loadu_ps(from.add(8))) }
    }
    #[inline(always)]
    unsafe fn load_half(self, from: *const f32) -> Two {
        // SAFETY: the caller's promise, and `self` is a proof of AVX2.
        unsafe { Two(x86::_mm256_loadu_ps(from), x86::_mm256_setzero_ps()) }
    }
    #[inline(always)]
    unsafe fn load_split(self, low: *const f32, high: *const f32) -> Two {
        // SAFETY: the caller's promise, and `self` is a proof of AVX2.
        unsafe { Two(x86::_mm256_loadu_ps(low), x86::_mm256_loadu_ps(high)) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, a: Two) {
        // SAFETY: the caller's promise, and `self` is a proof of AVX2.
        unsafe {
            x86::_mm256_storeu_ps(to, a.0);
            x86::_mm256_storeu_ps(to.add(8), a.1);
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const Bf16) -> Two {
        // SAFETY: the caller's promise, and `self` is a proof of AVX2.
        unsafe {
            Two(
                self.widen(x86::_mm_loadu_si128(from.cast())),
                self.widen(x86::_mm_loadu_si128(from.add(8).cast())),
            )
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut Bf16, a: Two) {
        // SAFETY: the caller's promise, and `self` is a proof of AVX2.
        unsafe {
            // The pack works on 128-bit lanes; the permutation restores the order.
            let packed = x86::_mm256_packus_epi32(self.narrow(a.0), self.narrow(a.1));
            let ordered = x86::_mm256_permute4x64_epi64::<0b11_01_10_00>(packed);
            x86::_mm256_storeu_si256(to.cast(), ordered);
        }
    }
    #[inline(always)]
    unsafe fn load_pairs(self, from: *const Bf16) -> (Two, Two) {
        // SAFETY: the caller's promise: both halves are in the 32 elements.
        unsafe { self.load_pairs_split(from, from.add(16)) }
    }
    #[inline(always)]
    unsafe fn load_pairs_half(self, from: *const Bf16) -> (Two, Two) {
        // SAFETY: the caller's promise, and `self` is a proof of AVX2.
        unsafe {
            let (first, second) = self.widen_pairs(x86::_mm256_loadu_si256(from.cast()));
            let zero = x86::_mm256_setzero_ps();
            (Two(first, zero), Two(second, zero))
        }
    }
    #[inline(always)]
    unsafe fn load_pairs_split(self, low: *const Bf16, high: *const Bf16) -> (Two, Two) {
        // SAFETY: the caller's promise, and `self` is a proof of AVX2.
        unsafe {
            let low = self.widen_pairs(x86::_mm256_loadu_si256(low.cast()));
            let high = self.widen_pairs(x86::_mm256_loadu_si256(high.cast()));
            (Two(low.0, high.0), Two(low.1, high.1))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> Two {
        // SAFETY: the caller's promise, and `self` is a proof of F16C.
        unsafe {
            Two(
                x86::_mm256_cvtph_ps(x86::_mm_loadu_si128(from.cast())),
                x86::_mm256_cvtph_ps(x86::_mm_loadu_si128(from.add(8).cast())),
            )
        }
    }
    #[inline(always)]
    unsafe fn load_u8(self, from: *const u8) -> Two {
        // SAFETY: the caller's promise, and `self` is a proof of AVX2.
        self.bytes(unsafe { x86::_mm_loadu_si128(from.cast()) })
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> Two {
        // SAFETY: the caller's promise: both halves are in the sixteen bytes.
        unsafe { self.load_i8_split(from, from.add(8)) }
    }
    #[inline(always)]
    unsafe fn load_i8_half(self, from: *const i8) -> Two {
        // SAFETY: the caller's promise, and `self` is a proof of AVX2.
        unsafe { Two(self.eight_i8(from), x86::_mm256_setzero_ps()) }
    }
    #[inline(always)]
    unsafe fn load_i8_split(self, low: *const i8, high: *const i8) -> Two {
        // SAFETY: the caller's promise.
        unsafe { Two(self.eight_i8(low), self.eight_i8(high)) }
    }
    #[inline(always)]
    unsafe fn load_fours_u4(self, from: *const u8, half: usize) -> [Two; 4] {
        // SAFETY: the caller's promise, and `self` is a proof of AVX2.
        unsafe {
            let count = x86::_mm_cvtsi64_si128(16 * half as i64);
            let low = x86::_mm256_srl_epi32(x86::_mm256_loadu_si256(from.cast()), count);
            let high = x86::_mm256_srl_epi32(x86::_mm256_loadu_si256(from.add(32).cast()), count);
            let zero = x86::_mm256_setzero_ps();
            let mut out = [Two(zero, zero); 4];
            for (i, out) in out.iter_mut().enumerate() {
                let mask = x86::_mm256_set1_epi32(15 << (4 * i));
                *out = Two(
                    x86::_mm256_cvtepi32_ps(x86::_mm256_and_si256(low, mask)),
                    x86::_mm256_cvtepi32_ps(x86::_mm256_and_si256(high, mask)),
                );
            }
            out
        }
    }
    #[inline(always)]
    unsafe fn load_fours_u6(self, low: *const u8, high: *const u8) -> [Two; 4] {
        // SAFETY: the caller's promise, and `self` is a proof of AVX2.
        let [a, b, c, d] = unsafe { fours_u6(low, high) };
        [self.bytes(a), self.bytes(b), self.bytes(c), self.bytes(d)]
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: a hint, which is allowed any address.
        unsafe { x86::_mm_prefetch::<{ x86::_MM_HINT_T1 }>(at.cast()) }
    }

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: &K, item: usize) {
        // SAFETY: `self` is a proof of AVX2, FMA and F16C.
        unsafe { run_avx2(kernel, item) }
    }
}
