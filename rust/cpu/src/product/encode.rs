//! From plain numbers to blocks of a file: how a weight of any format becomes one of eight or four bits
//! when it is loaded.

use super::weight::WeightFormat;
use crate::element::{f16_to_f32, f32_to_f16};
use crate::error::{ArgumentError, require};
use crate::symmetric::INTEGER;

/// Numbers of a block of either format.
const BLOCK: usize = 32;

/// `out` = `numbers` in blocks of `format`, which is [`WeightFormat::Q8_0`] or [`WeightFormat::Q4_1`].
///
/// `Q8_0`: the scale is the largest magnitude over 127, rounded to binary16, and a number is the integer
/// nearest to it over that. `Q4_1`: of several scales, for the whole range of the block and for parts of
/// it, the one with the least squared error. A scale gives each number an integer, and these give a scale
/// and a minimum by least squares, which are rounded to binary16 and give the integers that are stored
/// (the search of llama.cpp's K-quants, with all numbers of the same weight).
///
/// Every operation is one of `f32`, so the blocks are the same on every machine.
///
/// # Errors
///
/// `numbers` is not whole blocks, `out` has not as many, a number is not finite or too large for a scale
/// of binary16, or the format is another. `out` is unspecified then.
pub fn encode(format: WeightFormat, numbers: &[f32], out: &mut [u8]) -> Result<(), ArgumentError> {
    let quantize: fn(&[f32; BLOCK], &mut [u8]) = match format {
        WeightFormat::Q8_0 => q8_0,
        WeightFormat::Q4_1 => q4_1,
        _ => return Err(ArgumentError::new("format", format.name(), "Q8_0 or Q4_1")),
    };
    let (blocks, rest) = numbers.as_chunks::<BLOCK>();
    require(
        rest.is_empty(),
        "numbers",
        || format!("{} of them", numbers.len()),
        || format!("a multiple of {BLOCK}, which {} has to a block", format.name()),
    )?;
    let num_bytes = blocks.len() * format.block_bytes();
    require(
        out.len() == num_bytes,
        "out",
        || format!("{} bytes", out.len()),
        || format!("{num_bytes}, which {} numbers in {} take", numbers.len(), format.name()),
    )?;
    // The largest scale and minimum are below the largest number.
    let largest = f16_to_f32(0x7bff);
    let strange = numbers.iter().find(|number| number.is_nan() || number.abs() > largest);
    require(
        strange.is_none(),
        "numbers",
        || format!("{}", strange.copied().unwrap_or_default()),
        || format!("-{largest} to {largest}, for {}", format.name()),
    )?;
    for (block, out) in blocks.iter().zip(out.chunks_exact_mut(format.block_bytes())) {
        quantize(block, out);
    }
    Ok(())
}

/// The integer of `0..=MOST` nearest to `value`, ties to even. Without a call, so that loops over it become
/// vectors.
fn nearest(value: f32) -> f32 {
    let kept = if value > 0.0 { value } else { 0.0 };
    let kept = if kept < MOST { kept } else { MOST };
    kept + INTEGER - INTEGER
}

/// Sum of a block: halves are added until one number is left.
fn sum(mut numbers: [f32; BLOCK]) -> f32 {
    for half in [16, 8, 4, 2, 1] {
        for i in 0..half {
            numbers[i] += numbers[i + half];
        }
    }
    numbers[0]
}

fn q8_0(numbers: &[f32; BLOCK], out: &mut [u8]) {
    let most = numbers.iter().fold(0.0, |most: f32, number| most.max(number.abs()));
    let scale = f32_to_f16(most / 127.0);
    out[..2].copy_from_slice(&scale.to_le_bytes());
    let scale = f16_to_f32(scale);
    for (number, out) in numbers.iter().zip(&mut out[2..]) {
        let near = if scale > 0.0 { (number / scale).clamp(-127.0, 127.0) } else { 0.0 };
        *out = ((near + INTEGER).to_bits() as i8).cast_unsigned();
    }
}

/// The largest number of four bits.
const MOST: f32 = 15.0;

/// Candidates for a block's scale: its range is this many steps of it. More steps than there are numbers
/// cut off what lies far out, for the good of all others.
const STEPS: [f32; 7] = [15.0, 14.5, 15.5, 16.0, 16.5, 17.0, 18.0];

fn q4_1(numbers: &[f32; BLOCK], out: &mut [u8]) {
    let least = numbers.iter().copied().fold(f32::INFINITY, f32::min);
    let most = numbers.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut best = Fit::of(numbers, (most - least) / MOST, least);
    for steps in STEPS {
        let scale = (most - least) / steps;
        if scale > 0.0 {
            // What is cut off is cut off at both ends.
            let start = least + (steps - MOST).max(0.0) / 2.0 * scale;
            let (scale, min) = least_squares(numbers, scale, start);
            let fit = Fit::of(numbers, scale, min);
            if fit.error < best.error {
                best = fit;
            }
        }
    }
    out[..2].copy_from_slice(&best.scale.to_le_bytes());
    out[2..4].copy_from_slice(&best.min.to_le_bytes());
    let (low, high) = best.integers.split_at(BLOCK / 2);
    for ((low, high), out) in low.iter().zip(high).zip(&mut out[4..]) {
        *out = *low as u8 | (*high as u8) << 4;
    }
}

/// A block as it would be stored.
struct Fit {
    scale: u16,
    min: u16,
    integers: [f32; BLOCK],
    /// Sum of squares.
    error: f32,
}

impl Fit {
    fn of(numbers: &[f32; BLOCK], scale: f32, min: f32) -> Self {
        let (scale, min) = (f32_to_f16(scale), f32_to_f16(min));
        let (step, start) = (f16_to_f32(scale), f16_to_f32(min));
        // A scale of zero: whatever the difference, it is no step of it.
        let per_step = if step > 0.0 { 1.0 / step } else { 0.0 };
        let integers = numbers.map(|number| nearest((number - start) * per_step));
        let squares = std::array::from_fn(|i| {
            let off = integers[i] * step + start - numbers[i];
            off * off
        });
        Self { scale, min, integers, error: sum(squares) }
    }
}

/// Scale and minimum with the least squared error, for the integers that a scale and a start give.
fn least_squares(numbers: &[f32; BLOCK], scale: f32, start: f32) -> (f32, f32) {
    let count = BLOCK as f32;
    let per_step = 1.0 / scale;
    // From the start on, so that a block far from zero keeps its digits.
    let x = numbers.map(|number| number - start);
    let q = x.map(|x| nearest(x * per_step));
    let (sum_of_x, sum_of_q) = (sum(x), sum(q));
    let spread = count * sum(q.map(|q| q * q)) - sum_of_q * sum_of_q;
    if spread <= 0.0 {
        return (scale, start);
    }
    let products = sum(std::array::from_fn(|i| q[i] * x[i]));
    let fitted = (count * products - sum_of_q * sum_of_x) / spread;
    (fitted, start + (sum_of_x - fitted * sum_of_q) / count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::product::decode;
    use proptest::prelude::*;

    fn round_trip(format: WeightFormat, numbers: &[f32]) -> Vec<f32> {
        let mut bytes = vec![0; numbers.len() / BLOCK * format.block_bytes()];
        encode(format, numbers, &mut bytes).unwrap();
        let mut back = vec![0.0; numbers.len()];
        decode(format, &bytes, &mut back).unwrap();
        back
    }

    /// Sum of squares, in `f64`.
    fn error(a: &[f32], b: &[f32]) -> f64 {
        a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum()
    }

    /// The range of the block in fifteen steps, as ggml's reference quantizes.
    fn plain_q4_1(numbers: &[f32]) -> Vec<f32> {
        let half = |value: f32| f16_to_f32(f32_to_f16(value));
        let least = numbers.iter().copied().fold(f32::INFINITY, f32::min);
        let most = numbers.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let (step, start) = (half((most - least) / 15.0), half(least));
        let whole =
            |x: f32| if step > 0.0 { ((x - start) / step).round().clamp(0.0, 15.0) } else { 0.0 };
        numbers.iter().map(|&x| whole(x) * step + start).collect()
    }

    proptest! {
        #[test]
        fn numbers_of_eight_bits_are_within_half_a_step(
            numbers in prop::collection::vec(-4.0f32..4.0, BLOCK),
            exponent in -20..10,
        ) {
            let numbers: Vec<f32> = numbers.iter().map(|x| x * 2f32.powi(exponent)).collect();
            let most = numbers.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
            // A scale of binary16 may be off by 2^-11 of itself, or by 2^-25 where it is subnormal, which
            // counts 127 times.
            let step = most / 127.0;
            let slack = 127.0 * (step * 2f32.powi(-11)).max(2f32.powi(-25));
            for (x, back) in numbers.iter().zip(round_trip(WeightFormat::Q8_0, &numbers)) {
                prop_assert!((x - back).abs() <= step * 0.501 + slack, "{x} became {back}");
            }
        }

        #[test]
        fn four_bits_lose_no_more_than_by_the_range_of_the_block(
            numbers in prop::collection::vec(-1.0f32..1.0, BLOCK),
            far in prop::collection::vec((0..BLOCK, -8.0f32..8.0), 0..3),
            (exponent, shift) in (-20..10, -2.0f32..2.0),
        ) {
            let mut numbers = numbers;
            for (at, x) in far {
                numbers[at] = x;
            }
            let numbers: Vec<f32> =
                numbers.iter().map(|x| (x + shift) * 2f32.powi(exponent)).collect();
            let got = error(&numbers, &round_trip(WeightFormat::Q4_1, &numbers));
            let plain = error(&numbers, &plain_q4_1(&numbers));
            prop_assert!(got <= plain * 1.0001 + 1e-12, "{got} is over {plain}");
        }

        #[test]
        fn what_four_bits_can_say_they_say(
            integers in prop::collection::vec(0u8..16, BLOCK),
            (scale, min) in (1u16..0x4000, 0u16..0x4000),
        ) {
            let (step, start) = (f16_to_f32(scale), -f16_to_f32(min));
            let mut integers = integers;
            integers[3..5].copy_from_slice(&[0, 15]);
            let numbers: Vec<f32> = integers.iter().map(|&q| f32::from(q) * step + start).collect();
            let got = error(&numbers, &round_trip(WeightFormat::Q4_1, &numbers));
            // Sums of f32 are not exact, so a neighbouring binary16 may be found instead.
            let size = 15.0 * f64::from(step) + f64::from(start).abs();
            prop_assert!(got <= 32.0 * (size * 2f64.powi(-9)).powi(2), "{got} for steps of {step}");
        }
    }

    #[test]
    fn four_bits_are_nearer_than_by_the_range_of_the_block() {
        // Sums of twelve uniform numbers: what weights look like.
        let mut state = 1u32;
        let mut uniform = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 16_777_216.0
        };
        let numbers: Vec<f32> =
            (0..BLOCK * 500).map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0).collect();
        let got = error(&numbers, &round_trip(WeightFormat::Q4_1, &numbers));
        let plain: f64 = numbers.chunks(BLOCK).map(|block| error(block, &plain_q4_1(block))).sum();
        assert!(got < 0.9 * plain, "{got} of {plain}");
    }

    #[test]
    fn equal_numbers_stay_equal() {
        for value in [0.0_f32, 1.0, -3.0, 0.000_1, 65_504.0, -65_504.0] {
            for format in [WeightFormat::Q8_0, WeightFormat::Q4_1] {
                // A scale is within half of its last bit, which counts up to 127 times.
                let slack = (value.abs() * 2f32.powi(-10)).max(127.0 * 2f32.powi(-25));
                for back in round_trip(format, &[value; BLOCK]) {
                    assert!((back - value).abs() <= slack, "{back}, {value}");
                }
            }
        }
        assert_eq!(round_trip(WeightFormat::Q4_1, &[0.0; BLOCK]), [0.0; BLOCK]);
    }

    #[test]
    fn refusals() {
        let text = |format, numbers: &[f32], len| {
            encode(format, numbers, &mut vec![0; len]).unwrap_err().to_string()
        };
        let block = [0.0; BLOCK];
        let strange = |value| {
            let mut block = block;
            block[17] = value;
            text(WeightFormat::Q4_1, &block, 20)
        };
        assert_eq!(text(WeightFormat::F32, &block, 128), "format: got F32, want Q8_0 or Q4_1");
        assert_eq!(
            text(WeightFormat::Q8_0, &block[1..], 34),
            "numbers: got 31 of them, want a multiple of 32, which Q8_0 has to a block"
        );
        assert_eq!(
            text(WeightFormat::Q4_1, &block, 19),
            "out: got 19 bytes, want 20, which 32 numbers in Q4_1 take"
        );
        assert_eq!(strange(f32::NAN), "numbers: got NaN, want -65504 to 65504, for Q4_1");
        assert_eq!(strange(f32::INFINITY), "numbers: got inf, want -65504 to 65504, for Q4_1");
        assert_eq!(strange(-65_505.0), "numbers: got -65505, want -65504 to 65504, for Q4_1");
    }
}
