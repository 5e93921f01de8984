//! Sixteen `f32` lanes, on any machine.
//!
//! Kernels are written once over [`Simd`] and compiled for each instruction set. A vector always
//! has sixteen lanes: one AVX-512 register, two AVX2 registers, or an array. So every instruction
//! set runs the same operations in the same order, and those with a fused multiply-add give the
//! same bits.
//!
//! A value of a `Simd` type is a proof that the machine has the instructions, so arithmetic is safe
//! to call; only loads and stores are not. Everything is `inline(always)`: code that works with
//! vectors has to end up inside one of the functions of [`dispatch`] that enable the instructions.
//! For the same reason kernels use no closures.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod bf16;
mod dispatch;
mod int8;
mod lanes;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(crate) use bf16::{Dot, DotKernel, PAIR_BYTES, run_dot};
pub(crate) use dispatch::{Kernel, run};
pub(crate) use int8::{FOUR, FOUR_BYTES, Form, Int8, Int8Grid, Int8Kernel, MAX_COLS, run_int8};
pub(crate) use lanes::Lanes;

use crate::element::Bf16;

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// Most rows for [`Simd::cover_few`].
pub(crate) const FEW_ROWS: usize = 4;

/// Two neighbouring positions of K, the second first: see `bf16`.
pub(crate) type Pair = [Bf16; 2];

/// Sixteen `f32` lanes and what can be done with them.
///
/// Pairs: `load_pairs` reads sixteen pairs of bfloat16 and returns the first of each pair and the
/// second of each. `half` reads eight (the upper lanes are zero) and `split` reads eight from each
/// of two places.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// Sixteen `f32`.
    type V: Copy;

    /// Whether vectors are arrays, so that few fit in registers: about three.
    const IS_PLAIN: bool;
    /// Whether 32 vectors fit in registers, rather than 8.
    const MANY_REGISTERS: bool;

    /// Cover a grid with tiles that fit the registers: those of a panel before those of the next.
    /// A tile may be taller than what is left of the rows.
    fn cover<G: Grid>(self, grid: &G, num_rows: usize, num_panels: usize);
    /// The same for at most [`FEW_ROWS`], with fewer shapes: each is code of its own.
    fn cover_few<G: Grid>(self, grid: &G, num_rows: usize, num_panels: usize);

    /// All lanes equal.
    fn splat(self, value: f32) -> Self::V;
    /// `a + b`.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`.
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once where the machine can.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `if a > b { a } else { b }`: b where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `if a < b { a } else { b }`: b where either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// Lane i is `a`'s where bit i of `mask` is set, otherwise `b`'s.
    fn select(self, mask: u16, a: Self::V, b: Self::V) -> Self::V;
    /// `(bits(a) + 127) << 23` as `f32`: 2^n where the low nine bits of `a` hold the integer n.
    fn exponent(self, a: Self::V) -> Self::V;
    /// Sum of the lanes: halves are added until one is left.
    fn sum(self, a: Self::V) -> f32;
    /// Largest lane, as [`Simd::max`] sees it.
    fn max_lane(self, a: Self::V) -> f32;

    /// # Safety
    /// Sixteen `f32` are readable at `from`.
    unsafe fn load(self, from: *const f32) -> Self::V;
    /// # Safety
    /// Eight `f32` are readable at `from`.
    unsafe fn load_half(self, from: *const f32) -> Self::V;
    /// # Safety
    /// Eight `f32` are readable at each of `low` and `high`.
    unsafe fn load_split(self, low: *const f32, high: *const f32) -> Self::V;
    /// # Safety
    /// Sixteen `f32` are writable at `to`.
    unsafe fn store(self, to: *mut f32, a: Self::V);
    /// # Safety
    /// Sixteen [`Bf16`] are readable at `from`.
    unsafe fn load_bf16(self, from: *const Bf16) -> Self::V;
    /// Rounds as [`Bf16::from_f32`].
    /// # Safety
    /// Sixteen [`Bf16`] are writable at `to`.
    unsafe fn store_bf16(self, to: *mut Bf16, a: Self::V);
    /// # Safety
    /// 32 [`Bf16`] are readable at `from`.
    unsafe fn load_pairs(self, from: *const Bf16) -> (Self::V, Self::V);
    /// # Safety
    /// Sixteen [`Bf16`] are readable at `from`.
    unsafe fn load_pairs_half(self, from: *const Bf16) -> (Self::V, Self::V);
    /// # Safety
    /// Sixteen [`Bf16`] are readable at each of `low` and `high`.
    unsafe fn load_pairs_split(self, low: *const Bf16, high: *const Bf16) -> (Self::V, Self::V);

    /// # Safety
    /// Sixteen IEEE binary16 are readable at `from`.
    unsafe fn load_f16(self, from: *const u16) -> Self::V;
    /// # Safety
    /// Sixteen bytes are readable at `from`.
    unsafe fn load_u8(self, from: *const u8) -> Self::V;
    /// # Safety
    /// Sixteen bytes are readable at `from`.
    unsafe fn load_i8(self, from: *const i8) -> Self::V;
    /// # Safety
    /// Eight bytes are readable at `from`.
    unsafe fn load_i8_half(self, from: *const i8) -> Self::V;
    /// # Safety
    /// Eight bytes are readable at each of `low` and `high`.
    unsafe fn load_i8_split(self, low: *const i8, high: *const i8) -> Self::V;
    /// Sixteen times eight half bytes, those of a lane side by side, the first lowest: the first four, or
    /// the others where `half` is 1. Number i comes 16^i times too large: a mask costs less than a
    /// shift.
    /// # Safety
    /// 64 bytes are readable at `from`.
    unsafe fn load_fours_u4(self, from: *const u8, half: usize) -> [Self::V; 4];
    /// Sixteen times four numbers of six bits. `low` has two rows of pairs of their low four bits,
    /// `high` has the high two bits of four numbers in each byte, the first lowest.
    /// # Safety
    /// 32 bytes are readable at `low`, sixteen at `high`.
    unsafe fn load_fours_u6(self, low: *const u8, high: *const u8) -> [Self::V; 4];

    /// Ask for the line at `at`, any address, to be in the second-level cache; or do nothing.
    fn prefetch(self, at: *const u8);

    /// Run `kernel` in a function of its own that has the instructions: for the boundary between
    /// loops that should not be inlined into each other.
    fn call<K: Kernel>(self, kernel: &K, item: usize);
}

/// Sums, sixteen side by side, that are computed in tiles: `R` rows by `P` panels of them at a time.
pub(crate) trait Grid {
    /// Compute a tile.
    fn tile<S: Simd, const R: usize, const P: usize>(&self, s: S, row: usize, panel: usize);
}

#[cfg(test)]
mod tests;
