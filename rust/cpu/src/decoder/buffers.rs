//! Activations of one step, kept from step to step.
//!
//! A step of 2,048 tokens has tens of megabytes of them. Fresh memory of that size comes from the
//! system page by page, which takes longer than some of the operations that fill it.

use crate::element::{Bf16, DType};
use crate::norm::Norm;
use crate::view::{Matrix, MatrixMut};

/// Numbers of either type, in memory of their own.
#[derive(Debug, Clone)]
pub enum Numbers {
    /// `f32`.
    F32(Vec<f32>),
    /// bfloat16.
    Bf16(Vec<Bf16>),
}

impl Numbers {
    /// None of that type.
    pub const fn none(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Self::F32(Vec::new()),
            DType::Bf16 => Self::Bf16(Vec::new()),
        }
    }

    /// How many there are.
    pub const fn len(&self) -> usize {
        match self {
            Self::F32(numbers) => numbers.len(),
            Self::Bf16(numbers) => numbers.len(),
        }
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// As one row.
    pub fn as_row(&self) -> Matrix<'_> {
        self.rows(1, self.len())
    }

    /// The first `num_rows` rows of `num_cols` numbers.
    fn rows(&self, num_rows: usize, num_cols: usize) -> Matrix<'_> {
        match self {
            Self::F32(numbers) => Matrix::f32(&numbers[..num_rows * num_cols], num_cols),
            Self::Bf16(numbers) => Matrix::bf16(&numbers[..num_rows * num_cols], num_cols),
        }
    }

    fn rows_mut(&mut self, num_rows: usize, num_cols: usize) -> MatrixMut<'_> {
        match self {
            Self::F32(numbers) => MatrixMut::f32(&mut numbers[..num_rows * num_cols], num_cols),
            Self::Bf16(numbers) => MatrixMut::bf16(&mut numbers[..num_rows * num_cols], num_cols),
        }
    }

    fn grow(&mut self, len: usize) {
        if self.len() >= len {
            return;
        }
        match self {
            Self::F32(numbers) => numbers.resize(len, 0.0),
            Self::Bf16(numbers) => numbers.resize(len, Bf16::default()),
        }
    }
}

/// Activation of one width. The first `num_rows` are in use.
#[derive(Debug)]
pub(super) struct Activation {
    numbers: Numbers,
    num_rows: usize,
    num_cols: usize,
}

impl Activation {
    fn new(dtype: DType, num_cols: usize) -> Self {
        Self { numbers: Numbers::none(dtype), num_rows: 0, num_cols }
    }

    /// Have `num_rows` rows; what is in them is whatever was left there.
    pub(super) fn resize(&mut self, num_rows: usize) {
        self.numbers.grow(num_rows * self.num_cols);
        self.num_rows = num_rows;
    }

    pub(super) fn view(&self) -> Matrix<'_> {
        self.numbers.rows(self.num_rows, self.num_cols)
    }

    pub(super) fn view_mut(&mut self) -> MatrixMut<'_> {
        self.numbers.rows_mut(self.num_rows, self.num_cols)
    }

    /// Have copies of those rows of `from`, which must be there.
    pub(super) fn take_rows(&mut self, from: &Self, rows: &[i32]) {
        fn copy<T: Copy>(from: &[T], rows: &[i32], num_cols: usize, into: &mut [T]) {
            for (&row, into) in rows.iter().zip(into.chunks_exact_mut(num_cols)) {
                let first = row as usize * num_cols;
                into.copy_from_slice(&from[first..first + num_cols]);
            }
        }
        self.resize(rows.len());
        match (&from.numbers, &mut self.numbers) {
            (Numbers::F32(from), Numbers::F32(into)) => copy(from, rows, self.num_cols, into),
            (Numbers::Bf16(from), Numbers::Bf16(into)) => copy(from, rows, self.num_cols, into),
            _ => unreachable!("all activations have one type"),
        }
    }

    /// Three groups of columns that lie side by side: the first to write, the others to read.
    pub(super) fn split(&mut self, widths: [usize; 3]) -> (MatrixMut<'_>, Matrix<'_>, Matrix<'_>) {
        assert_eq!(widths.iter().sum::<usize>(), self.num_cols, "every column is in one group");
        let (num_rows, stride) = (self.num_rows, self.num_cols);
        let (data, dtype) = match &mut self.numbers {
            Numbers::F32(numbers) => (numbers.as_mut_ptr().cast::<u8>(), DType::F32),
            Numbers::Bf16(numbers) => (numbers.as_mut_ptr().cast::<u8>(), DType::Bf16),
        };
        let at = |column: usize| data.wrapping_add(column * dtype.size());
        let [first, second, third] = widths;
        // SAFETY: columns of rows that `self.numbers` holds, borrowed by the views for as long as
        // `self` is; the three groups have no column in common.
        unsafe {
            (
                MatrixMut::from_raw(data, dtype, num_rows, first, stride),
                Matrix::from_raw(at(first), dtype, num_rows, second, stride),
                Matrix::from_raw(at(first + second), dtype, num_rows, third, stride),
            )
        }
    }
}

/// What goes from layer to layer.
#[derive(Debug)]
pub(super) struct Stream {
    /// The residual stream.
    pub(super) hidden: Activation,
    /// What the last product added to it, until a norm takes it in.
    pub(super) added: Activation,
    normed: Activation,
}

impl Stream {
    fn new(dtype: DType, hidden: usize) -> Self {
        let rows = || Activation::new(dtype, hidden);
        Self { hidden: rows(), added: rows(), normed: rows() }
    }

    fn resize(&mut self, num_rows: usize) {
        let Self { hidden, added, normed } = self;
        for rows in [hidden, added, normed] {
            rows.resize(num_rows);
        }
    }

    /// Have copies of those rows of `from`, which must be there.
    pub(super) fn take_rows(&mut self, from: &Self, rows: &[i32]) {
        self.hidden.take_rows(&from.hidden, rows);
        self.added.take_rows(&from.added, rows);
        self.normed.resize(rows.len());
    }

    /// The norm of `hidden`, to which nothing was added yet.
    pub(super) fn first_norm<'a>(&'a mut self, weight: &'a Numbers, eps: f32) -> Norm<'a> {
        let (x, out) = (self.hidden.view(), self.normed.view_mut());
        Norm { x, residual: None, weight: weight.as_row(), eps, out }
    }

    /// `hidden += added`, and the norm of that.
    pub(super) fn norm<'a>(&'a mut self, weight: &'a Numbers, eps: f32) -> Norm<'a> {
        let Self { hidden, added, normed } = self;
        let (residual, out) = (Some(hidden.view_mut()), normed.view_mut());
        Norm { x: added.view(), residual, weight: weight.as_row(), eps, out }
    }
}

/// Everything between the layers and inside one.
#[derive(Debug)]
pub(super) struct Buffers {
    pub(super) stream: Stream,
    pub(super) qkv: Activation,
    pub(super) attended: Activation,
    pub(super) activated: Activation,
    /// Of the rows that have an output.
    pub(super) last: Stream,
    /// Token ids, all known.
    pub(super) token_ids: Vec<i32>,
}

impl Buffers {
    pub(super) fn new(dtype: DType, hidden: usize, q: usize, kv: usize, inner: usize) -> Self {
        let rows = |num_cols| Activation::new(dtype, num_cols);
        Self {
            stream: Stream::new(dtype, hidden),
            qkv: rows(q + 2 * kv),
            attended: rows(q),
            activated: rows(inner),
            last: Stream::new(dtype, hidden),
            token_ids: Vec::new(),
        }
    }

    /// Have room for a step of `num_tokens` tokens.
    pub(super) fn resize(&mut self, num_tokens: usize) {
        self.stream.resize(num_tokens);
        let Self { qkv, attended, activated, .. } = self;
        for rows in [qkv, attended, activated] {
            rows.resize(num_tokens);
        }
    }
}
