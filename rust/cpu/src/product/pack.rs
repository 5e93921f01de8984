//! From a row of a file to its lane of a panel.
//!
//! A panel's block holds the same block of 16 rows: first what belongs to the whole block, then the
//! numbers in the order of K, those of 16 rows side by side. Two half bytes that share a byte are
//! neighbours in K, the first in the low half.
//!
//! ```text
//! F32, BF16   number[16]
//! Q8_0        scale f16[16]                 number i8[32][16]
//! Q4_0        scale f16[16]                 pair u8[16][16]
//! Q4_1        scale f16[16] min f16[16]     pair u8[16][16]
//! Q4_K        scale f16[16] min f16[16]     8 × ( scale u8[16] min u8[16] pair u8[16][16] )
//! Q6_K        scale f16[16]                 16 × ( scale i8[16] low pair u8[8][16] high four u8[4][16] )
//! ```
//!
//! The layouts of the files' blocks are those of GGML (`ggml-common.h`), described in the `gguf`
//! package's `quants.py`.

use super::weight::WeightFormat;
use crate::element::f16_to_f32;
use crate::simd::LANES;

/// Where a row goes.
pub(super) struct Rows<'a> {
    /// The panel's bytes.
    pub(super) panel: &'a mut [u8],
    /// Which of its 16 rows.
    pub(super) lane: usize,
}

/// Store one row, `bytes` as in a file.
pub(super) fn row(format: WeightFormat, rows: Rows<'_>, bytes: &[u8]) {
    let Rows { panel, lane } = rows;
    let blocks = bytes.chunks_exact(format.block_bytes());
    let places = panel.chunks_exact_mut(format.panel_block_bytes());
    for (block, place) in blocks.zip(places) {
        let mut to = Share { place, at: 0, lane };
        match format {
            WeightFormat::F32 | WeightFormat::Bf16 => to.put(block),
            WeightFormat::F16 => {
                let value = f16_to_f32(u16::from_le_bytes([block[0], block[1]]));
                to.put(&value.to_le_bytes());
            }
            WeightFormat::Q8_0 => {
                to.put(&block[..2]);
                block[2..].iter().for_each(|&number| to.put(&[number]));
            }
            WeightFormat::Q4_0 => {
                to.put(&block[..2]);
                to.put_pairs(|k| half_byte(&block[2..], k));
            }
            WeightFormat::Q4_1 => {
                to.put(&block[..2]);
                to.put(&block[2..4]);
                to.put_pairs(|k| half_byte(&block[4..], k));
            }
            WeightFormat::Q4K => q4_k(&mut to, block),
            WeightFormat::Q6K => q6_k(&mut to, block),
        }
    }
}

/// One row's share of a panel's block, filled from the start.
struct Share<'a> {
    place: &'a mut [u8],
    at: usize,
    lane: usize,
}

impl Share<'_> {
    /// The next number, of as many bytes.
    fn put(&mut self, bytes: &[u8]) {
        self.place[self.at + self.lane * bytes.len()..][..bytes.len()].copy_from_slice(bytes);
        self.at += LANES * bytes.len();
    }

    /// 32 numbers of four bits.
    fn put_pairs(&mut self, number: impl Fn(usize) -> u8) {
        for k in (0..32).step_by(2) {
            self.put(&[number(k) | number(k + 1) << 4]);
        }
    }
}

/// Number `k` of 32: the low halves of 16 bytes, then the high ones.
fn half_byte(bytes: &[u8], k: usize) -> u8 {
    if k < 16 { bytes[k] & 15 } else { bytes[k - 16] >> 4 }
}

fn q4_k(to: &mut Share<'_>, block: &[u8]) {
    to.put(&block[..2]);
    to.put(&block[2..4]);
    let (scales, numbers) = (&block[4..16], &block[16..]);
    for group in 0..8 {
        let (scale, min) = if group < 4 {
            (scales[group] & 63, scales[group + 4] & 63)
        } else {
            let both = scales[group + 4];
            (both & 15 | scales[group - 4] >> 6 << 4, both >> 4 | scales[group] >> 6 << 4)
        };
        to.put(&[scale]);
        to.put(&[min]);
        // 32 bytes hold two groups: the low halves are the first.
        let bytes = &numbers[group / 2 * 32..];
        to.put_pairs(|k| bytes[k] >> (group % 2 * 4) & 15);
    }
}

fn q6_k(to: &mut Share<'_>, block: &[u8]) {
    to.put(&block[208..]);
    for group in 0..16 {
        // Half a block has 64 bytes of low bits, 32 of high ones, and 128 numbers in four runs.
        let (low, high) = (&block[group / 8 * 64..], &block[128 + group / 8 * 32..]);
        let (run, start) = (group % 8 / 2, group % 2 * 16);
        let low = |k: usize| low[run % 2 * 32 + start + k] >> (run / 2 * 4) & 15;
        let high = |k: usize| high[start + k] >> (run * 2) & 3;
        to.put(&block[192 + group..=192 + group]);
        for k in (0..16).step_by(2) {
            to.put(&[low(k) | low(k + 1) << 4]);
        }
        for k in (0..16).step_by(4) {
            to.put(&[high(k) | high(k + 1) << 2 | high(k + 2) << 4 | high(k + 3) << 6]);
        }
    }
}
