//! Probabilities as integers: `round(2^40 · e^(z − best))`, halves to even.
//!
//! The best token weighs exactly 2^40, and sums have no rounding, whatever order they are taken in.
//! The exponential is a polynomial of our own: multiplications and additions that no instruction set
//! contracts, so a weight is the same on any machine. It is within 0.8 units of the last place of
//! `f64`, which moves a weight by one from that of an exact exponential about once in 2^12 times.

use super::MAX_COLS;

/// Weight of the best token.
pub(super) const ONE: u64 = 1 << 40;

const _: () = assert!(MAX_COLS as u64 <= u64::MAX / ONE, "a row's weights fit their sum");

/// Columns that are weighed at once.
pub(super) const BLOCK: usize = 256;

/// Its weight is zero, as that of everything below it.
const LEAST: f64 = -30.0;

/// Adding and subtracting 1.5 · 2^52 rounds to an integer, which is left in the low bits.
const ROUND: f64 = 6_755_399_441_055_744.0;

/// ln 2 in two parts; the first has so few bits that small multiples of it are exact.
const LN_2: (f64, f64) = (6.931_471_803_691_238e-1, 1.908_214_929_270_587_7e-10);

/// Coefficients of r², r³, ... in e^r on [−ln 2 / 2, ln 2 / 2], where 1 + r come before them: a
/// minimax fit of the relative error, 1e-18.
const EXP: [f64; 11] = [
    0.5,
    0.166_666_666_666_666_69,
    0.041_666_666_666_666_664,
    0.008_333_333_333_330_062,
    0.001_388_888_888_888_655_2,
    0.000_198_412_698_630_536_18,
    2.480_158_731_714_449_8e-5,
    2.755_726_845_999_706_4e-6,
    2.755_728_296_954_995e-7,
    2.510_038_549_551_032e-8,
    2.091_123_663_026_154_5e-9,
];

/// How the logits of one row become weights.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scale {
    /// What logits are divided by.
    pub(super) temperature: f32,
    /// Largest quotient of the row.
    pub(super) best: f32,
    /// Share of the best token's weight below which a weight is zero.
    pub(super) min_p: f32,
}

impl Scale {
    /// Weight of the quotient `z`, at most [`ONE`] whatever the numbers are; zero for NaN.
    #[inline(always)]
    pub(super) fn weight(self, z: f32) -> u64 {
        let x = f64::from(z) - f64::from(self.best);
        let x = if x > LEAST { x } else { LEAST };
        let x = if x < 0.0 { x } else { 0.0 };
        let shifted = x * std::f64::consts::LOG2_E + ROUND;
        let n = shifted - ROUND;
        let r = (x - n * LN_2.0) - n * LN_2.1;
        let p = polynomial(r);
        let e = 1.0 + (r + r * r * p);
        // 2^(n + 40): n is in the low bits, and moves into the exponent.
        let scale = f64::from_bits((shifted.to_bits() << 52).wrapping_add((1023 + 40) << 52));
        let rounded = e * scale + ROUND;
        let weight = rounded.to_bits().wrapping_sub(ROUND.to_bits());
        let least = f64::from(self.min_p) * ONE as f64;
        if rounded - ROUND < least { 0 } else { weight }
    }

    /// A quotient that all of the heaviest tokens reach that are needed to weigh `target`, in a row
    /// of `num_cols` that weighs `total`.
    ///
    /// Tokens of at most w = (total − target) / `num_cols` each weigh no more than total − target
    /// together, so those that weigh more than w suffice.
    pub(super) fn floor_of_share(self, target: u64, total: u64, num_cols: usize) -> f32 {
        let least = total.saturating_sub(target) as f64 / num_cols as f64;
        // A token that weighs anything has at least half a unit. The hundredth makes up for what
        // the logarithm and the weights are off.
        let x = (least.max(0.5) / ONE as f64).ln() - 0.01;
        (f64::from(self.best) + x) as f32
    }

    /// Weights of up to [`BLOCK`] logits; what is beyond them weighs nothing.
    #[inline(always)]
    pub(super) fn weigh(self, logits: &[f32], weights: &mut [u64; BLOCK]) {
        let mut z = [f32::NAN; BLOCK];
        z[..logits.len()].copy_from_slice(logits);
        for z in &mut z {
            *z /= self.temperature;
        }
        self.weigh_quotients(&z, weights);
    }

    /// Weights of [`BLOCK`] quotients.
    #[inline(always)]
    pub(super) fn weigh_quotients(self, z: &[f32; BLOCK], weights: &mut [u64; BLOCK]) {
        for (weight, &z) in weights.iter_mut().zip(z) {
            *weight = self.weight(z);
        }
    }

    /// The sum of all weights of `row`, and that of each block of [`BLOCK`] columns in `sums`.
    #[inline(always)]
    pub(super) fn weigh_all(self, row: &[f32], sums: &mut Vec<u64>) -> u64 {
        let mut weights = [0; BLOCK];
        let mut total = 0;
        sums.clear();
        for logits in row.chunks(BLOCK) {
            self.weigh(logits, &mut weights);
            let mut sum = 0;
            for weight in weights {
                sum += weight;
            }
            sums.push(sum);
            total += sum;
        }
        total
    }
}

/// What [`EXP`] are the coefficients of, as a tree: its halves do not wait for each other.
#[inline(always)]
fn polynomial(r: f64) -> f64 {
    let r2 = r * r;
    let r4 = r2 * r2;
    let pair = |i: usize| EXP[i] + EXP[i + 1] * r;
    let low = pair(0) + pair(2) * r2;
    let middle = pair(4) + pair(6) * r2;
    let high = pair(8) + EXP[10] * r2;
    low + (middle + high * r4) * r4
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Scale = Scale { temperature: 1.0, best: 0.0, min_p: 0.0 };

    /// Between this and the system's exponential, both within a unit of the truth.
    #[test]
    fn weights_are_the_exponentials() {
        let mut num_off = 0;
        let num = 400_000;
        for i in 0..num {
            let z = -31.0 * (i as f32 / num as f32).powi(2);
            let exact = (f64::from(z).exp() * ONE as f64).round_ties_even();
            let off = (PLAIN.weight(z) as f64 - exact).abs();
            assert!(off <= 1.0, "z {z}: off by {off}");
            num_off += usize::from(off > 0.0);
        }
        assert!(num_off < num / 1000, "{num_off} of {num} are off by one");
    }

    #[test]
    fn ends_of_the_range() {
        for (z, want) in [
            (0.0, ONE),
            (-0.0, ONE),
            (-f32::MIN_POSITIVE, ONE),
            (1.0, ONE),
            (f32::INFINITY, ONE),
            (-28.4, 1),
            (-28.5, 0),
            (-100.0, 0),
            (f32::MIN, 0),
            (f32::NEG_INFINITY, 0),
            (f32::NAN, 0),
        ] {
            assert_eq!(PLAIN.weight(z), want, "z {z}");
        }
        for best in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN] {
            for z in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, 1.0] {
                assert!(Scale { best, ..PLAIN }.weight(z) <= ONE, "z {z} of {best}");
            }
        }
    }

    #[test]
    fn min_p_is_a_share_of_the_best() {
        let half = Scale { min_p: 0.5, ..PLAIN };
        let ln_half = 0.5f32.ln();
        assert_eq!(half.weight(ln_half + 1e-6), PLAIN.weight(ln_half + 1e-6));
        assert_eq!(half.weight(ln_half - 1e-6), 0);
        assert_eq!(Scale { min_p: 1.0, ..PLAIN }.weight(0.0), ONE);
        assert_eq!(Scale { min_p: f32::NAN, ..PLAIN }.weight(-1.0), PLAIN.weight(-1.0));
    }

    #[test]
    fn blocks_sum_to_the_row() {
        for len in [1, 255, 256, 257, 1000] {
            let row: Vec<f32> = (0..len).map(|i| -((i * 7 % 31) as f32)).collect();
            let mut sums = vec![9];
            let total = PLAIN.weigh_all(&row, &mut sums);
            let weight = |&z: &f32| PLAIN.weight(z);
            assert_eq!(total, row.iter().map(weight).sum());
            let blocks: Vec<u64> =
                row.chunks(BLOCK).map(|block| block.iter().map(weight).sum()).collect();
            assert_eq!(sums, blocks);
        }
    }
}
