//! Running a kernel with the instructions of a set: the one place that enables them.

use super::Simd;
#[cfg(target_arch = "x86_64")]
use super::avx2::Avx2;
#[cfg(target_arch = "x86_64")]
use super::avx512::Avx512;
use super::portable::Portable;
use crate::isa::Isa;

/// Work that comes in items, written once for all instruction sets.
///
/// `run` must be `inline(always)`, and so must everything in it that touches vectors: only code
/// inlined into a function that enables the instructions is compiled to them.
pub(crate) trait Kernel: Sync {
    /// Compute one item.
    fn run<S: Simd>(&self, simd: S, item: usize);
}

/// Compute one item with the instructions of `isa`.
///
/// # Safety
///
/// The machine has them.
pub(crate) unsafe fn run<K: Kernel>(isa: Isa, kernel: &K, item: usize) {
    match isa {
        // SAFETY: the caller's promise.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { run_avx2(kernel, item) },
        // SAFETY: the caller's promise.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Vnni | Isa::Avx512Bf16 => unsafe { run_avx512(kernel, item) },
        _ => kernel.run(Portable, item),
    }
}

/// # Safety
///
/// The machine has AVX2, FMA and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run_avx2<K: Kernel>(kernel: &K, item: usize) {
    // SAFETY: the caller's promise.
    kernel.run(unsafe { Avx2::new() }, item);
}

/// # Safety
///
/// The machine has AVX-512 F, BW, VL and DQ.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(super) unsafe fn run_avx512<K: Kernel>(kernel: &K, item: usize) {
    // SAFETY: the caller's promise.
    kernel.run(unsafe { Avx512::new() }, item);
}
