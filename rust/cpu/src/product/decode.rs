//! From blocks of a file to plain numbers, for what is not multiplied as it is stored.
//!
//! The operations are those of the `gguf` package's `dequantize`, in their order and each rounded, so
//! that the bits are the same.

use super::block;
use super::weight::WeightFormat;
use crate::element::{Bf16, Element};
use crate::error::{ArgumentError, require};

/// `out` = the numbers of `blocks`, which are as in a file; rounded once where `T` is [`Bf16`].
///
/// # Errors
///
/// `out` is not whole blocks, `blocks` has not as many, or the format is that of no file; nothing is
/// written.
pub fn decode<T: Element>(
    format: WeightFormat,
    blocks: &[u8],
    out: &mut [T],
) -> Result<(), ArgumentError> {
    let (len, count) = (out.len(), format.block_elements());
    require(
        len.is_multiple_of(count),
        "out",
        || format!("{len} numbers"),
        || format!("a multiple of {count}, which {} has to a block", format.name()),
    )?;
    let num_bytes = len / count * format.block_bytes();
    require(
        blocks.len() == num_bytes,
        "blocks",
        || format!("{} bytes", blocks.len()),
        || format!("{num_bytes}, which {len} numbers in {} take", format.name()),
    )?;
    match format {
        WeightFormat::F32 => each(blocks, out, |&bytes, out| {
            *out = [T::narrow(f32::from_le_bytes(bytes))];
        }),
        WeightFormat::F16 => each(blocks, out, |bytes: &[u8; 2], out| {
            *out = [T::narrow(block::half(bytes, 0))];
        }),
        WeightFormat::Bf16 => each(blocks, out, |&bytes, out| {
            *out = [T::narrow(Bf16(u16::from_le_bytes(bytes)).to_f32())];
        }),
        WeightFormat::Q8_0 => each(blocks, out, q8_0),
        WeightFormat::Q4_0 => each(blocks, out, q4_0),
        WeightFormat::Q4_1 => each(blocks, out, q4_1),
        WeightFormat::Q4K => each(blocks, out, q4_k),
        WeightFormat::Q6K => each(blocks, out, q6_k),
        WeightFormat::I8 => {
            let want = "a format of files, which I8 is not";
            return Err(ArgumentError::new("format", format.name(), want));
        }
    }
    Ok(())
}

/// One block after the other.
fn each<T, const BYTES: usize, const COUNT: usize>(
    blocks: &[u8],
    out: &mut [T],
    one: impl Fn(&[u8; BYTES], &mut [T; COUNT]),
) {
    let (blocks, out) = (blocks.as_chunks().0, out.as_chunks_mut().0);
    for (block, out) in blocks.iter().zip(out) {
        one(block, out);
    }
}

fn q8_0<T: Element>(block: &[u8; 34], out: &mut [T; 32]) {
    let scale = block::half(block, 0);
    for (out, &number) in out.iter_mut().zip(&block[2..]) {
        *out = T::narrow(f32::from(number.cast_signed()) * scale);
    }
}

fn q4_0<T: Element>(block: &[u8; 18], out: &mut [T; 32]) {
    let scale = block::half(block, 0);
    for (out, number) in out.iter_mut().zip(block::half_bytes(&block[2..])) {
        *out = T::narrow((f32::from(number) - 8.0) * scale);
    }
}

fn q4_1<T: Element>(block: &[u8; 20], out: &mut [T; 32]) {
    let (scale, min) = (block::half(block, 0), block::half(block, 2));
    for (out, number) in out.iter_mut().zip(block::half_bytes(&block[4..])) {
        *out = T::narrow(f32::from(number) * scale + min);
    }
}

fn q4_k<T: Element>(block: &[u8; 144], out: &mut [T; 256]) {
    let (scale_of_all, min_of_all) = (block::half(block, 0), block::half(block, 2));
    for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, min) = block::q4_k_scales(block, group);
        let (scale, min) = (f32::from(scale) * scale_of_all, f32::from(min) * min_of_all);
        for (out, number) in out.iter_mut().zip(block::q4_k_numbers(block, group)) {
            *out = T::narrow(f32::from(number) * scale - min);
        }
    }
}

fn q6_k<T: Element>(block: &[u8; 210], out: &mut [T; 256]) {
    let scale_of_all = block::half(block, 208);
    for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = f32::from(block::q6_k_scale(block, group)) * scale_of_all;
        for (out, number) in out.iter_mut().zip(block::q6_k_numbers(block, group)) {
            *out = T::narrow((f32::from(number) - 32.0) * scale);
        }
    }
}
