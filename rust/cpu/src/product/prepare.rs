//! `x` in the forms that a product takes, with the norm in front: one pass over its rows.

use std::cell::UnsafeCell;

use super::pairs::Pairs;
use super::quantize::Codes;
use crate::element::{Bf16, DType};
use crate::norm::Norm;
use crate::pool::Pool;
use crate::simd::{Form, Kernel, LANES, Lanes, Pair, Simd};
use crate::view::Matrix;

/// Rows of one item: enough to be worth a claim.
const ROWS_PER_ITEM: usize = 4;

/// What a product's `x` is.
#[derive(Debug)]
pub enum Input<'a> {
    /// A matrix that is there.
    Matrix(Matrix<'a>),
    /// A norm, which is computed first and is left in its `out`.
    Norm(Norm<'a>),
}

impl<'a> From<&Matrix<'a>> for Input<'a> {
    fn from(matrix: &Matrix<'a>) -> Self {
        Self::Matrix(*matrix)
    }
}

impl<'a> From<Norm<'a>> for Input<'a> {
    fn from(norm: Norm<'a>) -> Self {
        Self::Norm(norm)
    }
}

impl<'a> Input<'a> {
    /// The matrix: that of a norm is filled in by [`Forms::of`].
    pub(super) fn matrix(&self) -> &Matrix<'a> {
        match self {
            Self::Matrix(matrix) => matrix,
            Self::Norm(norm) => norm.out.as_matrix(),
        }
    }
}

/// Which forms a product needs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Needs {
    pub(super) wide: bool,
    pub(super) pairs: bool,
    pub(super) codes: bool,
}

/// `x` in the form that each way of multiplying takes. Those that are not needed are not made.
#[derive(Clone, Copy)]
pub(super) struct Forms<'a> {
    /// `f32`, where it is needed.
    pub(super) wide: Matrix<'a>,
    pub(super) pairs: Option<Pairs>,
    pub(super) codes: Option<Codes>,
}

#[derive(Default)]
struct Scratch {
    wide: Vec<f32>,
    pairs: Vec<Pair>,
    codes: Vec<u64>,
    scales: Vec<f32>,
}

thread_local! {
    static SCRATCH: UnsafeCell<Scratch> = UnsafeCell::default();
}

/// The first `len` of `numbers`, which has more from now on where it had fewer.
fn room<T: Copy + Default>(numbers: &mut Vec<T>, len: usize) -> *mut T {
    if numbers.len() < len {
        numbers.resize(len, T::default());
    }
    numbers.as_mut_ptr()
}

impl Forms<'_> {
    /// Compute the norm, where `input` is one, and lend `body` the forms of it.
    pub(super) fn of(pool: &Pool, input: &Input<'_>, needs: Needs, body: impl FnOnce(&Forms<'_>)) {
        let x = input.matrix();
        let (num_rows, num_cols) = (x.num_rows(), x.num_cols());
        // SAFETY: this thread's own, and `body` (a product) does not come here again.
        let scratch = unsafe { &mut *SCRATCH.with(UnsafeCell::get) };
        let mut forms = Forms { wide: *x, pairs: None, codes: None };
        let is_widened = needs.wide && x.dtype() == DType::Bf16;
        if is_widened {
            let numbers = room(&mut scratch.wide, num_rows * num_cols);
            // SAFETY: so many numbers, which nobody else uses until `body` returns; only `Prepare` writes
            // them, before anybody reads.
            forms.wide = unsafe {
                Matrix::from_raw(numbers.cast(), DType::F32, num_rows, num_cols, num_cols)
            };
        }
        if needs.pairs {
            let num_pairs = num_cols.div_ceil(2);
            let memory = room(&mut scratch.pairs, num_rows * num_pairs);
            forms.pairs = Some(Pairs { num_pairs, memory });
        }
        if needs.codes {
            let (form, stride) = (Form::of(pool.isa()), num_cols.next_multiple_of(LANES));
            let num_words = num_rows * stride * form.size() / size_of::<u64>();
            let numbers = room(&mut scratch.codes, num_words);
            let scales = room(&mut scratch.scales, num_rows);
            forms.codes = Some(Codes { form, stride, numbers, scales });
        }
        let norm = match input {
            Input::Matrix(_) => None,
            Input::Norm(norm) => Some(norm),
        };
        // About four numbers a nanosecond in each form.
        let num_forms = [is_widened, needs.pairs, needs.codes].into_iter().filter(|&is| is).count();
        let row_ns = norm.map_or(0, Norm::row_ns) + num_forms * num_cols / 4;
        if norm.is_some() || num_forms > 0 {
            let prepare = Prepare { norm, x, forms, is_widened };
            pool.run(&prepare, num_rows.div_ceil(ROWS_PER_ITEM), num_rows * row_ns);
        }
        body(&forms);
    }
}

/// Some rows an item: each through all that is done to it while it is in the cache.
struct Prepare<'a> {
    norm: Option<&'a Norm<'a>>,
    x: &'a Matrix<'a>,
    forms: Forms<'a>,
    is_widened: bool,
}

impl Kernel for Prepare<'_> {
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, item: usize) {
        let end = self.x.num_rows().min((item + 1) * ROWS_PER_ITEM);
        for row in item * ROWS_PER_ITEM..end {
            if let Some(norm) = self.norm {
                s.call(norm, row);
            }
            if self.is_widened {
                self.widen(s, row);
            }
            if let Some(pairs) = &self.forms.pairs {
                // SAFETY: this item alone has this row of the pairs.
                unsafe { pairs.turn(self.x, row) };
            }
            if let Some(codes) = &self.forms.codes {
                // SAFETY: this item alone has this row of the codes.
                unsafe { codes.quantize(s, self.x, row) };
            }
        }
    }
}

impl Prepare<'_> {
    #[inline(always)]
    fn widen<S: Simd>(&self, s: S, row: usize) {
        let len = self.x.num_cols();
        let (from, to) = (self.x.row::<Bf16>(row), self.forms.wide.row::<f32>(row).cast_mut());
        for at in (0..len).step_by(LANES) {
            // SAFETY: both rows have `len` numbers; this item alone has this row.
            unsafe {
                let numbers = Bf16::load_first(s, from.add(at), len - at);
                f32::store_first(s, to.add(at), len - at, numbers);
            }
        }
    }
}
