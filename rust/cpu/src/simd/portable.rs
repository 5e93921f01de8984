//! Vectors as arrays: any machine, and the meaning of every operation in plain Rust.

use super::{Grid, Kernel, LANES, Simd};
use crate::element::{Bf16, f16_to_f32};

/// Plain Rust.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Portable;

type Array = [f32; LANES];

/// Whether `mul_add` is an instruction here, rather than a call of a slow exact routine.
const FUSED: bool = cfg!(any(target_feature = "fma", target_arch = "aarch64"));

#[inline(always)]
fn zip(a: Array, b: Array, f: impl Fn(f32, f32) -> f32) -> Array {
    let mut out = [0.0; LANES];
    for i in 0..LANES {
        out[i] = f(a[i], b[i]);
    }
    out
}

#[inline(always)]
fn fold(mut a: Array, f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            a[i] = f(a[i], a[i + half]);
        }
        half /= 2;
    }
    a[0]
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// Read `N` elements at `from` as `f32` lanes, the rest zero.
///
/// # Safety
///
/// They are readable.
#[inline(always)]
unsafe fn widen<const N: usize>(from: *const Bf16, stride: usize) -> Array {
    let mut out = [0.0; LANES];
    for (i, lane) in out.iter_mut().take(N).enumerate() {
        // SAFETY: the caller's promise.
        *lane = unsafe { from.add(i * stride).read() }.to_f32();
    }
    out
}

impl Simd for Portable {
    type V = Array;
    const IS_PLAIN: bool = true;
    const MANY_REGISTERS: bool = false;
    #[inline(always)]
    fn cover_few<G: Grid>(self, grid: &G, num_rows: usize, num_panels: usize) {
        self.cover(grid, num_rows, num_panels);
    }
    #[inline(always)]
    fn cover<G: Grid>(self, grid: &G, num_rows: usize, num_panels: usize) {
        for panel in 0..num_panels {
            for row in 0..num_rows {
                grid.tile::<Self, 1, 1>(self, row, panel);
            }
        }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Array {
        [value; LANES]
    }
    #[inline(always)]
    fn add(self, a: Array, b: Array) -> Array {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Array, b: Array) -> Array {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Array, b: Array) -> Array {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: Array, b: Array) -> Array {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: Array, b: Array, c: Array) -> Array {
        let mut out = c;
        for i in 0..LANES {
            out[i] = if FUSED { a[i].mul_add(b[i], c[i]) } else { a[i] * b[i] + c[i] };
        }
        out
    }
    #[inline(always)]
    fn max(self, a: Array, b: Array) -> Array {
        zip(a, b, larger)
    }
    #[inline(always)]
    fn min(self, a: Array, b: Array) -> Array {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn select(self, mask: u16, a: Array, b: Array) -> Array {
        let mut out = b;
        for i in 0..LANES {
            out[i] = if mask >> i & 1 == 1 { a[i] } else { b[i] };
        }
        out
    }
    #[inline(always)]
    fn exponent(self, a: Array) -> Array {
        zip(a, a, |a, _| f32::from_bits(a.to_bits().wrapping_add(127) << 23))
    }
    #[inline(always)]
    fn sum(self, a: Array) -> f32 {
        fold(a, |a, b| a + b)
    }
    #[inline(always)]
    fn max_lane(self, a: Array) -> f32 {
        fold(a, larger)
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Array {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<Array>().read() }
    }
    #[inline(always)]
    unsafe fn load_half(self, from: *const f32) -> Array {
        let mut out = [0.0; LANES];
        // SAFETY: the caller's promise.
        out[..8].copy_from_slice(&unsafe { from.cast::<[f32; 8]>().read() });
        out
    }
    #[inline(always)]
    unsafe fn load_split(self, low: *const f32, high: *const f32) -> Array {
        // SAFETY: the caller's promise.
        let (mut out, high) = unsafe { (self.load_half(low), high.cast::<[f32; 8]>().read()) };
        out[8..].copy_from_slice(&high);
        out
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, a: Array) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<Array>().write(a) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const Bf16) -> Array {
        // SAFETY: the caller's promise.
        unsafe { widen::<LANES>(from, 1) }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut Bf16, a: Array) {
        for (i, &lane) in a.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { to.add(i).write(Bf16::from_f32(lane)) }
        }
    }
    #[inline(always)]
    unsafe fn load_pairs(self, from: *const Bf16) -> (Array, Array) {
        // SAFETY: the caller's promise: the last element read is at 31.
        unsafe { (widen::<LANES>(from, 2), widen::<LANES>(from.add(1), 2)) }
    }
    #[inline(always)]
    unsafe fn load_pairs_half(self, from: *const Bf16) -> (Array, Array) {
        // SAFETY: the caller's promise: the last element read is at 15.
        unsafe { (widen::<8>(from, 2), widen::<8>(from.add(1), 2)) }
    }
    #[inline(always)]
    unsafe fn load_pairs_split(self, low: *const Bf16, high: *const Bf16) -> (Array, Array) {
        // SAFETY: the caller's promise.
        let (mut low, high) = unsafe { (self.load_pairs_half(low), self.load_pairs_half(high)) };
        low.0[8..].copy_from_slice(&high.0[..8]);
        low.1[8..].copy_from_slice(&high.1[..8]);
        low
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> Array {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<[u16; LANES]>().read_unaligned() }.map(f16_to_f32)
    }
    #[inline(always)]
    unsafe fn load_u8(self, from: *const u8) -> Array {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<[u8; LANES]>().read() }.map(f32::from)
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> Array {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<[i8; LANES]>().read() }.map(f32::from)
    }
    #[inline(always)]
    unsafe fn load_i8_half(self, from: *const i8) -> Array {
        let mut out = [0.0; LANES];
        // SAFETY: the caller's promise.
        out[..8].copy_from_slice(&unsafe { from.cast::<[i8; 8]>().read() }.map(f32::from));
        out
    }
    #[inline(always)]
    unsafe fn load_i8_split(self, low: *const i8, high: *const i8) -> Array {
        // SAFETY: the caller's promise.
        let (mut low, high) = unsafe { (self.load_i8_half(low), self.load_i8_half(high)) };
        low[8..].copy_from_slice(&high[..8]);
        low
    }
    #[inline(always)]
    unsafe fn load_fours_u4(self, from: *const u8, half: usize) -> [Array; 4] {
        // SAFETY: the caller's promise.
        let lanes = unsafe { from.cast::<[[u8; 4]; LANES]>().read() };
        let mut out = [[0.0; LANES]; 4];
        for (lane, bytes) in lanes.into_iter().enumerate() {
            let numbers = u32::from_le_bytes(bytes) >> (16 * half);
            for (i, out) in out.iter_mut().enumerate() {
                out[lane] = (numbers & 15 << (4 * i)) as f32;
            }
        }
        out
    }
    #[inline(always)]
    unsafe fn load_fours_u6(self, low: *const u8, high: *const u8) -> [Array; 4] {
        let mut out = [[0.0; LANES]; 4];
        for lane in 0..LANES {
            for (i, out) in out.iter_mut().enumerate() {
                // SAFETY: the caller's promise.
                let (low, high) =
                    unsafe { (low.add(i / 2 * LANES + lane).read(), high.add(lane).read()) };
                let (low, high) = (low >> (i % 2 * 4) & 15, high >> (i * 2) & 3);
                out[lane] = f32::from(low | high << 4);
            }
        }
        out
    }

    #[inline(always)]
    fn prefetch(self, _at: *const u8) {}

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: &K, item: usize) {
        kernel.run(self, item);
    }
}
