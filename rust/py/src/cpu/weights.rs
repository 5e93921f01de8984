//! Numbers of a file: rows for matrix products, which are packed, and those that are decoded.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fastserve_cpu as cpu;
use fastserve_cpu::{Bf16, DType, WeightFormat};
use numpy::{PyReadonlyArray1, PyReadwriteArray1};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::{run, value_error};
use crate::arrays::Array;

/// Names of the formats that files have and weights are multiplied in.
#[pyfunction]
pub(crate) fn weight_formats() -> Vec<&'static str> {
    WeightFormat::OF_FILES.into_iter().map(WeightFormat::name).collect()
}

fn known_format(name: &str) -> PyResult<WeightFormat> {
    WeightFormat::from_name(name).ok_or_else(|| {
        let names = weight_formats().join(", ");
        PyValueError::new_err(format!("format: got {name:?}, want one of {names}, or I8"))
    })
}

fn bytes_of<'a>(name: &str, array: &'a PyReadonlyArray1<'_, u8>) -> PyResult<&'a [u8]> {
    array.as_slice().map_err(|_| {
        PyValueError::new_err(format!("{name}: got an array with gaps, want contiguous bytes"))
    })
}

/// `out` = the numbers of `blocks`, bytes as in a file; rounded to nearest even where `out` is
/// bfloat16.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "how arguments come from Python")]
pub(crate) fn decode(
    format: &str,
    blocks: PyReadonlyArray1<'_, u8>,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let format = known_format(format)?;
    let bytes = bytes_of("blocks", &blocks)?;
    let mut array = Array::new_mut("out", out)?;
    match array.dtype() {
        DType::F32 => {
            let numbers = array.slice_mut::<f32>(("blocks", bytes))?;
            run(out.py(), || cpu::decode(format, bytes, numbers))
        }
        DType::Bf16 => {
            let numbers = array.slice_mut::<Bf16>(("blocks", bytes))?;
            run(out.py(), || cpu::decode(format, bytes, numbers))
        }
    }
}

/// `out` = float32 `numbers` in blocks of `format`, `Q8_0` or `Q4_1`, bytes as in a file.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "how arguments come from Python")]
pub(crate) fn encode(
    py: Python<'_>,
    format: &str,
    numbers: PyReadonlyArray1<'_, f32>,
    mut out: PyReadwriteArray1<'_, u8>,
) -> PyResult<()> {
    let format = known_format(format)?;
    let gaps =
        |name| PyValueError::new_err(format!("{name}: got an array with gaps, want contiguous"));
    let numbers = numbers.as_slice().map_err(|_| gaps("numbers"))?;
    let out = out.as_slice_mut().map_err(|_| gaps("out"))?;
    py.detach(|| cpu::encode(format, numbers, out)).map_err(value_error)
}

/// Rows of one format, in the layout of the product kernels. Filled row by row, then part of a
/// `Weight`.
#[pyclass(frozen, module = "fastserve._core.cpu")]
pub(crate) struct Packed {
    packed: Mutex<Option<cpu::Packed>>,
}

impl Packed {
    fn lock(&self) -> MutexGuard<'_, Option<cpu::Packed>> {
        self.packed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> PyResult<cpu::Packed> {
        self.lock().take().ok_or_else(in_a_weight)
    }
}

fn in_a_weight() -> PyErr {
    PyValueError::new_err("packed: these rows are part of a Weight already")
}

#[pymethods]
impl Packed {
    /// Room for `[num_rows, num_cols]`, zeros.
    #[new]
    fn new(format: &str, num_rows: usize, num_cols: usize) -> PyResult<Self> {
        let format = known_format(format)?;
        let packed = cpu::Packed::new(format, num_rows, num_cols).map_err(value_error)?;
        Ok(Self { packed: Mutex::new(Some(packed)) })
    }

    /// Store rows from `first_row` on: their bytes as in a file, one row after the other. For I8 those of
    /// float32, which are quantized.
    #[expect(clippy::needless_pass_by_value, reason = "how arguments come from Python")]
    fn fill(
        &self,
        py: Python<'_>,
        first_row: usize,
        rows: PyReadonlyArray1<'_, u8>,
    ) -> PyResult<()> {
        let rows = bytes_of("rows", &rows)?;
        let fill = || self.lock().as_mut().map(|packed| packed.fill(first_row, rows));
        py.detach(fill).ok_or_else(in_a_weight)?.map_err(value_error)
    }
}

/// A weight of one or more packed parts, one below the other.
#[pyclass(frozen, module = "fastserve._core.cpu")]
pub(crate) struct Weight {
    pub(crate) weight: Arc<cpu::Weight>,
}

#[pymethods]
impl Weight {
    /// Takes the parts, which are of no more use then; on an error they are what they were.
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "how arguments come from Python")]
    fn new(parts: Vec<Bound<'_, Packed>>) -> PyResult<Self> {
        let mut taken = Vec::with_capacity(parts.len());
        let all = parts.iter().try_for_each(|part| {
            taken.push(part.get().take()?);
            Ok(())
        });
        let checked = all.and_then(|()| cpu::Weight::check(&taken).map_err(value_error));
        if let Err(error) = checked {
            for (part, packed) in parts.iter().zip(taken) {
                *part.get().lock() = Some(packed);
            }
            return Err(error);
        }
        Ok(Self { weight: Arc::new(cpu::Weight::new(taken).map_err(value_error)?) })
    }

    /// `(rows, columns)`: outputs and inputs of a product.
    #[getter]
    fn shape(&self) -> (usize, usize) {
        (self.weight.num_rows(), self.weight.num_cols())
    }

    /// Memory that it takes.
    #[getter]
    fn num_bytes(&self) -> usize {
        self.weight.num_bytes()
    }

    /// The format of each part.
    #[getter]
    fn formats(&self) -> Vec<&'static str> {
        self.weight.parts().iter().map(|part| part.format().name()).collect()
    }
}
