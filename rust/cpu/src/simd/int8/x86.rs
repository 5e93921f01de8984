//! Products of int8 by `vpmaddwd`, which adds up pairs of products of i16, and by `vpdpbusd`, which
//! adds up fours of products of a u8 and an i8.

#![expect(clippy::needless_range_loop, reason = "loops over constants, unrolled into registers")]
#![expect(clippy::unused_self, reason = "`self` is the proof that the instructions exist")]

use std::arch::x86_64 as x86;
use std::arch::x86_64::{__m256, __m256i};

use super::{FOUR_BYTES, Int8, Int8Grid, Int8Kernel, LANES};
use crate::simd::Simd;
use crate::simd::avx2::{Avx2, Two};
use crate::simd::avx512::Avx512;

/// Bytes of a load that becomes 256 bits of i16.
const QUARTER: usize = FOUR_BYTES / 4;

/// Bytes of a load that becomes 512 bits of i16.
const HALF: usize = FOUR_BYTES / 2;

/// Proof that the machine has AVX-512 F, BW, VL, DQ and VNNI.
#[derive(Debug, Clone, Copy)]
struct Vnni(Avx512);

/// # Safety
///
/// The machine has AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run_avx2<K: Int8Kernel>(kernel: &K, item: usize) {
    // SAFETY: the caller's promise.
    kernel.run(unsafe { Avx2::new() }, item);
}

/// # Safety
///
/// The machine has AVX-512 F, BW, VL and DQ.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(super) unsafe fn run_avx512<K: Int8Kernel>(kernel: &K, item: usize) {
    // SAFETY: the caller's promise.
    kernel.run(unsafe { Avx512::new() }, item);
}

/// # Safety
///
/// The machine has AVX-512 F, BW, VL, DQ and VNNI.
#[target_feature(enable = "avx512vnni,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(super) unsafe fn run_vnni<K: Int8Kernel>(kernel: &K, item: usize) {
    // SAFETY: the caller's promise.
    kernel.run(Vnni(unsafe { Avx512::new() }), item);
}

impl Int8 for Avx2 {
    type S = Self;

    #[inline(always)]
    fn simd(self) -> Self {
        self
    }

    #[inline(always)]
    fn cover<G: Int8Grid>(self, grid: &G, num_rows: usize, num_panels: usize) {
        for panel in 0..num_panels {
            let mut row = 0;
            while row < num_rows {
                row += match num_rows - row {
                    1 => {
                        grid.tile::<Self, 1, 1>(self, row, panel);
                        1
                    }
                    2..=4 => {
                        grid.tile::<Self, 2, 1>(self, row, panel);
                        2
                    }
                    _ => {
                        grid.tile::<Self, 6, 1>(self, row, panel);
                        6
                    }
                };
            }
        }
    }

    #[inline(always)]
    unsafe fn sums<const R: usize, const P: usize>(
        self,
        x: [*const u64; R],
        panels: [*const u8; P],
        num_fours: usize,
    ) -> [[Two; P]; R] {
        // SAFETY: the caller's promise, and `self` is a proof of AVX2.
        unsafe {
            let mut out = [[self.splat(0.0); P]; R];
            for p in 0..P {
                if R <= 2 {
                    // Few rows: the panel goes by once, as memory brings it.
                    let sums = self.quarters::<R, 4>(x, panels[p], num_fours);
                    for r in 0..R {
                        let [a, b, c, d] = sums[r];
                        out[r][p] = Two(self.lanes(a, b), self.lanes(c, d));
                    }
                } else {
                    // Six rows by half a panel: twelve registers of sums, two of the weight, one of `x`.
                    let low = self.quarters::<R, 2>(x, panels[p], num_fours);
                    let high = self.quarters::<R, 2>(x, panels[p].add(HALF), num_fours);
                    for r in 0..R {
                        let ([a, b], [c, d]) = (low[r], high[r]);
                        out[r][p] = Two(self.lanes(a, b), self.lanes(c, d));
                    }
                }
            }
            out
        }
    }
}

impl Avx2 {
    /// Sums of `Q` times four rows of a panel, the first at `panel`: of each two neighbouring parts.
    ///
    /// # Safety
    ///
    /// As for [`Int8::sums`], but for where `panel` points.
    #[inline(always)]
    unsafe fn quarters<const R: usize, const Q: usize>(
        self,
        x: [*const u64; R],
        panel: *const u8,
        num_fours: usize,
    ) -> [[__m256i; Q]; R] {
        // SAFETY: the caller's promise, and `self` is a proof of AVX2.
        unsafe {
            let zero = x86::_mm256_setzero_si256();
            let mut sums = [[zero; Q]; R];
            for four in 0..num_fours {
                let mut w = [zero; Q];
                for q in 0..Q {
                    let at = panel.add(four * FOUR_BYTES + q * QUARTER);
                    w[q] = x86::_mm256_cvtepi8_epi16(x86::_mm_load_si128(at.cast()));
                }
                for r in 0..R {
                    let x = x86::_mm256_set1_epi64x(x[r].add(four).read().cast_signed());
                    for q in 0..Q {
                        let pairs = x86::_mm256_madd_epi16(x, w[q]);
                        sums[r][q] = x86::_mm256_add_epi32(sums[r][q], pairs);
                    }
                }
            }
            sums
        }
    }

    /// Eight sums from their parts, of four each in `a` and `b`.
    #[inline(always)]
    fn lanes(self, a: __m256i, b: __m256i) -> __m256 {
        // SAFETY: `self` is a proof of AVX2.
        unsafe {
            // Halves of the two come out crossed; the permutation puts them in order.
            let sums = x86::_mm256_hadd_epi32(a, b);
            let sums = x86::_mm256_permute4x64_epi64::<0b11_01_10_00>(sums);
            x86::_mm256_cvtepi32_ps(sums)
        }
    }
}

impl Int8 for Avx512 {
    type S = Self;

    #[inline(always)]
    fn simd(self) -> Self {
        self
    }

    /// Twelve rows take 24 of 32 registers for sums.
    #[inline(always)]
    fn cover<G: Int8Grid>(self, grid: &G, num_rows: usize, num_panels: usize) {
        for panel in 0..num_panels {
            for row in (0..num_rows).step_by(12) {
                match num_rows - row {
                    1 => grid.tile::<Self, 1, 1>(self, row, panel),
                    2..=4 => grid.tile::<Self, 4, 1>(self, row, panel),
                    _ => grid.tile::<Self, 12, 1>(self, row, panel),
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn sums<const R: usize, const P: usize>(
        self,
        x: [*const u64; R],
        panels: [*const u8; P],
        num_fours: usize,
    ) -> [[x86::__m512; P]; R] {
        // SAFETY: the caller's promise, and `self` is a proof of AVX-512 F, BW and DQ.
        unsafe {
            let zero = x86::_mm512_setzero_si512();
            // Of a lane two neighbouring sums, of eight lanes a register.
            let mut sums = [[[zero; 2]; P]; R];
            for four in 0..num_fours {
                for p in 0..P {
                    let at = panels[p].add(four * FOUR_BYTES);
                    let low = x86::_mm512_cvtepi8_epi16(x86::_mm256_load_si256(at.cast()));
                    let high = at.add(HALF).cast();
                    let high = x86::_mm512_cvtepi8_epi16(x86::_mm256_load_si256(high));
                    for r in 0..R {
                        let x = x86::_mm512_set1_epi64(x[r].add(four).read().cast_signed());
                        let [a, b] = sums[r][p];
                        sums[r][p] = [
                            x86::_mm512_add_epi32(a, x86::_mm512_madd_epi16(x, low)),
                            x86::_mm512_add_epi32(b, x86::_mm512_madd_epi16(x, high)),
                        ];
                    }
                }
            }
            let mut out = [[x86::_mm512_setzero_ps(); P]; R];
            for r in 0..R {
                for p in 0..P {
                    let [a, b] = sums[r][p];
                    // The lower half of each 64 bits becomes the sum of both, and is kept.
                    let a = x86::_mm512_add_epi32(a, x86::_mm512_srli_epi64::<32>(a));
                    let b = x86::_mm512_add_epi32(b, x86::_mm512_srli_epi64::<32>(b));
                    let low = x86::_mm512_castsi256_si512(x86::_mm512_cvtepi64_epi32(a));
                    let both = x86::_mm512_inserti32x8::<1>(low, x86::_mm512_cvtepi64_epi32(b));
                    out[r][p] = x86::_mm512_cvtepi32_ps(both);
                }
            }
            out
        }
    }
}

impl Int8 for Vnni {
    type S = Avx512;

    #[inline(always)]
    fn simd(self) -> Avx512 {
        self.0
    }

    /// Twelve rows by two panels take 24 of 32 registers for sums.
    #[inline(always)]
    fn cover<G: Int8Grid>(self, grid: &G, num_rows: usize, num_panels: usize) {
        for panel in (0..num_panels).step_by(2) {
            for row in (0..num_rows).step_by(12) {
                match (num_panels - panel, num_rows - row) {
                    (1, 1..=4) => grid.tile::<Self, 4, 1>(self, row, panel),
                    (1, _) => grid.tile::<Self, 12, 1>(self, row, panel),
                    (_, 1) => grid.tile::<Self, 1, 2>(self, row, panel),
                    (_, 2..=4) => grid.tile::<Self, 4, 2>(self, row, panel),
                    _ => grid.tile::<Self, 12, 2>(self, row, panel),
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn sums<const R: usize, const P: usize>(
        self,
        x: [*const u64; R],
        panels: [*const u8; P],
        num_fours: usize,
    ) -> [[x86::__m512; P]; R] {
        // SAFETY: the caller's promise, and `self` is a proof of AVX-512 F and VNNI.
        unsafe {
            // The instruction wraps around and does not saturate, so that what is 128 too much in each
            // number of `x` goes away exactly, whatever a sum was on the way.
            let mut sums = [[x86::_mm512_setzero_si512(); P]; R];
            for p in 0..P {
                let starts = panels[p].add(num_fours * FOUR_BYTES + size_of::<[f32; LANES]>());
                let starts = x86::_mm512_load_si512(starts.cast());
                for r in 0..R {
                    sums[r][p] = starts;
                }
            }
            for four in 0..num_fours {
                let mut w = [x86::_mm512_setzero_si512(); P];
                for p in 0..P {
                    w[p] = x86::_mm512_load_si512(panels[p].add(four * FOUR_BYTES).cast());
                }
                for r in 0..R {
                    let x = x86::_mm512_set1_epi32(x[r].cast::<i32>().add(four).read());
                    for p in 0..P {
                        sums[r][p] = x86::_mm512_dpbusd_epi32(sums[r][p], x, w[p]);
                    }
                }
            }
            let mut out = [[x86::_mm512_setzero_ps(); P]; R];
            for r in 0..R {
                for p in 0..P {
                    out[r][p] = x86::_mm512_cvtepi32_ps(sums[r][p]);
                }
            }
            out
        }
    }
}
