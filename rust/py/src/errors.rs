//! The exceptions of `fastserve._core`, and the one mapping from Rust's errors to them.
//!
//! They derive from `fastserve.errors.FastserveError`, so that one `except` covers the package, and
//! from the builtin that a Python programmer expects.

use fastserve_base::{ConfigError, RequestError, StepError};
use fastserve_engine::TransferError;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};

static REQUEST_ERROR: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static CONFIG_ERROR: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static STEP_ERROR: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static TRANSFER_ERROR: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static CORE_BUG: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// Define the exceptions and add them to the module.
pub(crate) fn register(parent: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = parent.py();
    let errors = py.import("fastserve.errors")?;
    let base = errors.getattr("FastserveError")?.cast_into::<PyType>()?;
    let value_error = py.get_type::<PyValueError>();
    let runtime_error = py.get_type::<PyRuntimeError>();

    let fields = PyDict::new(py);
    fields.set_item("code", "bad_request")?;
    fields.set_item("http_status", 400)?;
    let request_error = exception(
        &base,
        &value_error,
        "RequestError",
        "A request was refused and nothing was queued. The text has the value, the limit and the \
         remedy.\n\nAttributes:\n    code: Stable machine-readable name.\n    http_status: What a \
         server should answer with.",
        fields,
    )?;
    let step_error = exception(
        &base,
        &runtime_error,
        "StepError",
        "A step was driven out of turn, or its results do not fit it. The core is unchanged.",
        PyDict::new(py),
    )?;
    let transfer_error = exception(
        &base,
        &runtime_error,
        "TransferError",
        "Nothing can be copied between the pool and another tier. The core is unchanged.",
        PyDict::new(py),
    )?;
    let core_bug = exception(
        &base,
        &runtime_error,
        "CoreBug",
        "The core panicked: a bug in it. It cannot be used any more, and every later call says so.",
        PyDict::new(py),
    )?;
    let config_error = errors.getattr("ConfigError")?.cast_into::<PyType>()?;

    for (name, class, cell) in [
        ("RequestError", request_error, &REQUEST_ERROR),
        ("ConfigError", config_error, &CONFIG_ERROR),
        ("StepError", step_error, &STEP_ERROR),
        ("TransferError", transfer_error, &TRANSFER_ERROR),
        ("CoreBug", core_bug, &CORE_BUG),
    ] {
        parent.add(name, &class)?;
        let _ = cell.set(py, class.unbind());
    }
    Ok(())
}

/// A class `name(base, builtin)` of this module.
fn exception<'py>(
    base: &Bound<'py, PyType>,
    builtin: &Bound<'py, PyType>,
    name: &str,
    doc: &str,
    namespace: Bound<'py, PyDict>,
) -> PyResult<Bound<'py, PyType>> {
    namespace.set_item("__module__", "fastserve._core")?;
    namespace.set_item("__doc__", doc)?;
    let class = base.py().get_type::<PyType>().call1((name, (base, builtin), namespace))?;
    Ok(class.cast_into::<PyType>()?)
}

/// An instance of one of the classes above, as an error to return.
fn raise<'py>(
    py: Python<'py>,
    class: &PyOnceLock<Py<PyType>>,
    arguments: impl pyo3::call::PyCallArgs<'py>,
) -> PyErr {
    let class = class.get(py).expect("register() runs when the module is imported").bind(py);
    match class.call1(arguments) {
        Ok(error) => PyErr::from_value(error),
        Err(error) => error,
    }
}

/// A refused request, in the core's words.
pub(crate) fn request_error(py: Python<'_>, error: &RequestError) -> PyErr {
    refusal(py, &error.to_string(), error.code(), error.http_status())
}

/// A refused request whose value does not even fit the core's types.
pub(crate) fn refusal(py: Python<'_>, message: &str, code: &str, http_status: u16) -> PyErr {
    let error = raise(py, &REQUEST_ERROR, (message,));
    let value = error.value(py);
    let named =
        value.setattr("code", code).and_then(|()| value.setattr("http_status", http_status));
    named.map_or_else(|failed| failed, |()| error)
}

/// A number outside its range, in the words of [`RequestError::OutOfRange`].
pub(crate) fn out_of_range(
    py: Python<'_>,
    name: &str,
    value: &Bound<'_, PyAny>,
    want: &str,
) -> PyErr {
    refusal(py, &format!("{name}={value}: want {want}"), "out_of_range", 400)
}

/// A bad configuration: every bad field at once.
pub(crate) fn config_error(py: Python<'_>, error: ConfigError) -> PyErr {
    raise(py, &CONFIG_ERROR, ("Core", error.problems))
}

/// A step driven out of turn.
pub(crate) fn step_error(py: Python<'_>, error: &StepError) -> PyErr {
    raise(py, &STEP_ERROR, (error.to_string(),))
}

/// A copy that cannot be made.
pub(crate) fn transfer_error(py: Python<'_>, error: &TransferError) -> PyErr {
    raise(py, &TRANSFER_ERROR, (error.to_string(),))
}

/// A panic of the core. A backtrace goes into the exception's notes.
pub(crate) fn core_bug(py: Python<'_>, message: &str, backtrace: Option<&str>) -> PyErr {
    let error = raise(py, &CORE_BUG, (message,));
    match backtrace.map(|backtrace| error.value(py).call_method1("add_note", (backtrace,))) {
        Some(Err(failed)) => failed,
        _ => error,
    }
}
