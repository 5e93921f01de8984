//! `fastserve._core`: what Python sees of the Rust side.

use pyo3::prelude::*;

mod arrays;
mod cpu;

/// The extension module.
#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    cpu::register(module)
}
