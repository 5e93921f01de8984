//! Sums of products of int8, sixteen side by side, exact: the integer side of [`Simd`].
//!
//! Integer sums have the same value in any order, so each instruction set may add them up as suits it
//! and all of them give the same bits. What differs is the form that a row of `x` has ([`Form`]).
//!
//! # A panel
//!
//! ```text
//! numbers  i8[num_fours][16][4]   16 rows of the weight side by side, four positions of K each
//! scales   f32[16]
//! starts   i32[16]                -128 times the sum of the row: what `Form::Biased` sums start at
//! ```

#[cfg(target_arch = "x86_64")]
mod x86;

use super::portable::Portable;
use super::{LANES, Simd};
use crate::isa::Isa;

/// Positions of K that lie together: as i16, a word of 64 bits.
pub(crate) const FOUR: usize = 4;

/// Bytes that four positions of a panel take.
pub(crate) const FOUR_BYTES: usize = FOUR * LANES;

/// Most positions of K for which no sum of products leaves 32 bits: `127 * 127 * 131072 < 2^31`.
pub(crate) const MAX_COLS: usize = 1 << 17;

/// How numbers of -127 to 127 are kept in a row of `x`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// As i16.
    Wide,
    /// Plus 128, as u8.
    Biased,
}

impl Form {
    /// What the products of an instruction set take.
    pub(crate) fn of(isa: Isa) -> Self {
        if isa >= Isa::Vnni { Self::Biased } else { Self::Wide }
    }

    /// Bytes of a number.
    pub(crate) const fn size(self) -> usize {
        match self {
            Self::Wide => 2,
            Self::Biased => 1,
        }
    }
}

/// An instruction set's products of int8.
pub(crate) trait Int8: Copy {
    /// What it has for everything else.
    type S: Simd;

    /// The same proof, for everything else.
    fn simd(self) -> Self::S;

    /// Cover a grid with tiles that fit the registers: those of a panel before those of the next.
    /// A tile may be taller than what is left of the rows.
    fn cover<G: Int8Grid>(self, grid: &G, num_rows: usize, num_panels: usize);

    /// Sums of products of `R` rows of `x` with the sixteen rows of `P` panels, exact, then rounded to
    /// `f32` once.
    ///
    /// # Safety
    ///
    /// Each of `x` has `4 * num_fours` numbers in the set's [`Form`], at most [`MAX_COLS`]; each of
    /// `panels` is a panel of as many positions (see the module).
    unsafe fn sums<const R: usize, const P: usize>(
        self,
        x: [*const u64; R],
        panels: [*const u8; P],
        num_fours: usize,
    ) -> [[<Self::S as Simd>::V; P]; R];
}

/// Sums of products of int8 that are computed in tiles: `R` rows by `P` panels at a time.
pub(crate) trait Int8Grid {
    /// Compute a tile.
    fn tile<I: Int8, const R: usize, const P: usize>(&self, i: I, row: usize, panel: usize);
}

/// Work on products of int8 that comes in items. As for [`Kernel`](super::Kernel), `run` must be
/// `inline(always)`, and so must everything in it that touches vectors.
pub(crate) trait Int8Kernel {
    /// Compute one item.
    fn run<I: Int8>(&self, i: I, item: usize);
}

/// Compute one item with the instructions of `isa`.
///
/// # Safety
///
/// The machine has them.
pub(crate) unsafe fn run_int8<K: Int8Kernel>(isa: Isa, kernel: &K, item: usize) {
    match isa {
        // SAFETY: the caller's promise.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { x86::run_avx2(kernel, item) },
        // SAFETY: the caller's promise.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { x86::run_avx512(kernel, item) },
        // SAFETY: the caller's promise.
        #[cfg(target_arch = "x86_64")]
        Isa::Vnni | Isa::Avx512Bf16 => unsafe { x86::run_vnni(kernel, item) },
        _ => kernel.run(Portable, item),
    }
}

impl Int8 for Portable {
    type S = Self;

    #[inline(always)]
    fn simd(self) -> Self {
        self
    }

    #[inline(always)]
    fn cover<G: Int8Grid>(self, grid: &G, num_rows: usize, num_panels: usize) {
        for panel in 0..num_panels {
            for row in 0..num_rows {
                grid.tile::<Self, 1, 1>(self, row, panel);
            }
        }
    }

    #[inline(always)]
    unsafe fn sums<const R: usize, const P: usize>(
        self,
        x: [*const u64; R],
        panels: [*const u8; P],
        num_fours: usize,
    ) -> [[[f32; LANES]; P]; R] {
        let mut out = [[[0.0; LANES]; P]; R];
        for (x, out) in x.into_iter().zip(&mut out) {
            for (panel, out) in panels.into_iter().zip(out) {
                // SAFETY: the caller's promise.
                *out = unsafe { plain_sums(x.cast(), panel.cast(), num_fours) };
            }
        }
        out
    }
}

/// One row of `x` by one panel.
///
/// # Safety
///
/// Both have so many fours.
#[inline(always)]
unsafe fn plain_sums(
    x: *const [i16; FOUR],
    panel: *const [[i8; LANES]; FOUR],
    num_fours: usize,
) -> [f32; LANES] {
    let mut parts = [[0; LANES]; FOUR];
    for four in (0..num_fours / 2 * 2).step_by(2) {
        // SAFETY: the caller's promise.
        let (x, w) = unsafe {
            (
                [x.add(four).read(), x.add(four + 1).read()],
                [panel.add(four).read(), panel.add(four + 1).read()],
            )
        };
        add_two_fours(&mut parts, x, w);
    }
    if num_fours % 2 == 1 {
        // SAFETY: the caller's promise.
        let (x, w) = unsafe { (x.add(num_fours - 1).read(), panel.add(num_fours - 1).read()) };
        add_two_fours(&mut parts, [x, [0; FOUR]], [w, w]);
    }
    let mut out = [0.0; LANES];
    let fours = parts.iter().flat_map(|parts| parts.as_chunks::<FOUR>().0);
    for (out, four) in out.iter_mut().zip(fours) {
        *out = four.iter().sum::<i32>() as f32;
    }
    out
}

/// Add the products of two fours to the parts of sixteen sums.
#[inline(always)]
fn add_two_fours(
    parts: &mut [[i32; LANES]; FOUR],
    x: [[i16; FOUR]; 2],
    w: [[[i8; LANES]; FOUR]; 2],
) {
    let x = x.map(|[a, b, c, d]| [a, b, c, d, a, b, c, d, a, b, c, d, a, b, c, d]);
    for quarter in 0..FOUR {
        for i in 0..LANES {
            // Two products fit 16 bits: 2 * 127 * 127 < 2^15.
            let first = x[0][i] * i16::from(w[0][quarter][i]);
            let second = x[1][i] * i16::from(w[1][quarter][i]);
            parts[quarter][i] += i32::from(first + second);
        }
    }
}
