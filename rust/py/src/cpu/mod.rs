//! `fastserve._core.cpu`: the CPU kernels on numpy arrays.
//!
//! Arrays are borrowed for one call and never copied. bfloat16 travels as `uint16`. Every check
//! that keeps a kernel inside its arrays is made here or in `fastserve_cpu`, before anything is
//! computed; a wrong argument is a `ValueError` or `TypeError` with its name, what it was and what
//! it should be. Kernels run without the GIL: as with any numpy function that does so, another
//! thread must not write the arrays meanwhile (a table entry that changes under a kernel is caught
//! where it is used, and is a `RuntimeError`).

pub(crate) mod decoder;
pub(crate) mod kv;
pub(crate) mod sampling;
mod weights;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use fastserve_cpu as cpu;
use fastserve_cpu::{Attention, Isa, KvView, KvViewMut, Rope};
use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::arrays::{Array, Memory, Words, check_overlap};
use decoder::{Decoder, Layer};
use kv::KvArray;
use weights::{Packed, Weight};

/// Add the submodule `cpu` to `parent`.
pub(crate) fn register(parent: &Bound<'_, PyModule>) -> PyResult<()> {
    let module = PyModule::new(parent.py(), "cpu")?;
    module.add_class::<Pool>()?;
    module.add_class::<Packed>()?;
    module.add_class::<Weight>()?;
    module.add_class::<Layer>()?;
    module.add_class::<Decoder>()?;
    module.add_class::<sampling::Sampler>()?;
    module.add_class::<sampling::Samples>()?;
    module.add("NOT_FINITE", cpu::sampling::NOT_FINITE)?;
    module.add("ALL_MASKED", cpu::sampling::ALL_MASKED)?;
    module.add_function(wrap_pyfunction!(weights::weight_formats, &module)?)?;
    module.add_function(wrap_pyfunction!(weights::decode, &module)?)?;
    module.add_function(wrap_pyfunction!(weights::encode, &module)?)?;
    module.add_function(wrap_pyfunction!(sampling::best_tokens, &module)?)?;
    module.add_function(wrap_pyfunction!(sampling::draw_tokens, &module)?)?;
    module.add_function(wrap_pyfunction!(sampling::row_logprobs, &module)?)?;
    module.add_function(wrap_pyfunction!(sampling::draw_bits, &module)?)?;
    module.add_function(wrap_pyfunction!(sampling::philox4x32, &module)?)?;
    module.add_function(wrap_pyfunction!(detect_isa, &module)?)?;
    module.add_function(wrap_pyfunction!(available_isas, &module)?)?;
    module.add_function(wrap_pyfunction!(kv::kv_shape, &module)?)?;
    module.add_function(wrap_pyfunction!(kv::kv_layer_shape, &module)?)?;
    parent.add_submodule(&module)?;
    let modules = parent.py().import("sys")?.getattr("modules")?;
    modules.set_item("fastserve._core.cpu", &module)
}

/// The best instruction set of this machine.
#[pyfunction]
fn detect_isa() -> &'static str {
    Isa::detect().name()
}

/// The instruction sets that this machine can run, the plainest first.
#[pyfunction]
fn available_isas() -> Vec<&'static str> {
    Isa::available().into_iter().map(Isa::name).collect()
}

/// Threads that run kernels. Idle ones sleep. May be shared by threads; calls take turns.
#[pyclass(frozen, module = "fastserve._core.cpu")]
pub(crate) struct Pool {
    pub(crate) pool: Arc<cpu::Pool>,
}

#[pymethods]
impl Pool {
    #[new]
    #[pyo3(signature = (num_threads, isa=None))]
    fn new(num_threads: usize, isa: Option<&str>) -> PyResult<Self> {
        let isa = match isa {
            None => Isa::detect(),
            Some(name) => {
                let known = Isa::from_name(name).filter(|isa| isa.is_available());
                known.ok_or_else(|| {
                    let names = available_isas().join(", ");
                    PyValueError::new_err(format!("isa: got {name:?}, this machine has {names}"))
                })?
            }
        };
        if !(1..=cpu::pool::MAX_NUM_THREADS).contains(&num_threads) {
            let most = cpu::pool::MAX_NUM_THREADS;
            let message = format!("num_threads: got {num_threads}, want 1 to {most}");
            return Err(PyValueError::new_err(message));
        }
        Ok(Self { pool: Arc::new(cpu::Pool::new(num_threads, isa)) })
    }

    /// Threads that compute, the caller's own included.
    #[getter]
    fn num_threads(&self) -> usize {
        self.pool.num_threads()
    }

    /// Instruction set of the kernels.
    #[getter]
    fn isa(&self) -> &'static str {
        self.pool.isa().name()
    }

    /// `out = norm(x) * weight`; with a residual, `residual += x` and `out = norm(residual) * weight`.
    #[pyo3(signature = (x, weight, eps, out, residual=None))]
    fn rms_norm(
        &self,
        x: &Bound<'_, PyAny>,
        weight: &Bound<'_, PyAny>,
        eps: f32,
        out: &Bound<'_, PyAny>,
        residual: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let py = x.py();
        let [x, weight] = [Array::new("x", x)?, Array::new("weight", weight)?];
        let out = Array::new_mut("out", out)?;
        let residual = residual.map(|r| Array::new_mut("residual", r)).transpose()?;
        let carried = residual.as_ref().map(|residual| residual as &dyn Memory);
        check_overlap(&[Some(&out), carried], &[Some(&x), Some(&weight)])?;
        let residual = residual.as_ref().map(Array::matrix_mut).transpose()?;
        let (x, weight, out) = (x.matrix()?, weight.matrix()?, out.matrix_mut()?);
        let norm = cpu::Norm { x, residual, weight, eps, out };
        run(py, || cpu::rms_norm(&self.pool, &norm))
    }

    /// `out = x @ weight.T + bias`. An element's bits depend on its row and its column alone.
    #[pyo3(signature = (x, weight, out, bias=None))]
    fn linear(
        &self,
        x: &Bound<'_, PyAny>,
        weight: &Weight,
        out: &Bound<'_, PyAny>,
        bias: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let py = x.py();
        let (x, out) = (Array::new("x", x)?, Array::new_mut("out", out)?);
        let bias = bias.map(|bias| Array::new("bias", bias)).transpose()?;
        check_overlap(&[Some(&out)], &[Some(&x), bias.as_ref()])?;
        let (x, mut out) = (x.matrix()?, out.matrix_mut()?);
        let bias = bias.as_ref().map(Array::matrix).transpose()?;
        run(py, || cpu::linear(&self.pool, &x, &weight.weight, bias.as_ref(), &mut out))
    }

    /// `out[i] = weight[rows[i]]`.
    fn gather(
        &self,
        weight: &Weight,
        rows: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let py = out.py();
        let (rows, out) = (Words::new("rows", rows)?, Array::new_mut("out", out)?);
        let (rows, mut out) = (rows.slice(), out.matrix_mut()?);
        run(py, || cpu::gather(&self.pool, &weight.weight, rows, &mut out))
    }

    /// `out = silu(gate) * up` where a row of `gate_up` is the gate's half, then up's.
    fn silu_mul(&self, gate_up: &Bound<'_, PyAny>, out: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = out.py();
        let (gate_up, out) = (Array::new("gate_up", gate_up)?, Array::new_mut("out", out)?);
        check_overlap(&[Some(&out)], &[Some(&gate_up)])?;
        let (gate_up, mut out) = (gate_up.matrix()?, out.matrix_mut()?);
        run(py, || cpu::silu_mul(&self.pool, &gate_up, &mut out))
    }

    /// Rotate q in place (after a norm per head, if given); rotate k the same way and store it and
    /// v in `kv_layer` at `slot_mapping` (-1: store nothing). k and v are not changed.
    #[pyo3(signature = (q, k, v, positions, slot_mapping, cos_sin, kv_layer, *,
                        q_norm=None, k_norm=None, norm_eps=0.0))]
    #[expect(clippy::too_many_arguments, reason = "the kernel's arguments, by name in Python")]
    fn rope_and_write_kv(
        &self,
        q: &Bound<'_, PyAny>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        positions: &Bound<'_, PyAny>,
        slot_mapping: &Bound<'_, PyAny>,
        cos_sin: &Bound<'_, PyAny>,
        kv_layer: &Bound<'_, PyAny>,
        q_norm: Option<&Bound<'_, PyAny>>,
        k_norm: Option<&Bound<'_, PyAny>>,
        norm_eps: f32,
    ) -> PyResult<()> {
        let py = q.py();
        let q = Array::new_mut("q", q)?;
        let [k, v] = [Array::new("k", k)?, Array::new("v", v)?];
        let cos_sin = Array::new("cos_sin", cos_sin)?;
        let q_norm = q_norm.map(|w| Array::new("q_norm", w)).transpose()?;
        let k_norm = k_norm.map(|w| Array::new("k_norm", w)).transpose()?;
        let [_, _, head_dim] = q.shape3("[tokens, heads, head_dim]")?;
        let kv = KvArray::layer("kv_layer", kv_layer, head_dim)?.writable()?;
        let read = [Some(&k), Some(&v), Some(&cos_sin), q_norm.as_ref(), k_norm.as_ref()];
        check_overlap(&[Some(&q), Some(&kv)], &read)?;
        let positions = Words::new("positions", positions)?;
        let slot_mapping = Words::new("slot_mapping", slot_mapping)?;

        // SAFETY: `kv` is a C-contiguous, aligned, writable array of the layout's shape, borrowed
        // for this call, that overlaps no other argument.
        let mut view = unsafe { KvViewMut::from_raw(kv.data_mut(), kv.layout()) };
        let rope = Rope {
            k: k.matrix()?,
            v: v.matrix()?,
            positions: positions.slice(),
            slot_mapping: slot_mapping.slice(),
            cos_sin: cos_sin.matrix()?,
            q_norm: q_norm.as_ref().map(Array::matrix).transpose()?,
            k_norm: k_norm.as_ref().map(Array::matrix).transpose()?,
            norm_eps,
        };
        let mut q = q.matrix_mut()?;
        run(py, || cpu::rope_and_write_kv(&self.pool, &mut q, &mut view, &rope))
    }

    /// Causal attention of any mix of rows. Row i owns `q[query_indptr[i]:query_indptr[i + 1]]`,
    /// whose last token has position `seq_lens[i] - 1`; `seq_lens[i] == 0` is a padding row, whose
    /// output is zero. `window`: keys a token sees, itself included (0: all). `num_shared_blocks`:
    /// leading blocks of each row that are those of the row before, to read them once.
    #[pyo3(signature = (q, kv_layer, block_tables, row_slots, query_indptr, seq_lens, out, *,
                        scale, window=0, softcap=0.0, num_shared_blocks=None))]
    #[expect(clippy::too_many_arguments, reason = "the kernel's arguments, by name in Python")]
    fn paged_attention(
        &self,
        q: &Bound<'_, PyAny>,
        kv_layer: &Bound<'_, PyAny>,
        block_tables: &Bound<'_, PyAny>,
        row_slots: &Bound<'_, PyAny>,
        query_indptr: &Bound<'_, PyAny>,
        seq_lens: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        scale: f32,
        window: usize,
        softcap: f32,
        num_shared_blocks: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let py = q.py();
        let (q, out) = (Array::new("q", q)?, Array::new_mut("out", out)?);
        let [_, _, head_dim] = q.shape3("[tokens, heads, head_dim]")?;
        let kv = KvArray::layer("kv_layer", kv_layer, head_dim)?;
        check_overlap(&[Some(&out)], &[Some(&q)])?;
        check_overlap(&[Some(&out), Some(&kv)], &[])?;
        let tables = Words::new_2d("block_tables", block_tables)?;
        let row_slots = Words::new("row_slots", row_slots)?;
        let query_indptr = Words::new("query_indptr", query_indptr)?;
        let seq_lens = Words::new("seq_lens", seq_lens)?;
        let num_shared_blocks =
            num_shared_blocks.map(|words| Words::new("num_shared_blocks", words)).transpose()?;
        let args = Attention {
            q: q.matrix()?,
            // SAFETY: `kv` is a C-contiguous, aligned array of the layout's shape, borrowed for
            // this call, that does not overlap `out`.
            kv: unsafe { KvView::from_raw(kv.data_mut(), kv.layout()) },
            block_tables: tables.slice(),
            max_blocks: tables.num_cols(),
            row_slots: row_slots.slice(),
            query_indptr: query_indptr.slice(),
            seq_lens: seq_lens.slice(),
            num_shared_blocks: num_shared_blocks.as_ref().map_or(&[], Words::slice),
            scale,
            window,
            softcap,
        };
        let mut out = out.matrix_mut()?;
        run(py, || cpu::paged_attention(&self.pool, &args, &mut out))
    }
}

/// Run `kernel` without the GIL. A panic in it is a bug of ours, and becomes a `RuntimeError`.
fn run<T: Send>(
    py: Python<'_>,
    kernel: impl FnOnce() -> Result<T, cpu::ArgumentError> + Send,
) -> PyResult<T> {
    match py.detach(|| catch_unwind(AssertUnwindSafe(kernel))) {
        Ok(result) => result.map_err(value_error),
        Err(panic) => Err(PyRuntimeError::new_err(bug_text(&*panic))),
    }
}

/// What a panic of a kernel is called.
pub(crate) fn bug_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("panic");
    format!("bug in a CPU kernel: {text}")
}

#[expect(clippy::needless_pass_by_value, reason = "signature of map_err")]
fn value_error(error: cpu::ArgumentError) -> PyErr {
    if error.is_out_of_memory {
        return PyMemoryError::new_err(error.to_string());
    }
    PyValueError::new_err(error.to_string())
}
