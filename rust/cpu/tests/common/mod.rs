//! What the tests of all kernels share: noise, poison, memory with guards, and comparing.
#![allow(dead_code, reason = "each test binary uses a part of it")]

pub(crate) mod blocks;
pub(crate) mod cache;
pub(crate) mod chains;
#[cfg(unix)]
pub(crate) mod guards;
#[cfg(unix)]
pub(crate) mod kernels;
pub(crate) mod paged;

use fastserve_cpu::{Bf16, DType, Isa, Matrix, MatrixMut};

/// Deterministic noise in (-1, 1).
pub(crate) struct Noise(u64);

impl Noise {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / 8_388_608.0 - 1.0
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.bits() >> 33) as usize % n
    }

    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}

/// Elements on either side of a buffer that no kernel may touch.
const GUARD: usize = 67;

/// A matrix of either type with guards around it and, if strided, between its rows.
///
/// What a kernel should not read is NaN, so that reading it shows in the result; what it should not
/// write is compared afterwards.
#[derive(Debug, Clone)]
pub(crate) struct Buffer {
    dtype: DType,
    wide: Vec<f32>,
    narrow: Vec<Bf16>,
    rows: usize,
    cols: usize,
    stride: usize,
}

impl Buffer {
    /// All NaN.
    pub(crate) fn poisoned(dtype: DType, rows: usize, cols: usize, gap: usize) -> Self {
        let stride = cols + gap;
        let len = GUARD * 2 + rows * stride;
        let (wide, narrow) = match dtype {
            DType::F32 => (vec![f32::NAN; len], Vec::new()),
            DType::Bf16 => (Vec::new(), vec![Bf16::from_f32(f32::NAN); len]),
        };
        Self { dtype, wide, narrow, rows, cols, stride }
    }

    /// Noise, rounded to the type.
    pub(crate) fn noise(
        dtype: DType,
        rows: usize,
        cols: usize,
        gap: usize,
        noise: &mut Noise,
    ) -> Self {
        let mut this = Self::poisoned(dtype, rows, cols, gap);
        for row in 0..rows {
            for col in 0..cols {
                this.set(row, col, noise.next() * 2.0);
            }
        }
        this
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    fn at(&self, row: usize, col: usize) -> usize {
        assert!(row < self.rows && col < self.cols);
        GUARD + row * self.stride + col
    }

    pub(crate) fn get(&self, row: usize, col: usize) -> f32 {
        let at = self.at(row, col);
        if self.dtype == DType::F32 { self.wide[at] } else { self.narrow[at].to_f32() }
    }

    pub(crate) fn set(&mut self, row: usize, col: usize, value: f32) {
        let at = self.at(row, col);
        match self.dtype {
            DType::F32 => self.wide[at] = value,
            DType::Bf16 => self.narrow[at] = Bf16::from_f32(value),
        }
    }

    pub(crate) fn view(&self) -> Matrix<'_> {
        let start = match self.dtype {
            DType::F32 => self.wide[GUARD..].as_ptr().cast(),
            DType::Bf16 => self.narrow[GUARD..].as_ptr().cast(),
        };
        // SAFETY: `rows` rows of `cols` lie inside the vector, which is borrowed for the view.
        unsafe { Matrix::from_raw(start, self.dtype, self.rows, self.cols, self.stride) }
    }

    pub(crate) fn view_mut(&mut self) -> MatrixMut<'_> {
        let start = match self.dtype {
            DType::F32 => self.wide[GUARD..].as_mut_ptr().cast(),
            DType::Bf16 => self.narrow[GUARD..].as_mut_ptr().cast(),
        };
        // SAFETY: as above, exclusively.
        unsafe { MatrixMut::from_raw(start, self.dtype, self.rows, self.cols, self.stride) }
    }

    /// Bits of all elements, guards included.
    fn all_bits(&self) -> Vec<u32> {
        match self.dtype {
            DType::F32 => self.wide.iter().map(|v| v.to_bits()).collect(),
            DType::Bf16 => self.narrow.iter().map(|v| u32::from(v.0)).collect(),
        }
    }

    /// Bits of a row.
    pub(crate) fn row_bits(&self, row: usize) -> Vec<u32> {
        (0..self.cols).map(|col| self.get(row, col).to_bits()).collect()
    }

    /// Panic if anything outside the matrix differs from what `before` has there.
    pub(crate) fn assert_guards(&self, before: &Self) {
        let (now, then) = (self.all_bits(), before.all_bits());
        for at in 0..now.len() {
            let place = at.checked_sub(GUARD);
            let inside = place.is_some_and(|place| {
                place / self.stride < self.rows && place % self.stride < self.cols
            });
            assert!(inside || now[at] == then[at], "guard element {at} was written");
        }
    }
}

/// Panic with the first coordinate where |got − want| > absolute + relative · |want|.
pub(crate) fn assert_close(
    what: &str,
    got: &Buffer,
    want: &[Vec<f64>],
    absolute: f64,
    relative: f64,
) {
    assert_eq!(got.rows(), want.len());
    for (row, want) in want.iter().enumerate() {
        for (col, &want) in want.iter().enumerate() {
            let value = f64::from(got.get(row, col));
            let error = (value - want).abs();
            assert!(
                error <= absolute + relative * want.abs(),
                "{what}: [{row}, {col}] is {value}, want {want} (off by {error:e})"
            );
        }
    }
}

/// Half a unit in the last place, relative, of a type: what rounding alone may cost.
pub(crate) fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 6e-8,
        DType::Bf16 => 3.91e-3,
    }
}

/// Every instruction set of this machine, or the one that `FASTSERVE_CPU_ISA` names.
pub(crate) fn isas() -> Vec<Isa> {
    let Ok(name) = std::env::var("FASTSERVE_CPU_ISA") else { return Isa::available() };
    let isa = Isa::from_name(&name).filter(|isa| isa.is_available());
    vec![isa.unwrap_or_else(|| panic!("FASTSERVE_CPU_ISA={name}: want {:?}", Isa::available()))]
}

/// Every instruction set with some numbers of threads.
pub(crate) fn pools() -> Vec<fastserve_cpu::Pool> {
    isas().into_iter().flat_map(|isa| [1, 3].map(|n| fastserve_cpu::Pool::new(n, isa))).collect()
}

pub(crate) const DTYPES: [DType; 2] = [DType::F32, DType::Bf16];
