//! A scheduling policy written in Python: a callable that ranks a [`Candidate`].
//!
//! It is called once for each request, inside `plan`, when the request leaves the inbox. A policy only
//! orders, so a wrong one can do no harm, and neither can one that raises: the request keeps rank 0,
//! and when the core is done with the call a `RuntimeWarning` says what happened.

use std::sync::{Arc, Mutex, PoisonError};

use fastserve_sched::{Candidate as CoreCandidate, Policy};
use pyo3::exceptions::{PyKeyboardInterrupt, PyRuntimeWarning};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;

use crate::guard;

/// What a policy may look at.
#[pyclass(module = "fastserve._core", frozen, get_all)]
pub(crate) struct Candidate {
    /// The request.
    request_id: u64,
    /// Its priority; in the `priority` policy lower runs first.
    priority: i32,
    /// Tokens of its prompt.
    num_prompt_tokens: u32,
    /// Most tokens it may generate, a sequence.
    max_tokens: u32,
    /// When it arrived, in nanoseconds on the caller's clock.
    arrival: u64,
}

#[pymethods]
impl Candidate {
    fn __repr__(&self) -> String {
        format!(
            "Candidate(request_id={}, priority={}, num_prompt_tokens={}, max_tokens={}, arrival={})",
            self.request_id, self.priority, self.num_prompt_tokens, self.max_tokens, self.arrival
        )
    }
}

impl From<&CoreCandidate> for Candidate {
    fn from(candidate: &CoreCandidate) -> Self {
        Self {
            request_id: candidate.request.0,
            priority: candidate.priority,
            num_prompt_tokens: candidate.num_prompt_tokens,
            max_tokens: candidate.max_tokens,
            arrival: candidate.arrival,
        }
    }
}

/// The callable, shared by the core, which calls it, and the `Core` object, which owns it.
///
/// One reference for both, so that the garbage collector can see and break a cycle through it.
#[derive(Clone)]
pub(crate) struct PythonPolicy {
    callable: Arc<Mutex<Option<Py<PyAny>>>>,
    failures: Arc<Mutex<Vec<Failure>>>,
}

struct Failure {
    candidate: CoreCandidate,
    error: PyErr,
}

impl PythonPolicy {
    pub(crate) fn new(callable: Py<PyAny>) -> Self {
        Self { callable: Arc::new(Mutex::new(Some(callable))), failures: Arc::default() }
    }

    /// The callable itself, for `Core.config`. `None` once collected.
    pub(crate) fn callable(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        let callable = self.callable.lock().unwrap_or_else(PoisonError::into_inner);
        callable.as_ref().map(|callable| callable.clone_ref(py))
    }

    /// Let the garbage collector see the callable. It takes no lock that it might wait for.
    pub(crate) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        match self.callable.try_lock() {
            Ok(callable) => visit.call(&*callable),
            Err(_) => Ok(()),
        }
    }

    /// Break a cycle through the callable.
    pub(crate) fn clear(&self) {
        let callable = self.callable.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(callable);
    }

    /// Warn of what went wrong since the last call. Never raises: a step may have been planned.
    pub(crate) fn report(&self, py: Python<'_>) {
        let failures: Vec<Failure> = {
            let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut *failures)
        };
        for Failure { candidate, error } in failures {
            if error.is_instance_of::<PyKeyboardInterrupt>(py) {
                // Ctrl-C came while the policy ran. Let it come again, outside the core.
                let again = py.import("_thread").and_then(|it| it.call_method0("interrupt_main"));
                again.map_or_else(|error| error.write_unraisable(py, None), drop);
                continue;
            }
            let text = format!(
                "scheduling_policy failed for request {}, which keeps rank 0: {error}",
                candidate.request.0
            );
            let category = py.get_type::<PyRuntimeWarning>();
            let warned = py
                .import("warnings")
                .and_then(|warnings| warnings.call_method1("warn", (text, category)));
            if let Err(raised) = warned {
                raised.write_unraisable(py, self.callable(py).as_ref().map(|it| it.bind(py)));
            }
        }
    }

    fn call(&self, py: Python<'_>, candidate: &CoreCandidate) -> PyResult<i64> {
        match self.callable(py) {
            Some(callable) => callable.bind(py).call1((Candidate::from(candidate),))?.extract(),
            None => Ok(0),
        }
    }
}

impl Policy for PythonPolicy {
    fn name(&self) -> &'static str {
        "python"
    }

    fn rank(&mut self, candidate: &CoreCandidate) -> i64 {
        let ranked = guard::unguarded(|| Python::attach(|py| self.call(py, candidate)));
        ranked.unwrap_or_else(|error| {
            let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
            failures.push(Failure { candidate: *candidate, error });
            0
        })
    }
}
