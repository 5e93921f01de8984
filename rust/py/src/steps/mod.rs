//! `fastserve._core.StepLoop`: a thread that steps a core over the native decoder, and never takes the
//! GIL.
//!
//! ```text
//!   any thread                    the loop's thread               a reader
//!   Inbox.submit ── wakes ──────▶ plan, forward, sample, commit
//!   abort, finish                        │ one News a step
//!                                        ▼
//!                                     Outbox ── fileno() readable ─▶ take()
//! ```
//!
//! So Python makes text of step k while step k + 1 is computed. The thread holds the core while it plans
//! and commits, which takes microseconds. It sleeps while there is nothing to do, and while too much of
//! what it said is unread.

mod outbox;
mod run;

use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Wake, Waker};
use std::thread::JoinHandle;

use fastserve_cpu as cpu;
use fastserve_engine::StepOutputs as CoreOutputs;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::arrays::{Array, check_overlap};
use crate::core::{Core, SharedCore};
use crate::cpu::Pool;
use crate::cpu::decoder::Decoder;
use crate::cpu::kv::KvArray;
use crate::cpu::sampling::Samples;
use crate::outputs::{Spares, StepOutputs};
use outbox::{End, News, Outbox};
use run::{Cache, Clock, Model, Stepper};

/// A thread that plans, computes, samples and commits the steps of one core.
///
/// The thread begins with `start` and ends with `stop`, or when the object goes. A forked child has no
/// such thread, and none of its methods may be called there.
#[pyclass(module = "fastserve._core", frozen)]
pub(crate) struct StepLoop {
    core: Arc<SharedCore>,
    outbox: Arc<Outbox>,
    thread: Mutex<Thread>,
    outputs: Arc<Spares<CoreOutputs>>,
    samples: Arc<Spares<cpu::Samples>>,
    process: u32,
    /// The arrays whose memory the thread uses. Dropped after it was joined.
    _arrays: [Py<PyAny>; 2],
}

enum Thread {
    Ready(Box<Stepper>),
    Running(JoinHandle<()>),
    Ended,
}

impl StepLoop {
    /// End the thread, if it was begun, and wait for it.
    fn join(&self) {
        self.outbox.stop();
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *thread, Thread::Ended) {
            Thread::Ready(_) => self.outbox.end(End::Stopped),
            // It catches its panics and says so in the outbox.
            Thread::Running(handle) => drop(handle.join()),
            Thread::Ended => {}
        }
        self.core.set_driven(false);
    }

    /// What an end of the thread is for whoever wants to go on.
    fn end_error(&self, py: Python<'_>, end: End) -> PyErr {
        match end {
            End::Stopped => PyRuntimeError::new_err("the step loop is stopped; make a new one"),
            End::Panicked => self.core.health.first_report(py),
            End::Failed(error) => PyRuntimeError::new_err(error),
        }
    }
}

#[pymethods]
impl StepLoop {
    /// Step `core`, whose scheduling policy has a name, with `decoder` over `kv` and `cos_sin`, arrays as
    /// for `Decoder.forward`, which are the loop's alone from now on. `now` is what the clock shows that
    /// requests arrive on: nanoseconds, monotonic.
    ///
    /// From now on `core` cannot be stepped otherwise.
    #[new]
    #[pyo3(signature = (core, decoder, pool, kv, cos_sin, *, now))]
    fn new(
        core: &Bound<'_, Core>,
        decoder: &Decoder,
        pool: &Pool,
        kv: &Bound<'_, PyAny>,
        cos_sin: &Bound<'_, PyAny>,
        now: u64,
    ) -> PyResult<Self> {
        let shared = core.get().share()?;
        let arrays = [kv.clone().unbind(), cos_sin.clone().unbind()];
        let kv = KvArray::all_mut("kv", kv, decoder.head_dim)?;
        let cos_sin = Array::new("cos_sin", cos_sin)?;
        check_overlap(&[Some(&kv)], &[Some(&cos_sin)])?;
        // SAFETY: a C-contiguous, aligned, writable array of that many layers of the layout's shape. The
        // object keeps it until the thread was joined, and that nobody else writes or reads it is the
        // contract with Python.
        let cache = unsafe { Cache::new(kv.data_mut(), kv.num_layers(), kv.layout()) };
        // SAFETY: as above; only the lifetime changes.
        let cos_sin = unsafe {
            std::mem::transmute::<cpu::Matrix<'_>, cpu::Matrix<'static>>(cos_sin.matrix()?)
        };
        let model = Model {
            decoder: Arc::clone(&decoder.decoder),
            pool: Arc::clone(&pool.pool),
            cache,
            cos_sin,
        };
        let outbox = Outbox::new().map_err(|error| PyOSError::new_err(error.to_string()))?;
        let outbox = Arc::new(outbox);
        let (num_slots, max_blocks) = core.get().tables_shape();
        let outputs = core.get().spares();
        let samples = Arc::new(Spares::new(num_slots, cpu::Samples::with_capacity));
        let spares = (Arc::clone(&outputs), Arc::clone(&samples));
        let clock = Clock::new(now);
        let inbox = shared.lock().inbox();
        if !inbox.set_waker(Waker::from(Arc::clone(&outbox))) {
            return Err(PyValueError::new_err("core: it has had a StepLoop; want a new Core"));
        }
        shared.set_driven(true);
        if shared.lock().has_work() {
            outbox.wake_by_ref();
        }
        let (core, shared_outbox) = (Arc::clone(&shared), Arc::clone(&outbox));
        let stepper = Stepper::new(core, shared_outbox, clock, model, max_blocks, spares);
        Ok(Self {
            core: shared,
            outbox,
            thread: Mutex::new(Thread::Ready(Box::new(stepper))),
            outputs,
            samples,
            process: std::process::id(),
            _arrays: arrays,
        })
    }

    /// Begin the thread, if it was not begun.
    fn start(&self) -> PyResult<()> {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        *thread = match std::mem::replace(&mut *thread, Thread::Ended) {
            Thread::Ready(stepper) => {
                let builder = std::thread::Builder::new().name("fastserve-steps".into());
                let handle = builder.spawn(move || stepper.run());
                Thread::Running(handle.map_err(|error| PyOSError::new_err(error.to_string()))?)
            }
            other => other,
        };
        Ok(())
    }

    /// Readable while there is news to take or nothing to wait for. It is not to be read.
    fn fileno(&self) -> i32 {
        self.outbox.fd()
    }

    /// Whether there is news, or may be soon. False: nothing will come unless something is submitted,
    /// aborted or resumed.
    fn has_work(&self) -> bool {
        self.outbox.has_work()
    }

    /// Raise if the thread has ended and all that it said is taken: `CoreBug` after a bug.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.outbox.end_of_all().map_or(Ok(()), |end| Err(self.end_error(py, end)))
    }

    /// The oldest news, if there is some.
    fn take(&self, py: Python<'_>) -> PyResult<Option<StepNews>> {
        let Some(news) = self.outbox.take() else {
            return Ok(None);
        };
        let News { step, at, outputs, samples, failure } = news;
        let outputs = Py::new(py, StepOutputs::new(outputs, Arc::clone(&self.outputs)))?;
        let samples = if step.is_some() && failure.is_none() {
            Some(Py::new(py, Samples::new(samples, Arc::clone(&self.samples)))?)
        } else {
            None
        };
        Ok(Some(StepNews { step: step.map(|step| step.0), at, outputs, samples, failure }))
    }

    /// End the thread and wait for the step that runs; those planned beyond it are rolled back. What it
    /// said can still be taken, and `core` is its owner's again. May be called again.
    fn stop(&self, py: Python<'_>) {
        py.detach(|| self.join());
    }
}

impl Drop for StepLoop {
    fn drop(&mut self) {
        if std::process::id() == self.process {
            return self.join();
        }
        // The thread is not in this process; there is nothing to join, and what it held stays as it was.
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner);
        std::mem::forget(std::mem::replace(thread, Thread::Ended));
    }
}

/// What one step has to say, or the time between two.
#[pyclass(module = "fastserve._core", frozen, get_all)]
pub(crate) struct StepNews {
    /// The step; `None` between two, after an abort, say.
    step: Option<u64>,
    /// When it was committed, on the clock that requests arrive on.
    at: u64,
    /// For each sequence with something to say.
    outputs: Py<StepOutputs>,
    /// What its output rows gave; `None` without a step and after a failure.
    samples: Option<Py<Samples>>,
    /// What failed; the step was rolled back then.
    failure: Option<String>,
}

#[pymethods]
impl StepNews {
    fn __repr__(&self) -> String {
        let step = self.step.map_or_else(|| "None".to_owned(), |step| step.to_string());
        format!("StepNews(step={step}, at={}, failure={:?})", self.at, self.failure)
    }
}
