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

use std::arch::x86_64 as x86;
use std::arch::x86_64::{__m512, __m512bh};

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

impl Dot {
    /// The same proof, for everything else.
    #[inline(always)]
    pub(crate) fn simd(self) -> Avx512 {
        self.0
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
                let mut w = [x86::_mm512_setzero_si512(); P];
                for p in 0..P {
                    let at = panels[p].wrapping_add(pair * PAIR_BYTES);
                    w[p] = x86::_mm512_load_si512(at.cast());
                    self.0.prefetch(at.wrapping_add(AHEAD));
                }
                for r in 0..R {
                    // A pair is aligned as one bfloat16 is.
                    let x = x86::_mm512_set1_epi32(x[r].add(pair).cast::<i32>().read_unaligned());
                    let x = std::mem::transmute::<x86::__m512i, __m512bh>(x);
                    for p in 0..P {
                        let w = std::mem::transmute::<x86::__m512i, __m512bh>(w[p]);
                        sums[r][p] = x86::_mm512_dpbf16_ps(sums[r][p], x, w);
                    }
                }
            }
            sums
        }
    }
}
