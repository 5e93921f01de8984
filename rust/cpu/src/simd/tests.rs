//! Every operation of every instruction set against plain arithmetic, bit for bit.

use super::{Kernel, LANES, Lanes, Simd, run};
use crate::element::{Bf16, Element};
use crate::isa::Isa;
use crate::math;
use std::cell::UnsafeCell;

/// Values that exercise rounding, signs, subnormals, infinities and NaN.
fn values(seed: u32) -> [f32; LANES] {
    let special = [0.0, -0.0, 1.0, f32::MAX, f32::INFINITY, f32::NAN, f32::from_bits(3), -126.7];
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    std::array::from_fn(|i| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        if i % 5 == 4 { special[state as usize % 8] } else { (state as f32 / 1e9 - 2.1) * 3.7 }
    })
}

/// Runs `operation` on inputs and keeps what it gives.
struct Probe<F> {
    operation: F,
    out: UnsafeCell<Vec<f32>>,
}

// SAFETY: the tests use it from one thread.
unsafe impl<F> Sync for Probe<F> {}

trait Operation {
    fn apply<S: Simd>(&self, s: S, out: &mut Vec<f32>);
}

impl<F: Operation> Kernel for Probe<F> {
    #[inline(always)]
    fn run<S: Simd>(&self, simd: S, _item: usize) {
        // SAFETY: one thread, and no other borrow is alive.
        self.operation.apply(simd, unsafe { &mut *self.out.get() });
    }
}

fn results<F: Operation>(isa: Isa, operation: F) -> Vec<f32> {
    let probe = Probe { operation, out: UnsafeCell::new(Vec::new()) };
    // SAFETY: only sets that the machine has are asked for.
    unsafe { run(isa, &probe, 0) };
    probe.out.into_inner()
}

fn push<S: Simd>(s: S, out: &mut Vec<f32>, a: S::V) {
    let mut lanes = [0.0; LANES];
    // SAFETY: an array of sixteen.
    unsafe { s.store(lanes.as_mut_ptr(), a) };
    out.extend(lanes);
}

/// NaN payloads are not compared.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| if v.is_nan() { 0x7fc0_0000 } else { v.to_bits() }).collect()
}

struct Arithmetic(u32);

impl Operation for Arithmetic {
    fn apply<S: Simd>(&self, s: S, out: &mut Vec<f32>) {
        let inputs = [values(self.0), values(self.0 + 100), values(self.0 + 200)];
        // SAFETY: arrays of sixteen.
        let [a, b, c] = inputs.map(|v| unsafe { s.load(v.as_ptr()) });
        push(s, out, s.add(a, b));
        push(s, out, s.sub(a, b));
        push(s, out, s.mul(a, b));
        push(s, out, s.div(a, b));
        push(s, out, s.max(a, b));
        push(s, out, s.min(a, b));
        push(s, out, s.select(0x9d35, a, b));
        push(s, out, s.exponent(s.add(s.splat(self.0 as f32 - 120.0), s.splat(12_582_912.0))));
        out.push(s.sum(a));
        out.push(s.max_lane(a));
        push(s, out, s.fma(a, b, c));
    }
}

#[test]
fn arithmetic_is_the_same_everywhere() {
    let plain = |seed| results(Isa::Portable, Arithmetic(seed));
    for seed in 0..200 {
        let want = plain(seed);
        for isa in Isa::available() {
            let mut got = results(isa, Arithmetic(seed));
            let mut want = want.clone();
            for i in 0..LANES {
                // Portable code may round a product and a sum; the others round once.
                let [a, b, c] = [values(seed)[i], values(seed + 100)[i], values(seed + 200)[i]];
                let at = want.len() - LANES + i;
                let twice = a * b + c;
                let once = a.mul_add(b, c);
                assert!([bits(&[twice]), bits(&[once])].contains(&bits(&[want[at]])));
                if isa != Isa::Portable {
                    assert_eq!(bits(&[got[at]]), bits(&[once]), "{} fma lane {i}", isa.name());
                }
                (want[at], got[at]) = (0.0, 0.0);
            }
            assert_eq!(bits(&got), bits(&want), "{} seed {seed}", isa.name());
        }
    }
}

struct Memory(u32);

impl Operation for Memory {
    fn apply<S: Simd>(&self, s: S, out: &mut Vec<f32>) {
        let wide: Vec<f32> = values(self.0).into_iter().chain(values(self.0 + 1)).collect();
        let narrow: Vec<Bf16> = wide.iter().map(|&v| Bf16::from_f32(v)).collect();
        let (w, n) = (wide.as_ptr(), narrow.as_ptr());
        // SAFETY: 32 elements each; offsets stay inside.
        unsafe {
            push(s, out, s.load_half(w.add(24)));
            push(s, out, s.load_split(w.add(24), w.add(3)));
            push(s, out, s.load_bf16(n.add(16)));
            for pairs in [
                s.load_pairs(n),
                s.load_pairs_half(n.add(16)),
                s.load_pairs_split(n.add(16), n.add(2)),
            ] {
                push(s, out, pairs.0);
                push(s, out, pairs.1);
            }
            let mut stored = [Bf16::default(); 17];
            s.store_bf16(stored.as_mut_ptr(), s.load(w));
            out.extend(stored.map(Bf16::to_f32));
            for len in 0..=LANES {
                push(s, out, f32::load_first(s, w.add(32 - len), len));
                push(s, out, Bf16::load_first(s, n.add(32 - len), len));
                let mut some = [7.0; LANES + 1];
                f32::store_first(s, some.as_mut_ptr(), len, s.load(w));
                out.extend(some);
            }
        }
    }
}

#[test]
fn loads_and_stores_are_the_same_everywhere() {
    for seed in 0..100 {
        let want = results(Isa::Portable, Memory(seed));
        for isa in Isa::available() {
            assert_eq!(bits(&results(isa, Memory(seed))), bits(&want), "{}", isa.name());
        }
        let rounded = &want[9 * LANES..10 * LANES];
        let plain = values(seed).map(|v| Bf16::from_f32(v).widen());
        assert_eq!(bits(rounded), bits(&plain), "rounding");
    }
}

struct Functions([f32; LANES]);

impl Operation for Functions {
    fn apply<S: Simd>(&self, s: S, out: &mut Vec<f32>) {
        // SAFETY: an array of sixteen.
        let x = unsafe { s.load(self.0.as_ptr()) };
        push(s, out, math::exp2(s, x));
        push(s, out, math::tanh(s, x));
        push(s, out, math::silu(s, x));
    }
}

#[test]
fn functions_keep_their_stated_errors() {
    for isa in Isa::available() {
        // Sets without a fused multiply-add round twice.
        let slack = if isa == Isa::Portable { 2.0 } else { 1.0 };
        for step in 0..20_000 {
            let inputs =
                std::array::from_fn(|i| (step * LANES + i) as f32 / 320_000.0 * 253.0 - 126.0);
            let got = results(isa, Functions(inputs));
            for (i, &x) in inputs.iter().enumerate() {
                let wide = f64::from(x);
                let [exp2, tanh, silu] = [0, 1, 2].map(|f| f64::from(got[f * LANES + i]));
                let name = isa.name();
                let error = exp2 / wide.exp2() - 1.0;
                assert!(error.abs() < slack * 1.5e-7, "{name}: exp2({x}) is off by {error:e}");
                let error = (tanh - wide.tanh()) / wide.tanh().abs().max(1e-30);
                assert!(error.abs() < slack * 6e-7, "{name}: tanh({x}) is off by {error:e}");
                let want = wide / (1.0 + (-wide).exp());
                let error = if x > -80.0 { (silu - want) / want.abs().max(1e-30) } else { 0.0 };
                assert!(error.abs() < 1e-5, "{name}: silu({x}) is off by {error:e}");
                assert!(x > -80.0 || (silu - want).abs() < 1e-33, "{name}: silu({x}) is {silu:e}");
            }
        }
    }
}

#[test]
fn functions_at_the_edges() {
    let mut inputs = [0.0; LANES];
    inputs[..7].copy_from_slice(&[
        0.0,
        -0.0,
        f32::NEG_INFINITY,
        f32::INFINITY,
        f32::NAN,
        -126.6,
        1e30,
    ]);
    for isa in Isa::available() {
        let got = results(isa, Functions(inputs));
        let exp2 = &got[..7];
        assert_eq!(exp2[0].to_bits(), 1.0_f32.to_bits());
        assert_eq!(exp2[1].to_bits(), 1.0_f32.to_bits());
        assert_eq!(exp2[2].to_bits(), 0, "2^-inf is +0");
        assert_eq!(exp2[3].to_bits(), 127.0_f32.exp2().to_bits());
        assert!(exp2[4].is_nan());
        assert_eq!(exp2[5].to_bits(), 0);
        let (tanh, silu) = (&got[LANES..LANES + 7], &got[2 * LANES..2 * LANES + 7]);
        assert_eq!((tanh[0], tanh[2], tanh[3]), (0.0, -1.0, 1.0));
        assert!(tanh[4].is_nan() && silu[4].is_nan());
        assert_eq!((silu[0], silu[3], silu[6]), (0.0, f32::INFINITY, 1e30));
    }
}

/// Numbers of few bits, sixteen times `self.0` of each.
struct Narrow(u8);

impl Operation for Narrow {
    fn apply<S: Simd>(&self, s: S, out: &mut Vec<f32>) {
        let bytes: [u8; 64] = std::array::from_fn(|i| {
            self.0.wrapping_mul(37).wrapping_add((i as u8).wrapping_mul(91))
        });
        let halves: [u16; LANES] =
            std::array::from_fn(|i| u16::from(self.0) << 8 | u16::from(bytes[i]));
        // SAFETY: arrays of as many.
        unsafe {
            push(s, out, s.load_f16(halves.as_ptr()));
            push(s, out, s.load_u8(bytes.as_ptr().add(1)));
            push(s, out, s.load_i8(bytes.as_ptr().add(1).cast()));
            let signed = bytes.as_ptr().cast::<i8>();
            push(s, out, s.load_i8_half(signed.add(3)));
            push(s, out, s.load_i8_split(signed.add(7), signed.add(29)));
            for number in [0, 1].into_iter().flat_map(|half| s.load_fours_u4(bytes.as_ptr(), half))
            {
                push(s, out, number);
            }
            for number in s.load_fours_u6(bytes.as_ptr(), bytes.as_ptr().add(32)) {
                push(s, out, number);
            }
        }
    }
}

/// The portable set by its definition, and the others by the portable one.
#[test]
fn numbers_of_few_bits() {
    for seed in 0..=u8::MAX {
        let portable = results(Isa::Portable, Narrow(seed));
        for isa in Isa::available() {
            assert_eq!(bits(&results(isa, Narrow(seed))), bits(&portable), "{isa:?} {seed}");
        }
        let byte = |i: usize| seed.wrapping_mul(37).wrapping_add((i as u8).wrapping_mul(91));
        for lane in 0..LANES {
            let at = |row: usize| portable[row * LANES + lane] as i32;
            assert_eq!(at(1), i32::from(byte(lane + 1)));
            assert_eq!(at(2), i32::from(byte(lane + 1) as i8));
            let split = if lane < 8 { byte(lane + 7) } else { byte(lane - 8 + 29) };
            let half = if lane < 8 { byte(lane + 3) } else { 0 };
            assert_eq!((at(3), at(4)), (i32::from(half as i8), i32::from(split as i8)));
            for i in 0..8 {
                let byte = byte(4 * lane + i / 2);
                let half = if i % 2 == 0 { byte % 16 } else { byte / 16 };
                assert_eq!(at(5 + i), i32::from(half) << (4 * (i % 4)));
            }
            let (first, second, high) = (byte(lane), byte(lane + 16), byte(lane + 32));
            let low = [first % 16, first / 16, second % 16, second / 16];
            for (i, low) in low.into_iter().enumerate() {
                let top = high >> (2 * i) & 3;
                assert_eq!(at(13 + i), i32::from(low + 16 * top));
            }
        }
    }
}

/// Every binary16, by its definition.
#[test]
fn half_precision_numbers() {
    for bits in 0..=u16::MAX {
        let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
        let size = match exponent {
            31 if fraction == 0.0 => f64::INFINITY,
            31 => f64::NAN,
            0 => fraction * 2_f64.powi(-24),
            _ => (1024.0 + fraction) * 2_f64.powi(exponent - 25),
        };
        let want = if bits >> 15 == 1 { -size } else { size } as f32;
        let got = crate::element::f16_to_f32(bits);
        assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{bits:04x}");
    }
}
