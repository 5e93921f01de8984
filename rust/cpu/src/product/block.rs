//! Blocks as files have them: where their scales and numbers are.
//!
//! The layouts are those of GGML (`ggml-common.h`), described in the `gguf` package's `quants.py`.

use crate::element::f16_to_f32;

/// The binary16 at byte `at`.
#[inline(always)]
pub(super) fn half(block: &[u8], at: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([block[at], block[at + 1]]))
}

/// 32 numbers of four bits in `bytes[..16]`: the low halves, then the high ones.
#[inline(always)]
pub(super) fn half_bytes(bytes: &[u8]) -> [u8; 32] {
    let bytes = &bytes[..16];
    let mut out = [0; 32];
    for k in 0..16 {
        out[k] = bytes[k] & 15;
        out[k + 16] = bytes[k] >> 4;
    }
    out
}

/// Scale and minimum, of six bits each, of group `0..8` of a `Q4_K` block.
#[inline(always)]
pub(super) fn q4_k_scales(block: &[u8; 144], group: usize) -> (u8, u8) {
    let bytes = &block[4..16];
    if group < 4 {
        return (bytes[group] & 63, bytes[group + 4] & 63);
    }
    let both = bytes[group + 4];
    (both & 15 | bytes[group - 4] >> 6 << 4, both >> 4 | bytes[group] >> 6 << 4)
}

/// The 32 numbers of group `0..8` of a `Q4_K` block.
#[inline(always)]
pub(super) fn q4_k_numbers(block: &[u8; 144], group: usize) -> [u8; 32] {
    // 32 bytes hold two groups: the low halves are the first.
    let bytes = &block[16 + group / 2 * 32..][..32];
    let shift = group % 2 * 4;
    let mut out = [0; 32];
    for k in 0..32 {
        out[k] = bytes[k] >> shift & 15;
    }
    out
}

/// The scale of group `0..16` of a `Q6_K` block.
#[inline(always)]
pub(super) fn q6_k_scale(block: &[u8; 210], group: usize) -> i8 {
    block[192 + group].cast_signed()
}

/// The 16 numbers of group `0..16` of a `Q6_K` block, of six bits each.
#[inline(always)]
pub(super) fn q6_k_numbers(block: &[u8; 210], group: usize) -> [u8; 16] {
    // Half a block has 64 bytes of low bits, 32 of high ones, and 128 numbers in four runs.
    let (part, run, start) = (group / 8, group % 8 / 2, group % 2 * 16);
    let low = &block[part * 64 + run % 2 * 32 + start..][..16];
    let high = &block[128 + part * 32 + start..][..16];
    let mut out = [0; 16];
    for k in 0..16 {
        out[k] = low[k] >> (run / 2 * 4) & 15 | (high[k] >> (run * 2) & 3) << 4;
    }
    out
}
