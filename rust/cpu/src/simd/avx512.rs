//! A vector is one 512-bit register.

#![expect(clippy::unused_self, reason = "`self` is the proof that the instructions exist")]

use std::arch::x86_64 as x86;
use std::arch::x86_64::{__m128i, __m256, __m512, __m512i};

use super::avx2::{fours_u6, max_of_8, sum_of_8};
use super::dispatch::run_avx512;
use super::{Grid, Kernel, Simd};
use crate::element::Bf16;

/// Proof that the machine has AVX-512 F, BW, VL and DQ.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// # Safety
    ///
    /// The machine has AVX-512 F, BW, VL and DQ.
    #[inline(always)]
    pub(crate) const unsafe fn new() -> Self {
        Self(())
    }

    /// The lower and the upper eight lanes.
    #[inline(always)]
    fn halves(self, a: __m512) -> (__m256, __m256) {
        // SAFETY: `self` is a proof of AVX-512.
        unsafe { (x86::_mm512_castps512_ps256(a), x86::_mm512_extractf32x8_ps::<1>(a)) }
    }

    /// Sixteen bytes, without sign.
    #[inline(always)]
    fn bytes(self, bytes: __m128i) -> __m512 {
        // SAFETY: `self` is a proof of AVX-512.
        unsafe { x86::_mm512_cvtepi32_ps(x86::_mm512_cvtepu8_epi32(bytes)) }
    }

    /// Sixteen bytes, with sign.
    #[inline(always)]
    fn signed_bytes(self, bytes: __m128i) -> __m512 {
        // SAFETY: `self` is a proof of AVX-512.
        unsafe { x86::_mm512_cvtepi32_ps(x86::_mm512_cvtepi8_epi32(bytes)) }
    }

    /// First and second of each pair: a bfloat16 is the upper half of an `f32`.
    #[inline(always)]
    fn widen_pairs(self, pairs: __m512i) -> (__m512, __m512) {
        // SAFETY: `self` is a proof of AVX-512.
        unsafe {
            let upper = x86::_mm512_set1_epi32(0xffff_0000_u32 as i32);
            (
                x86::_mm512_castsi512_ps(x86::_mm512_slli_epi32::<16>(pairs)),
                x86::_mm512_castsi512_ps(x86::_mm512_and_si512(pairs, upper)),
            )
        }
    }
}

/// Operations that are one instruction.
macro_rules! instructions {
    ($($name:ident($($arg:ident),+) = $instruction:ident;)+) => {$(
        #[inline(always)]
        fn $name(self, $($arg: __m512),+) -> __m512 {
            // SAFETY: `self` is a proof of AVX-512.
            unsafe { x86::$instruction($($arg),+) }
        }
    )+};
}

impl Simd for Avx512 {
    type V = __m512;
    const IS_PLAIN: bool = false;
    const MANY_REGISTERS: bool = true;
    #[inline(always)]
    fn cover<G: Grid>(self, grid: &G, num_rows: usize, num_panels: usize) {
        for panel in (0..num_panels).step_by(2) {
            for row in (0..num_rows).step_by(12) {
                match (num_panels - panel, num_rows - row) {
                    (1, 1..=4) => grid.tile::<Self, 4, 1>(self, row, panel),
                    (1, _) => grid.tile::<Self, 12, 1>(self, row, panel),
                    (_, 1..=4) => grid.tile::<Self, 4, 2>(self, row, panel),
                    _ => grid.tile::<Self, 12, 2>(self, row, panel),
                }
            }
        }
    }
    #[inline(always)]
    fn cover_few<G: Grid>(self, grid: &G, num_rows: usize, num_panels: usize) {
        for panel in (0..num_panels).step_by(2) {
            match (num_panels - panel, num_rows) {
                (1, _) => grid.tile::<Self, 4, 1>(self, 0, panel),
                (_, 1) => grid.tile::<Self, 1, 2>(self, 0, panel),
                _ => grid.tile::<Self, 4, 2>(self, 0, panel),
            }
        }
    }

    instructions! {
        add(a, b) = _mm512_add_ps;
        sub(a, b) = _mm512_sub_ps;
        mul(a, b) = _mm512_mul_ps;
        div(a, b) = _mm512_div_ps;
        fma(a, b, c) = _mm512_fmadd_ps;
        max(a, b) = _mm512_max_ps;
        min(a, b) = _mm512_min_ps;
    }

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        // SAFETY: `self` is a proof of AVX-512.
        unsafe { x86::_mm512_set1_ps(value) }
    }
    #[inline(always)]
    fn select(self, mask: u16, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` is a proof of AVX-512.
        unsafe { x86::_mm512_mask_blend_ps(mask, b, a) }
    }
    #[inline(always)]
    fn exponent(self, a: __m512) -> __m512 {
        // SAFETY: `self` is a proof of AVX-512.
        unsafe {
            let n = x86::_mm512_add_epi32(x86::_mm512_castps_si512(a), x86::_mm512_set1_epi32(127));
            x86::_mm512_castsi512_ps(x86::_mm512_slli_epi32::<23>(n))
        }
    }
    #[inline(always)]
    fn sum(self, a: __m512) -> f32 {
        let (low, high) = self.halves(a);
        // SAFETY: `self` is a proof of AVX-512, which includes AVX2.
        unsafe { sum_of_8(x86::_mm256_add_ps(low, high)) }
    }
    #[inline(always)]
    fn max_lane(self, a: __m512) -> f32 {
        let (low, high) = self.halves(a);
        // SAFETY: `self` is a proof of AVX-512, which includes AVX2.
        unsafe { max_of_8(x86::_mm256_max_ps(low, high)) }
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        // SAFETY: the caller's promise, and `self` is a proof of AVX-512.
        unsafe { x86::_mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn load_half(self, from: *const f32) -> __m512 {
        // SAFETY: the caller's promise, and `self` is a proof of AVX-512.
        unsafe { x86::_mm512_zextps256_ps512(x86::_mm256_loadu_ps(from)) }
    }
    #[inline(always)]
    unsafe fn load_split(self, low: *const f32, high: *const f32) -> __m512 {
        // SAFETY: the caller's promise, and `self` is a proof of AVX-512.
        unsafe {
            let low = x86::_mm512_castps256_ps512(x86::_mm256_loadu_ps(low));
            x86::_mm512_insertf32x8::<1>(low, x86::_mm256_loadu_ps(high))
        }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, a: __m512) {
        // SAFETY: the caller's promise, and `self` is a proof of AVX-512.
        unsafe { x86::_mm512_storeu_ps(to, a) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const Bf16) -> __m512 {
        // SAFETY: the caller's promise, and `self` is a proof of AVX-512.
        unsafe {
            let wide = x86::_mm512_cvtepu16_epi32(x86::_mm256_loadu_si256(from.cast()));
            x86::_mm512_castsi512_ps(x86::_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut Bf16, a: __m512) {
        // SAFETY: the caller's promise, and `self` is a proof of AVX-512.
        unsafe {
            let bits = x86::_mm512_castps_si512(a);
            let upper = x86::_mm512_srli_epi32::<16>(bits);
            let odd = x86::_mm512_and_si512(upper, x86::_mm512_set1_epi32(1));
            let round = x86::_mm512_add_epi32(odd, x86::_mm512_set1_epi32(0x7fff));
            let rounded = x86::_mm512_srli_epi32::<16>(x86::_mm512_add_epi32(bits, round));
            let is_nan = x86::_mm512_cmp_ps_mask::<{ x86::_CMP_UNORD_Q }>(a, a);
            let quiet = x86::_mm512_or_si512(upper, x86::_mm512_set1_epi32(0x40));
            let narrow = x86::_mm512_mask_mov_epi32(rounded, is_nan, quiet);
            x86::_mm256_storeu_si256(to.cast(), x86::_mm512_cvtepi32_epi16(narrow));
        }
    }
    #[inline(always)]
    unsafe fn load_pairs(self, from: *const Bf16) -> (__m512, __m512) {
        // SAFETY: the caller's promise, and `self` is a proof of AVX-512.
        self.widen_pairs(unsafe { x86::_mm512_loadu_si512(from.cast()) })
    }
    #[inline(always)]
    unsafe fn load_pairs_half(self, from: *const Bf16) -> (__m512, __m512) {
        // SAFETY: the caller's promise, and `self` is a proof of AVX-512.
        self.widen_pairs(unsafe {
            x86::_mm512_zextsi256_si512(x86::_mm256_loadu_si256(from.cast()))
        })
    }
    #[inline(always)]
    unsafe fn load_pairs_split(self, low: *const Bf16, high: *const Bf16) -> (__m512, __m512) {
        // SAFETY: the caller's promise, and `self` is a proof of AVX-512.
        self.widen_pairs(unsafe {
            let low = x86::_mm512_castsi256_si512(x86::_mm256_loadu_si256(low.cast()));
            x86::_mm512_inserti64x4::<1>(low, x86::_mm256_loadu_si256(high.cast()))
        })
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> __m512 {
        // SAFETY: the caller's promise, and `self` is a proof of AVX-512.
        unsafe { x86::_mm512_cvtph_ps(x86::_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_u8(self, from: *const u8) -> __m512 {
        // SAFETY: the caller's promise, and `self` is a proof of AVX-512.
        self.bytes(unsafe { x86::_mm_loadu_si128(from.cast()) })
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> __m512 {
        // SAFETY: the caller's promise, and `self` is a proof of AVX-512.
        self.signed_bytes(unsafe { x86::_mm_loadu_si128(from.cast()) })
    }
    #[inline(always)]
    unsafe fn load_i8_half(self, from: *const i8) -> __m512 {
        // SAFETY: the caller's promise, and `self` is a proof of AVX-512.
        self.signed_bytes(unsafe { x86::_mm_loadl_epi64(from.cast()) })
    }
    #[inline(always)]
    unsafe fn load_i8_split(self, low: *const i8, high: *const i8) -> __m512 {
        // SAFETY: the caller's promise, and `self` is a proof of AVX-512.
        self.signed_bytes(unsafe {
            let (low, high) = (x86::_mm_loadl_epi64(low.cast()), x86::_mm_loadl_epi64(high.cast()));
            x86::_mm_unpacklo_epi64(low, high)
        })
    }
    #[inline(always)]
    unsafe fn load_fours_u4(self, from: *const u8, half: usize) -> [__m512; 4] {
        // SAFETY: the caller's promise, and `self` is a proof of AVX-512.
        unsafe {
            let count = x86::_mm_cvtsi64_si128(16 * half as i64);
            let numbers = x86::_mm512_srl_epi32(x86::_mm512_loadu_si512(from.cast()), count);
            let mut out = [x86::_mm512_setzero_ps(); 4];
            for (i, out) in out.iter_mut().enumerate() {
                let mask = x86::_mm512_set1_epi32(15 << (4 * i));
                *out = x86::_mm512_cvtepi32_ps(x86::_mm512_and_si512(numbers, mask));
            }
            out
        }
    }
    #[inline(always)]
    unsafe fn load_fours_u6(self, low: *const u8, high: *const u8) -> [__m512; 4] {
        // SAFETY: the caller's promise, and `self` is a proof of AVX-512.
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
        // SAFETY: `self` is a proof of AVX-512.
        unsafe { run_avx512(kernel, item) }
    }
}
