//! What defines an element of a product, in plain Rust: a sum over chains of 128 positions of K.

use fastserve_cpu::Isa;

/// Whether multiply-adds of an instruction set are rounded once.
pub(crate) fn is_fused(isa: Isa) -> bool {
    isa != Isa::Portable || cfg!(target_arch = "aarch64")
}

/// One element.
pub(crate) fn chain(is_fused: bool, x: &[f32], w: &[f32], bias: Option<f32>) -> f32 {
    let mut total = 0.0_f32;
    for (x, w) in x.chunks(128).zip(w.chunks(128)) {
        let mut sum = 0.0_f32;
        for (&x, &w) in x.iter().zip(w) {
            sum = if is_fused { x.mul_add(w, sum) } else { x * w + sum };
        }
        total += sum;
    }
    bias.map_or(total, |bias| total + bias)
}
