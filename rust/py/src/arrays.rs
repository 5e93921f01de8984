//! numpy arrays as the views that kernels take.
//!
//! numpy's own borrow checks treat two columns of one fused matrix as overlapping and two tensors
//! that share memory as distinct, so they do not help here; [`check_overlap`] looks at addresses.

use fastserve_cpu::{DType, Matrix, MatrixMut, Numbers, element::Element};
use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods, dtype, npyffi};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

/// An array of `float32` or bfloat16 (`uint16`), checked to be aligned.
pub(crate) struct Array<'py> {
    name: &'static str,
    numpy: Bound<'py, PyUntypedArray>,
    dtype: DType,
}

impl<'py> Array<'py> {
    /// `object`, to read.
    pub(crate) fn new(name: &'static str, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        let array = untyped(name, object)?;
        let py = object.py();
        let found = array.dtype();
        let dtype = if found.is_equiv_to(&dtype::<f32>(py)) {
            DType::F32
        } else if found.is_equiv_to(&dtype::<u16>(py)) {
            DType::Bf16
        } else {
            let message = format!("{name}: got {found}, want float32 or uint16 (bfloat16)");
            return Err(PyTypeError::new_err(message));
        };
        let this = Self { name, numpy: array, dtype };
        let address = this.data() as usize;
        if !address.is_multiple_of(dtype.size()) {
            return Err(this.error("an aligned array"));
        }
        Ok(this)
    }

    /// `object`, to write.
    pub(crate) fn new_mut(name: &'static str, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        let this = Self::new(name, object)?;
        if !is_writable(&this.numpy) {
            return Err(this.error("a writable array"));
        }
        Ok(this)
    }

    /// `ValueError`: the argument's name, its shape, and what was wanted.
    pub(crate) fn error(&self, want: &str) -> PyErr {
        let (shape, strides) = (self.numpy.shape(), self.numpy.strides());
        let dtype = self.dtype.name();
        PyValueError::new_err(format!(
            "{}: got shape {shape:?} strides {strides:?} {dtype}, want {want}",
            self.name
        ))
    }

    pub(crate) fn shape(&self) -> &[usize] {
        self.numpy.shape()
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(crate) fn is_contiguous(&self) -> bool {
        self.numpy.is_c_contiguous()
    }

    /// The shape, which must have three axes.
    pub(crate) fn shape3(&self, want: &str) -> PyResult<[usize; 3]> {
        self.shape().try_into().map_err(|_| self.error(want))
    }

    fn data(&self) -> *const u8 {
        self.data_mut()
    }

    fn data_mut(&self) -> *mut u8 {
        data_of(&self.numpy)
    }

    /// `(rows, columns, row stride)` in elements. Rows are the first axis (a vector is one row);
    /// the other axes must be contiguous.
    fn rows(&self) -> PyResult<(usize, usize, usize)> {
        let (shape, strides) = (self.numpy.shape(), self.numpy.strides());
        let outer = usize::from(shape.len() > 1);
        let want = "at least one axis, contiguous but for the first";
        if shape.is_empty() {
            return Err(self.error(want));
        }
        let num_rows = if outer == 1 { shape[0] } else { 1 };
        let num_cols: usize = shape[outer..].iter().product();
        if num_rows == 0 || num_cols == 0 {
            return Ok((num_rows, num_cols, num_cols));
        }
        let mut run = self.dtype.size() as isize;
        for (&len, &stride) in shape[outer..].iter().zip(&strides[outer..]).rev() {
            if len > 1 && stride != run {
                return Err(self.error(want));
            }
            run *= len as isize;
        }
        if num_rows == 1 {
            return Ok((1, num_cols, num_cols));
        }
        let size = self.dtype.size() as isize;
        if strides[0] < run || strides[0] % size != 0 {
            return Err(self.error(want));
        }
        Ok((num_rows, num_cols, (strides[0] / size) as usize))
    }

    /// As a matrix to read: rows are the first axis.
    pub(crate) fn matrix(&self) -> PyResult<Matrix<'_>> {
        let (rows, cols, stride) = self.rows()?;
        // SAFETY: numpy's shape and strides describe memory that the array keeps alive; alignment
        // was checked; that nobody writes it is the module's contract with Python.
        Ok(unsafe { Matrix::from_raw(self.data(), self.dtype, rows, cols, stride) })
    }

    /// A copy of a vector.
    pub(crate) fn numbers(&self) -> PyResult<Numbers> {
        if self.shape().len() != 1 || !self.is_contiguous() {
            return Err(self.error("one axis, contiguous"));
        }
        let (data, len) = (self.data(), self.numpy.len());
        if len == 0 {
            return Ok(Numbers::none(self.dtype));
        }
        // SAFETY: contiguous, aligned numbers of that type that the array keeps alive, and a bfloat16
        // is its `u16`; that nobody writes them is the module's contract with Python.
        Ok(unsafe {
            match self.dtype {
                DType::F32 => Numbers::F32(std::slice::from_raw_parts(data.cast(), len).to_vec()),
                DType::Bf16 => Numbers::Bf16(std::slice::from_raw_parts(data.cast(), len).to_vec()),
            }
        })
    }

    /// As a matrix to write.
    pub(crate) fn matrix_mut(&self) -> PyResult<MatrixMut<'_>> {
        let (rows, cols, stride) = self.rows()?;
        // SAFETY: as for `matrix`; the array is writable, rows do not overlap since the stride is
        // at least a row, and `check_overlap` was passed.
        Ok(unsafe { MatrixMut::from_raw(self.data_mut(), self.dtype, rows, cols, stride) })
    }

    /// All elements in order, to write. They are `T`, and `memory` is not theirs.
    pub(crate) fn slice_mut<T: Element>(
        &mut self,
        (name, memory): (&str, &[u8]),
    ) -> PyResult<&mut [T]> {
        assert!(self.dtype == T::DTYPE);
        if !self.is_contiguous() {
            return Err(self.error("a C-contiguous array"));
        }
        if self.numpy.is_empty() {
            return Ok(&mut []);
        }
        let (data, len) = (self.data_mut(), self.numpy.len());
        let (own, other) = (data.cast_const(), memory.as_ptr_range());
        if own < other.end && other.start < own.wrapping_add(len * size_of::<T>()) {
            let message = format!("{} and {name}: want memory of their own", self.name);
            return Err(PyValueError::new_err(message));
        }
        // SAFETY: contiguous, aligned and writable elements of that type, which the array keeps
        // alive; that no other thread touches them is the module's contract with Python.
        Ok(unsafe { std::slice::from_raw_parts_mut(data.cast(), len) })
    }
}

/// An argument whose memory is compared with the others'.
pub(crate) trait Memory {
    /// The argument's name.
    fn name(&self) -> &'static str;
    /// Where it lies.
    fn place(&self) -> PyResult<Matrix<'_>>;
}

impl Memory for Array<'_> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn place(&self) -> PyResult<Matrix<'_>> {
        self.matrix()
    }
}

/// `ValueError` if an array that is written shares memory with any other argument.
pub(crate) fn check_overlap(
    written: &[Option<&dyn Memory>],
    read: &[Option<&Array<'_>>],
) -> PyResult<()> {
    let read = read.iter().flatten().map(|&array| array as &dyn Memory);
    let all: Vec<&dyn Memory> = written.iter().copied().flatten().chain(read).collect();
    let num_written = written.iter().flatten().count();
    for (i, a) in all.iter().enumerate().take(num_written) {
        for b in &all[i + 1..] {
            if a.place()?.overlaps(&b.place()?) {
                let message = format!("{} and {}: want memory of their own", a.name(), b.name());
                return Err(PyValueError::new_err(message));
            }
        }
    }
    Ok(())
}

/// A C-contiguous `int32` array.
pub(crate) struct Words<'py> {
    name: &'static str,
    numpy: Bound<'py, PyUntypedArray>,
}

impl<'py> Words<'py> {
    /// With one axis.
    pub(crate) fn new(name: &'static str, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        Self::with_axes(name, object, 1)
    }

    /// With two axes.
    pub(crate) fn new_2d(name: &'static str, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        Self::with_axes(name, object, 2)
    }

    fn with_axes(name: &'static str, object: &Bound<'py, PyAny>, axes: usize) -> PyResult<Self> {
        let array = untyped(name, object)?;
        let found = array.dtype();
        if !found.is_equiv_to(&dtype::<i32>(object.py())) {
            return Err(PyTypeError::new_err(format!("{name}: got {found}, want int32")));
        }
        let this = Self { name, numpy: array };
        let aligned = (this.data() as usize).is_multiple_of(size_of::<i32>());
        if this.numpy.ndim() != axes || !this.numpy.is_c_contiguous() || !aligned {
            let (shape, strides) = (this.numpy.shape(), this.numpy.strides());
            return Err(PyValueError::new_err(format!(
                "{name}: got shape {shape:?} strides {strides:?}, want {axes} axes, C-contiguous"
            )));
        }
        Ok(this)
    }

    fn data(&self) -> *const i32 {
        data_of(&self.numpy).cast()
    }

    /// The words, row by row.
    pub(crate) fn slice(&self) -> &[i32] {
        if self.numpy.is_empty() {
            return &[];
        }
        // SAFETY: contiguous, aligned `int32` that the array keeps alive; that nobody writes it
        // during the call is the module's contract with Python.
        unsafe { std::slice::from_raw_parts(self.data(), self.numpy.len()) }
    }

    /// `ValueError` if any of them is in memory that is written.
    pub(crate) fn check_apart(&self, written: &[&dyn Memory]) -> PyResult<()> {
        let (start, len) = (self.data(), self.numpy.len());
        if len == 0 {
            return Ok(());
        }
        // SAFETY: contiguous, aligned `int32` that the array keeps alive; only its place is looked at.
        let own = unsafe { Matrix::from_raw(start.cast(), DType::F32, 1, len, len) };
        for array in written {
            if array.place()?.overlaps(&own) {
                let names = (array.name(), self.name);
                let message = format!("{} and {}: want memory of their own", names.0, names.1);
                return Err(PyValueError::new_err(message));
            }
        }
        Ok(())
    }

    /// Length of the last axis.
    pub(crate) fn num_cols(&self) -> usize {
        self.numpy.shape().last().copied().unwrap_or(0)
    }
}

/// First element.
pub(crate) fn data_of(array: &Bound<'_, PyUntypedArray>) -> *mut u8 {
    // SAFETY: the array object is alive while it is borrowed.
    unsafe { (*array.as_array_ptr()).fields.data.cast() }
}

pub(crate) fn is_writable(array: &Bound<'_, PyUntypedArray>) -> bool {
    // SAFETY: the array object is alive while it is borrowed.
    let flags = unsafe { (*array.as_array_ptr()).fields.flags };
    flags & npyffi::NPY_ARRAY_WRITEABLE != 0
}

/// `object` as a numpy array of any type.
pub(crate) fn untyped<'py>(
    name: &'static str,
    object: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyUntypedArray>> {
    object.cast::<PyUntypedArray>().cloned().map_err(|_| {
        let found = object.get_type();
        PyTypeError::new_err(format!("{name}: got {found}, want a numpy array"))
    })
}
