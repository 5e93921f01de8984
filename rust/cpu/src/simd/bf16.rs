//! Sums of products of pairs of bfloat16, sixteen side by side, by `vdpbf16ps`.
//!
//! The instruction adds the two products of a pair to a sum, the one in the upper half of 32 bits first, and
//! rounds to nearest after each:
//!
//! ```text
//! sum = fma(x[1], w[1], sum)
//! sum = fma(x[0], w[0], sum)
//! ```
//!
//! So pairs lie turned around, in panels and in rows of `x`: the first position of K in the upper half. Then
//! the sum is a chain in the order of K, with the bits of [`Simd::fma`]; but the instruction takes subnormal
//! numbers for zero and gives none, whatever a thread has set. (Intel's manual, volume 2, VDPBF16PS.)

#![expect(clippy::unused_self, reason = "`self` is the proof that the instructions exist")]

use std::arch::x86_64 as x86;
use std::arch::x86_64::{__m512, __m512bh, __m512i};

use super::avx512::Avx512;
use super::{LANES, Pair, Simd};

/// Bytes of a pair of positions of a panel.
pub(crate) const PAIR_BYTES: usize = LANES * size_of::<Pair>();

/// How far ahead of its use a panel is asked for, in bytes: a page, at whose end the machine's own prefetching
/// stops.
const AHEAD: usize = 4096;

/// Proof that the machine has AVX-512 F, BW, VL, DQ and BF16.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Dot(Avx512);

/// Work on products of pairs. As for [`Kernel`](super::Kernel), `run` must be `inline(always)`, and so must
/// everything in it that touches vectors.
pub(crate) trait DotKernel {
    /// Do it.
    fn run(&self, dot: Dot);
}

/// Run a kernel with the instructions.
///
/// # Safety
///
/// The machine has AVX-512 F, BW, VL, DQ and BF16.
#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(crate) unsafe fn run_dot<K: DotKernel>(kernel: &K) {
    // SAFETY: the caller's promise.
    kernel.run(Dot(unsafe { Avx512::new() }));
}

/// Sixteen pairs of bfloat16.
#[inline(always)]
fn pairs(bits: __m512i) -> __m512bh {
    // SAFETY: both are 512 bits.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(bits) }
}

impl Dot {
    /// The same proof, for everything else.
    #[inline(always)]
    pub(crate) fn simd(self) -> Avx512 {
        self.0
    }

    /// Sixteen pairs of zeros.
    #[inline(always)]
    pub(crate) fn no_pairs(self) -> __m512bh {
        // SAFETY: `self` is a proof of AVX-512 F.
        pairs(unsafe { x86::_mm512_setzero_si512() })
    }

    /// # Safety
    /// Sixteen pairs are readable at `from`.
    #[inline(always)]
    pub(crate) unsafe fn load(self, from: *const Pair) -> __m512bh {
        // SAFETY: the caller's promise, and `self` is a proof of AVX-512 F.
        pairs(unsafe { x86::_mm512_loadu_si512(from.cast()) })
    }

    /// # Safety
    /// Eight pairs are readable at `from`; the others are zeros.
    #[inline(always)]
    pub(crate) unsafe fn half(self, from: *const Pair) -> __m512bh {
        // SAFETY: the caller's promise, and `self` is a proof of AVX-512 F and AVX.
        unsafe { pairs(x86::_mm512_zextsi256_si512(x86::_mm256_loadu_si256(from.cast()))) }
    }

    /// # Safety
    /// Eight pairs are readable at each of `low` and `high`.
    #[inline(always)]
    pub(crate) unsafe fn split(self, low: *const Pair, high: *const Pair) -> __m512bh {
        // SAFETY: the caller's promise, and `self` is a proof of AVX-512 F and AVX.
        unsafe {
            let low = x86::_mm512_castsi256_si512(x86::_mm256_loadu_si256(low.cast()));
            let high = x86::_mm256_loadu_si256(high.cast());
            pairs(x86::_mm512_inserti64x4::<1>(low, high))
        }
    }

    /// The pair at `from`, sixteen times.
    ///
    /// # Safety
    ///
    /// It is readable.
    #[inline(always)]
    pub(crate) unsafe fn splat(self, from: *const Pair) -> __m512bh {
        // SAFETY: the caller's promise, and `self` is a proof of AVX-512 F. A pair is aligned as one
        // bfloat16 is.
        pairs(unsafe { x86::_mm512_set1_epi32(from.cast::<i32>().read_unaligned()) })
    }

    /// The first (0) or the second (1) of each pair, beside zeros.
    #[inline(always)]
    pub(crate) fn one_of(self, a: __m512bh, which: usize) -> __m512bh {
        let mask = if which == 0 { 0xffff_0000_u32 } else { 0xffff };
        // SAFETY: `self` is a proof of AVX-512 F; both types are 512 bits.
        unsafe {
            let a = std::mem::transmute::<__m512bh, __m512i>(a);
            pairs(x86::_mm512_and_si512(a, x86::_mm512_set1_epi32(mask.cast_signed())))
        }
    }

    /// Add the products of sixteen pairs to sixteen sums, those of the firsts first.
    #[inline(always)]
    pub(crate) fn add(self, sums: __m512, x: __m512bh, w: __m512bh) -> __m512 {
        // SAFETY: `self` is a proof of AVX-512 BF16.
        unsafe { x86::_mm512_dpbf16_ps(sums, x, w) }
    }

    /// Sums from zero over `num_pairs` pairs of `R` rows of `x` and the sixteen rows of `P` panels.
    ///
    /// # Safety
    ///
    /// Each of `x` has so many pairs, and each of `panels` so many times [`PAIR_BYTES`], aligned to them.
    #[inline(always)]
    pub(crate) unsafe fn sums<const R: usize, const P: usize>(
        self,
        x: [*const Pair; R],
        panels: [*const u8; P],
        num_pairs: usize,
    ) -> [[__m512; P]; R] {
        // SAFETY: the caller's promise, and `self` is a proof of AVX-512 F and BF16.
        unsafe {
            let mut sums = [[x86::_mm512_setzero_ps(); P]; R];
            for pair in 0..num_pairs {
                let mut w = [self.no_pairs(); P];
                for p in 0..P {
                    let at = panels[p].wrapping_add(pair * PAIR_BYTES);
                    w[p] = pairs(x86::_mm512_load_si512(at.cast()));
                    self.0.prefetch(at.wrapping_add(AHEAD));
                }
                for r in 0..R {
                    let x = self.splat(x[r].add(pair));
                    for p in 0..P {
                        sums[r][p] = self.add(sums[r][p], x, w[p]);
                    }
                }
            }
            sums
        }
    }
}
