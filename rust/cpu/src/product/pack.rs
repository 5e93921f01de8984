//! From a row of a file to its lane of a panel.
//!
//! A panel's block holds the same block of 16 rows: first what belongs to the whole block, then the
//! numbers in the order of K, those of 16 rows side by side. Half bytes that share a byte, and eights of
//! them that share a word, are neighbours in K, the first lowest: a mask of 16 words then has as many
//! numbers, in the lanes where they belong.
//!
//! ```text
//! F32         number[16]
//! BF16        pair of numbers[16], the second first
//! Q8_0        scale f16[16]                 number i8[32][16]
//! Q4_0        scale f16[16]                 eight u32[4][16]
//! Q4_1        scale f16[16] min f16[16]     eight u32[4][16]
//! Q4_K        scale f16[16] min f16[16]     8 × ( scale u8[16] min u8[16] eight u32[4][16] )
//! Q6_K        scale f16[16]                 16 × ( scale i8[16] low pair u8[8][16] high four u8[4][16] )
//! ```
//!
//! I8 is as products of int8 want it, see `simd::int8`.

use super::weight::WeightFormat;
use super::{block, quantize};
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
    match format {
        WeightFormat::F32 => each(format, rows, bytes, |to, number: &[u8; 4]| to.put(number)),
        WeightFormat::Bf16 => pairs(rows, bytes),
        WeightFormat::F16 => each(format, rows, bytes, |to, number: &[u8; 2]| {
            to.put(&block::half(number, 0).to_le_bytes());
        }),
        WeightFormat::Q8_0 => each(format, rows, bytes, |to, block: &[u8; 34]| {
            to.put(&block[..2]);
            block[2..].iter().for_each(|&number| to.put(&[number]));
        }),
        WeightFormat::Q4_0 => each(format, rows, bytes, |to, block: &[u8; 18]| {
            to.put(&block[..2]);
            to.put_eights(&block::half_bytes(&block[2..]));
        }),
        WeightFormat::Q4_1 => each(format, rows, bytes, |to, block: &[u8; 20]| {
            to.put(&block[..2]);
            to.put(&block[2..4]);
            to.put_eights(&block::half_bytes(&block[4..]));
        }),
        WeightFormat::Q4K => each(format, rows, bytes, q4_k),
        WeightFormat::Q6K => each(format, rows, bytes, q6_k),
        WeightFormat::I8 => quantize::pack(rows, bytes),
    }
}

/// Pairs of numbers of two bytes, each turned around. The last number of an odd row is a second one
/// without a first.
fn pairs(Rows { panel, lane }: Rows<'_>, bytes: &[u8]) {
    const PAIR: usize = 4;
    let (pairs, last) = bytes.as_chunks::<PAIR>();
    let mut places = panel.chunks_exact_mut(PAIR * LANES).map(|place| &mut place[lane * PAIR..]);
    for (&[a, b, c, d], place) in pairs.iter().zip(&mut places) {
        place[..PAIR].copy_from_slice(&[c, d, a, b]);
    }
    if let (&[a, b], Some(place)) = (last, places.next()) {
        place[2..PAIR].copy_from_slice(&[a, b]);
    }
}

/// One block after the other, each to its place in the panel.
fn each<const BYTES: usize>(
    format: WeightFormat,
    Rows { panel, lane }: Rows<'_>,
    bytes: &[u8],
    one: impl Fn(&mut Share<'_>, &[u8; BYTES]),
) {
    let places = panel.chunks_exact_mut(format.panel_block_bytes());
    for (block, place) in bytes.as_chunks().0.iter().zip(places) {
        one(&mut Share { place, at: 0, lane }, block);
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

    /// Numbers of four bits, eight to a word.
    fn put_eights(&mut self, numbers: &[u8; 32]) {
        for &[a, b, c, d, e, f, g, h] in numbers.as_chunks().0 {
            self.put(&[a | b << 4, c | d << 4, e | f << 4, g | h << 4]);
        }
    }

    /// Numbers of four bits, two to a byte.
    fn put_pairs(&mut self, numbers: &[u8]) {
        for [low, high] in numbers.as_chunks().0 {
            self.put(&[low | high << 4]);
        }
    }
}

fn q4_k(to: &mut Share<'_>, block: &[u8; 144]) {
    to.put(&block[..2]);
    to.put(&block[2..4]);
    for group in 0..8 {
        let (scale, min) = block::q4_k_scales(block, group);
        to.put(&[scale]);
        to.put(&[min]);
        to.put_eights(&block::q4_k_numbers(block, group));
    }
}

fn q6_k(to: &mut Share<'_>, block: &[u8; 210]) {
    to.put(&block[208..]);
    for group in 0..16 {
        to.put(&block::q6_k_scale(block, group).to_le_bytes());
        let numbers = block::q6_k_numbers(block, group);
        to.put_pairs(&numbers.map(|number| number & 15));
        for [a, b, c, d] in numbers.map(|number| number >> 4).as_chunks().0 {
            to.put(&[a | b << 2 | c << 4 | d << 6]);
        }
    }
}
