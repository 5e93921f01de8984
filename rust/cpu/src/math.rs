//! Elementary functions on vectors: one sequence of operations, the same in every lane and tail.
//!
//! Errors are of instruction sets with a fused multiply-add; without one they are about twice that.

use crate::simd::Simd;

/// Adding and subtracting 1.5 · 2^23 rounds to an integer, which is left in the low bits.
const ROUND: f32 = 12_582_912.0;

/// Coefficients of f, f², ... in 2^f on [-1/2, 1/2]: a minimax fit of the relative error, 2e-9.
#[expect(clippy::approx_constant, reason = "the fit's value, which need not be ln 2")]
const EXP2: [f32; 6] =
    [0.693_147_2, 0.240_226_48, 0.055_503_324, 0.009_618_437, 0.001_339_887_4, 0.000_153_533_62];

/// 2^x as `(p, f, scale)`: `(1 + p * f) * scale`, with |f| at most 1/2 and `scale` a power of two.
#[inline(always)]
fn exp2_parts<S: Simd>(s: S, x: S::V) -> (S::V, S::V, S::V) {
    // The order of the arguments keeps NaN.
    let x = s.min(s.splat(127.0), s.max(s.splat(-127.0), x));
    let shifted = s.add(x, s.splat(ROUND));
    let f = s.sub(x, s.sub(shifted, s.splat(ROUND)));
    let mut p = s.splat(EXP2[5]);
    let mut i = 5;
    while i > 0 {
        i -= 1;
        p = s.fma(p, f, s.splat(EXP2[i]));
    }
    (p, f, s.exponent(shifted))
}

/// 2^x with a relative error below 1.5e-7 for x in [-126, 127].
///
/// Below -126.5 the result is +0 and above 127 it is 2^127; 2^0 is exactly 1; NaN stays NaN.
#[inline(always)]
pub(crate) fn exp2<S: Simd>(s: S, x: S::V) -> S::V {
    let (p, f, scale) = exp2_parts(s, x);
    s.mul(s.fma(p, f, s.splat(1.0)), scale)
}

/// tanh(x) with a relative error below 6e-7.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::V) -> S::V {
    let (p, f, scale) = exp2_parts(s, s.mul(x, s.splat(2.0 * std::f32::consts::LOG2_E)));
    // e^2x − 1, without the cancellation of computing e^2x first.
    let less_one = s.fma(scale, s.mul(p, f), s.sub(scale, s.splat(1.0)));
    s.div(less_one, s.add(less_one, s.splat(2.0)))
}

/// x / (1 + e^-x) with a relative error below 1e-5 for x > -80, and an absolute one below 1e-35
/// beyond.
#[inline(always)]
pub(crate) fn silu<S: Simd>(s: S, x: S::V) -> S::V {
    let e = exp2(s, s.mul(x, s.splat(-std::f32::consts::LOG2_E)));
    s.div(x, s.add(s.splat(1.0), e))
}
