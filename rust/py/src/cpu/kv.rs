//! The array of keys and values: its shape, and reading it from Python.

use fastserve_cpu as cpu;
use fastserve_cpu::{DType, KvDType, KvLayout, Matrix};
use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods, dtype};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use super::value_error;
use crate::arrays::{Memory, data_of, is_writable, untyped};

/// Shape of the array of all layers' KV, in elements of `dtype`; axis 1 is the block. A tile of `int8`
/// has its scales at its end.
#[pyfunction]
pub(crate) fn kv_shape(
    num_layers: usize,
    num_blocks: usize,
    block_size: usize,
    num_kv_heads: usize,
    head_dim: usize,
    dtype: &str,
) -> PyResult<(usize, usize, usize, usize, usize)> {
    let dtype = known_dtype(dtype)?;
    let layout = KvLayout { num_blocks, num_kv_heads, block_size, head_dim, dtype };
    layout.check().map_err(value_error)?;
    Ok(cpu::kv_shape(num_layers, layout).into())
}

/// Shape of one layer of it; axis 0 is the block.
#[pyfunction]
pub(crate) fn kv_layer_shape(
    num_blocks: usize,
    block_size: usize,
    num_kv_heads: usize,
    head_dim: usize,
    dtype: &str,
) -> PyResult<(usize, usize, usize, usize)> {
    let dtype = known_dtype(dtype)?;
    let layout = KvLayout { num_blocks, num_kv_heads, block_size, head_dim, dtype };
    layout.check().map_err(value_error)?;
    Ok(cpu::kv_layer_shape(layout).into())
}

fn known_dtype(name: &str) -> PyResult<KvDType> {
    KvDType::from_name(name).ok_or_else(|| {
        let names = KvDType::ALL.map(KvDType::name).join(", ");
        PyValueError::new_err(format!("dtype: got {name:?}, want one of {names}"))
    })
}

/// C-contiguous, aligned keys and values: `float32`, bfloat16 (`uint16`) or `int8`.
pub(crate) struct KvArray<'py> {
    name: &'static str,
    numpy: Bound<'py, PyUntypedArray>,
    num_layers: usize,
    layout: KvLayout,
}

impl<'py> KvArray<'py> {
    /// One layer, of the shape of `kv_layer_shape`, with heads of `head_dim`.
    pub(crate) fn layer(
        name: &'static str,
        object: &Bound<'py, PyAny>,
        head_dim: usize,
    ) -> PyResult<Self> {
        Self::new(name, object, head_dim, false)
    }

    /// All layers, of the shape of `kv_shape`, with heads of `head_dim`; writable.
    pub(crate) fn all_mut(
        name: &'static str,
        object: &Bound<'py, PyAny>,
        head_dim: usize,
    ) -> PyResult<Self> {
        Self::new(name, object, head_dim, true)?.writable()
    }

    fn new(
        name: &'static str,
        object: &Bound<'py, PyAny>,
        head_dim: usize,
        is_all: bool,
    ) -> PyResult<Self> {
        let numpy = untyped(name, object)?;
        let (py, found) = (object.py(), numpy.dtype());
        let dtypes = [dtype::<f32>(py), dtype::<u16>(py), dtype::<i8>(py)];
        let known = KvDType::ALL.into_iter().zip(dtypes).find(|(_, one)| found.is_equiv_to(one));
        let Some((dtype, _)) = known else {
            let message = format!("{name}: got {found}, want float32, uint16 (bfloat16) or int8");
            return Err(PyTypeError::new_err(message));
        };
        let token = dtype.token_len(head_dim);
        let layers = if is_all { "layers, " } else { "" };
        let want = format!("C-contiguous [{layers}blocks, kv heads, 2, block_size * {token}]");
        let error = |want: &str| {
            let (shape, strides) = (numpy.shape(), numpy.strides());
            let message =
                format!("{name}: got shape {shape:?} strides {strides:?} {found}, want {want}");
            PyValueError::new_err(message)
        };
        let (num_layers, layer) = match *numpy.shape() {
            [num_layers, ref layer @ ..] if is_all => (num_layers, layer),
            ref layer => (1, layer),
        };
        let &[num_blocks, num_kv_heads, 2, tile] = layer else { return Err(error(&want)) };
        if head_dim == 0 || !tile.is_multiple_of(token) || !numpy.is_c_contiguous() {
            return Err(error(&want));
        }
        if !(data_of(&numpy) as usize).is_multiple_of(dtype.alignment()) {
            return Err(error(&format!("an array aligned to {} bytes", dtype.alignment())));
        }
        let block_size = tile / token;
        let layout = KvLayout { num_blocks, num_kv_heads, block_size, head_dim, dtype };
        layout.check().map_err(value_error)?;
        Ok(Self { name, numpy, num_layers, layout })
    }

    /// The same, to write.
    pub(crate) fn writable(self) -> PyResult<Self> {
        if is_writable(&self.numpy) {
            return Ok(self);
        }
        let message = format!("{}: got a read-only array, want a writable array", self.name);
        Err(PyValueError::new_err(message))
    }

    pub(crate) fn num_layers(&self) -> usize {
        self.num_layers
    }

    pub(crate) fn layout(&self) -> KvLayout {
        self.layout
    }

    pub(crate) fn data_mut(&self) -> *mut u8 {
        data_of(&self.numpy)
    }
}

impl Memory for KvArray<'_> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn place(&self) -> PyResult<Matrix<'_>> {
        // Tiles are whole words of four bytes, of any type.
        let len = self.numpy.len() * self.layout.dtype.size() / 4;
        // SAFETY: contiguous memory that the array keeps alive; only its place is looked at.
        Ok(unsafe { Matrix::from_raw(self.data_mut(), DType::F32, 1, len, len) })
    }
}
