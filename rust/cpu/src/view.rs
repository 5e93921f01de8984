//! Views of the caller's memory: matrices of activations, and one layer's KV.
//!
//! A view is a pointer with a shape and an element type that is known at run time. A matrix's rows
//! may lie apart (`row_stride`), so that q, k and v can be columns of one fused projection. Views
//! of a fused matrix interleave in memory, which slices cannot say; hence the `unsafe` constructors
//! beside the safe ones, and no slice is ever made of a whole view inside this crate.

use std::marker::PhantomData;

use crate::element::{Bf16, DType, Element, KvElement};
use crate::layout::{KvDType, KvLayout};

/// Read-only matrix.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    data: *const u8,
    dtype: DType,
    num_rows: usize,
    num_cols: usize,
    row_stride: usize,
    lifetime: PhantomData<&'a [u8]>,
}

/// Matrix that a kernel may write.
#[derive(Debug)]
pub struct MatrixMut<'a> {
    view: Matrix<'a>,
    lifetime: PhantomData<&'a mut [u8]>,
}

// SAFETY: a view is a shared borrow of plain numbers.
unsafe impl Send for Matrix<'_> {}
// SAFETY: as above.
unsafe impl Sync for Matrix<'_> {}
// SAFETY: a mutable view is an exclusive borrow of plain numbers.
unsafe impl Send for MatrixMut<'_> {}
// SAFETY: through `&MatrixMut` elements are only reached by `unsafe` methods, whose callers keep
// threads to disjoint rows.
unsafe impl Sync for MatrixMut<'_> {}

impl<'a> Matrix<'a> {
    /// A contiguous matrix of `f32`.
    pub fn f32(data: &'a [f32], num_cols: usize) -> Self {
        Self::contiguous(data, num_cols)
    }

    /// A contiguous matrix of bfloat16.
    pub fn bf16(data: &'a [Bf16], num_cols: usize) -> Self {
        Self::contiguous(data, num_cols)
    }

    fn contiguous<T: Element>(data: &'a [T], num_cols: usize) -> Self {
        assert!(num_cols > 0 && data.len().is_multiple_of(num_cols), "ragged matrix");
        let num_rows = data.len() / num_cols;
        // SAFETY: the slice is borrowed for 'a and holds num_rows * num_cols elements.
        unsafe { Self::from_raw(data.as_ptr().cast(), T::DTYPE, num_rows, num_cols, num_cols) }
    }

    /// A view of foreign memory; `row_stride` is in elements.
    ///
    /// # Safety
    ///
    /// For `'a`, row r is `num_cols` readable elements at `data + r * row_stride * size`, aligned
    /// for the element type, and nobody writes them except through a [`MatrixMut`] given to the
    /// same kernel call where that kernel documents that the two may be the same memory.
    pub unsafe fn from_raw(
        data: *const u8,
        dtype: DType,
        num_rows: usize,
        num_cols: usize,
        row_stride: usize,
    ) -> Self {
        Self { data, dtype, num_rows, num_cols, row_stride, lifetime: PhantomData }
    }

    /// How elements are stored.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Rows.
    pub const fn num_rows(&self) -> usize {
        self.num_rows
    }

    /// Columns.
    pub const fn num_cols(&self) -> usize {
        self.num_cols
    }

    /// `[rows, columns] dtype`, for messages.
    pub fn describe(&self) -> String {
        format!("[{}, {}] {}", self.num_rows, self.num_cols, self.dtype.name())
    }

    /// Whether any byte is in both. Columns of one matrix (equal strides) interleave freely; of
    /// views with unequal strides that cover common addresses, overlap is assumed.
    pub fn overlaps(&self, other: &Self) -> bool {
        let (first, second) = if self.data <= other.data { (self, other) } else { (other, self) };
        let gap = second.data as usize - first.data as usize;
        if gap >= first.num_bytes() || second.num_bytes() == 0 {
            return false;
        }
        let period = first.row_stride * first.dtype.size();
        if period != second.row_stride * second.dtype.size() {
            return true;
        }
        let row = |m: &Self| m.num_cols * m.dtype.size();
        let phase = gap % period;
        phase < row(first) || phase + row(second) > period
    }

    /// Bytes from the first element to the end of the last row.
    fn num_bytes(&self) -> usize {
        if self.num_rows == 0 || self.num_cols == 0 {
            return 0;
        }
        ((self.num_rows - 1) * self.row_stride + self.num_cols) * self.dtype.size()
    }

    /// Elements from a row to the next.
    #[inline(always)]
    pub(crate) fn row_stride(&self) -> usize {
        self.row_stride
    }

    /// Start of a row. Panics on a wrong type or row: both were checked by the caller.
    #[inline(always)]
    pub(crate) fn row<T: Element>(&self, row: usize) -> *const T {
        assert!(row < self.num_rows && self.dtype == T::DTYPE);
        self.data.cast::<T>().wrapping_add(row * self.row_stride)
    }
}

impl<'a> MatrixMut<'a> {
    /// A contiguous matrix of `f32`.
    pub fn f32(data: &'a mut [f32], num_cols: usize) -> Self {
        Self::contiguous(data, num_cols)
    }

    /// A contiguous matrix of bfloat16.
    pub fn bf16(data: &'a mut [Bf16], num_cols: usize) -> Self {
        Self::contiguous(data, num_cols)
    }

    fn contiguous<T: Element>(data: &'a mut [T], num_cols: usize) -> Self {
        assert!(num_cols > 0 && data.len().is_multiple_of(num_cols), "ragged matrix");
        let num_rows = data.len() / num_cols;
        // SAFETY: the slice is exclusively borrowed for 'a and holds num_rows * num_cols elements.
        unsafe { Self::from_raw(data.as_mut_ptr().cast(), T::DTYPE, num_rows, num_cols, num_cols) }
    }

    /// A view of foreign memory; `row_stride` is in elements.
    ///
    /// # Safety
    ///
    /// For `'a`, row r is `num_cols` writable elements at `data + r * row_stride * size`, aligned
    /// for the element type, rows do not overlap, and nobody else reads or writes them.
    pub unsafe fn from_raw(
        data: *mut u8,
        dtype: DType,
        num_rows: usize,
        num_cols: usize,
        row_stride: usize,
    ) -> Self {
        // SAFETY: passed on to the caller.
        let view = unsafe { Matrix::from_raw(data, dtype, num_rows, num_cols, row_stride) };
        Self { view, lifetime: PhantomData }
    }

    /// The same memory, to look at.
    pub const fn as_matrix(&self) -> &Matrix<'a> {
        &self.view
    }

    /// Make a row zero. Panics on a wrong row.
    pub(crate) fn zero_row(&self, row: usize) {
        assert!(row < self.view.num_rows);
        let Matrix { data, dtype, num_cols, row_stride, .. } = self.view;
        let start = data.cast_mut().wrapping_add(row * row_stride * dtype.size());
        // SAFETY: a row of the view; zero is all bits zero in every type.
        unsafe { start.write_bytes(0, num_cols * dtype.size()) };
    }

    /// Start of a row. Panics on a wrong type or row.
    #[inline(always)]
    pub(crate) fn row<T: Element>(&self, row: usize) -> *mut T {
        self.view.row::<T>(row).cast_mut()
    }
}

/// One layer's KV, to read. See [`crate::layout`].
#[derive(Debug, Clone, Copy)]
pub struct KvView<'a> {
    data: *const u8,
    layout: KvLayout,
    lifetime: PhantomData<&'a [u8]>,
}

/// One layer's KV, to write.
#[derive(Debug)]
pub struct KvViewMut<'a> {
    view: KvView<'a>,
    lifetime: PhantomData<&'a mut [u8]>,
}

// SAFETY: a view is a shared borrow of plain numbers.
unsafe impl Send for KvView<'_> {}
// SAFETY: as above.
unsafe impl Sync for KvView<'_> {}
// SAFETY: an exclusive borrow of plain numbers.
unsafe impl Send for KvViewMut<'_> {}
// SAFETY: writes through `&KvViewMut` are atomic stores (`rope.rs`), so threads cannot race.
unsafe impl Sync for KvViewMut<'_> {}

impl<'a> KvView<'a> {
    /// A layer held in a slice. Panics unless the type and the length are the layout's, and the
    /// slice is aligned as they need.
    pub fn new<T: KvElement>(data: &'a [T], layout: KvLayout) -> Self {
        assert_fits(data, layout);
        // SAFETY: the slice is borrowed for 'a and has the layout's length.
        unsafe { Self::from_raw(data.as_ptr().cast(), layout) }
    }

    /// A layer in foreign memory.
    ///
    /// # Safety
    ///
    /// `data` points to `layout.layer_len()` readable elements, aligned as [`KvDType::alignment`]
    /// says, that nobody writes for `'a`.
    pub unsafe fn from_raw(data: *const u8, layout: KvLayout) -> Self {
        Self { data, layout, lifetime: PhantomData }
    }

    /// How elements are stored.
    pub const fn dtype(&self) -> KvDType {
        self.layout.dtype
    }

    /// The layer's shape.
    pub const fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// First element. Panics on a wrong type.
    #[inline(always)]
    pub(crate) fn base<T: KvElement>(&self) -> *const T {
        assert!(self.layout.dtype == T::KV_DTYPE);
        self.data.cast()
    }
}

impl<'a> KvViewMut<'a> {
    /// A layer held in a slice. Panics unless the type and the length are the layout's, and the
    /// slice is aligned as they need.
    pub fn new<T: KvElement>(data: &'a mut [T], layout: KvLayout) -> Self {
        assert_fits(data, layout);
        // SAFETY: the slice is exclusively borrowed for 'a and has the layout's length.
        unsafe { Self::from_raw(data.as_mut_ptr().cast(), layout) }
    }

    /// A layer in foreign memory.
    ///
    /// # Safety
    ///
    /// `data` points to `layout.layer_len()` writable elements, aligned as [`KvDType::alignment`]
    /// says, that nobody else reads or writes for `'a`.
    pub unsafe fn from_raw(data: *mut u8, layout: KvLayout) -> Self {
        // SAFETY: passed on to the caller.
        let view = unsafe { KvView::from_raw(data, layout) };
        Self { view, lifetime: PhantomData }
    }

    /// The same memory, to look at.
    pub const fn as_view(&self) -> &KvView<'a> {
        &self.view
    }

    /// First element. Panics on a wrong type.
    #[inline(always)]
    pub(crate) fn base<T: KvElement>(&self) -> *mut T {
        self.view.base::<T>().cast_mut()
    }
}

/// Panic unless `data` is one layer of `layout`.
fn assert_fits<T: KvElement>(data: &[T], layout: KvLayout) {
    assert_eq!(data.len(), layout.layer_len(), "KV length");
    assert_eq!(T::KV_DTYPE, layout.dtype, "KV type");
    let address = data.as_ptr() as usize;
    assert!(address.is_multiple_of(layout.dtype.alignment()), "KV alignment");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Views into one array of `f32`, `row_stride` 6 unless said otherwise.
    fn view(data: &[f32], from: usize, rows: usize, cols: usize, stride: usize) -> Matrix<'_> {
        assert!(from + (rows - 1) * stride + cols <= data.len());
        // SAFETY: inside the slice, as asserted.
        unsafe { Matrix::from_raw(data[from..].as_ptr().cast(), DType::F32, rows, cols, stride) }
    }

    #[test]
    fn columns_of_one_matrix_do_not_overlap() {
        let data = [0.0; 64];
        let (q, k) = (view(&data, 0, 3, 4, 6), view(&data, 4, 3, 2, 6));
        let cases = [
            (k, false, "the columns beside q"),
            (view(&data, 2, 3, 2, 6), true, "inside q's columns"),
            (view(&data, 5, 2, 2, 6), true, "wraps into q's next row"),
            (view(&data, 4, 2, 2, 7), true, "unequal strides are taken to overlap"),
            (view(&data, 16, 3, 4, 6), false, "after q"),
            (view(&data, 8, 1, 1, 6), true, "one element of the second row"),
        ];
        for (other, overlap, what) in cases {
            assert_eq!(q.overlaps(&other), overlap, "{what}");
            assert_eq!(other.overlaps(&q), overlap, "{what}, the other way round");
        }
    }
}
