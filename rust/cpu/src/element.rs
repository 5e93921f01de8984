//! Element types: what is stored. Arithmetic is always in `f32`.

use crate::layout::KvDType;

/// How an array stores its numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// The upper half of a binary32, carried as `uint16`.
    Bf16,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }

    /// The name that Python uses for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16 (as uint16)",
        }
    }
}

/// A bfloat16: the upper 16 bits of an `f32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub struct Bf16(pub u16);

impl Bf16 {
    /// Round to nearest, ties to even. A NaN stays a NaN (made quiet); subnormals are kept.
    #[inline(always)]
    pub const fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        if bits & 0x7fff_ffff > 0x7f80_0000 {
            return Self((bits >> 16) as u16 | 0x40);
        }
        let round = 0x7fff + ((bits >> 16) & 1);
        Self((bits.wrapping_add(round) >> 16) as u16)
    }

    /// Exact.
    #[inline(always)]
    pub const fn to_f32(self) -> f32 {
        f32::from_bits((self.0 as u32) << 16)
    }
}

/// An IEEE binary16, exactly; a signalling NaN becomes quiet.
#[inline(always)]
pub(crate) const fn f16_to_f32(bits: u16) -> f32 {
    let sign = (bits as u32 & 0x8000) << 16;
    let rest = bits as u32 & 0x7fff;
    if rest >= 0x7c00 {
        let quiet = if rest > 0x7c00 { 0x40_0000 } else { 0 };
        return f32::from_bits(sign | 0x7f80_0000 | (rest & 0x3ff) << 13 | quiet);
    }
    // As the fraction and exponent of an f32 it is 2^112 too small, subnormal or not.
    let scaled = f32::from_bits(rest << 13) * f32::from_bits((127 + 112) << 23);
    f32::from_bits(scaled.to_bits() | sign)
}

/// The nearest IEEE binary16, ties to even; a NaN becomes quiet.
#[inline(always)]
pub(crate) const fn f32_to_f16(value: f32) -> u16 {
    let sign = (value.to_bits() >> 16 & 0x8000) as u16;
    let bits = value.to_bits() & 0x7fff_ffff;
    let rest = match bits {
        0x7f80_0001.. => 0x7e00,
        // 65,520 and more: half a step over the largest.
        0x477f_f000.. => 0x7c00,
        // 2^-14 and more: the exponent has another start, and thirteen bits fewer follow.
        0x3880_0000.. => {
            let round = 0xfff + (bits >> 13 & 1);
            (bits + round - (112 << 23)) >> 13
        }
        // Beside one half, a float has 2^-24 for its last bit, as a subnormal binary16 has.
        _ => (f32::from_bits(bits) + 0.5).to_bits() - 0.5_f32.to_bits(),
    };
    sign | rest as u16
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for super::Bf16 {}
    impl Sealed for i8 {}
}

/// A stored number: `f32` or [`Bf16`].
pub trait Element: Copy + Send + Sync + sealed::Sealed + 'static {
    /// Its run-time name.
    const DTYPE: DType;
    /// Widen to `f32`; exact.
    fn widen(self) -> f32;
    /// Round an `f32` to nearest even.
    fn narrow(value: f32) -> Self;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        value
    }
}

impl Element for Bf16 {
    const DTYPE: DType = DType::Bf16;
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        Self::from_f32(value)
    }
}

/// An element of the array of keys and values: `f32`, [`Bf16`] or `i8`.
pub trait KvElement: Copy + Send + Sync + sealed::Sealed + 'static {
    /// Its run-time name.
    const KV_DTYPE: KvDType;
}

impl KvElement for f32 {
    const KV_DTYPE: KvDType = KvDType::F32;
}

impl KvElement for Bf16 {
    const KV_DTYPE: KvDType = KvDType::Bf16;
}

impl KvElement for i8 {
    const KV_DTYPE: KvDType = KvDType::I8;
}

#[cfg(test)]
mod tests {
    use super::{Bf16, f16_to_f32, f32_to_f16};

    #[test]
    fn every_binary16_and_what_lies_between_them() {
        for bits in 0..0x7c00 {
            let (low, high) = (f16_to_f32(bits), f16_to_f32(bits + 1));
            // After the largest comes what would be the next, if there were more exponents.
            let high = if bits + 1 == 0x7c00 { 65_536.0 } else { high };
            let middle = low.midpoint(high);
            let (below, above) = (middle.next_down(), middle.next_up());
            let even = bits + (bits & 1);
            for (value, want) in [(low, bits), (below, bits), (middle, even), (above, bits + 1)] {
                assert_eq!(f32_to_f16(value), want, "{value:e}");
                assert_eq!(f32_to_f16(-value), want | 0x8000, "-{value:e}");
            }
        }
        for (value, want) in [
            (f32::INFINITY, 0x7c00),
            (f32::MAX, 0x7c00),
            (f32::NAN, 0x7e00),
            (f32::from_bits(0x7f80_0001), 0x7e00),
            (f32::from_bits(1), 0),
        ] {
            assert_eq!(f32_to_f16(value), want, "{value:e}");
        }
    }

    #[test]
    fn rounds_to_nearest_even() {
        for (value, bits) in [
            (1.0f32, 0x3f80),
            (f32::from_bits(0x3f80_8000), 0x3f80), // A tie goes to the even neighbour,
            (f32::from_bits(0x3f81_8000), 0x3f82), // downwards or upwards.
            (f32::from_bits(0x3f80_8001), 0x3f81),
            (f32::MAX, 0x7f80),
            (f32::NEG_INFINITY, 0xff80),
            (f32::from_bits(1), 0),
            (-0.0, 0x8000),
        ] {
            assert_eq!(Bf16::from_f32(value).0, bits, "{value:e}");
        }
        assert!(Bf16::from_f32(f32::from_bits(0x7f80_0001)).to_f32().is_nan());
    }
}
