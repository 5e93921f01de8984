//! `fastserve.core.Core`: the scheduler, for the one thread that steps it.
//!
//! A step is two calls, [`Core::plan`] and [`Core::commit`], each over flat int32 arrays that are
//! borrowed for the call and never copied. Both keep the GIL: they take microseconds, and getting the
//! GIL back from a thread that runs Python can take milliseconds.
//!
//! `Core` has one owner. A second thread that enters while the first is inside gets `RuntimeError` at
//! once, where waiting would hide the mistake; so does a scheduling policy that calls back. Everybody
//! else uses an `Inbox`.
//!
//! Where a `StepLoop` steps it, its thread is the owner. It holds the core while it plans and commits;
//! what else is called waits for that, without the GIL.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use fastserve_base::{RequestId, StepError, StepId, Ticket, Token};
use fastserve_engine::{Core as EngineCore, Results, StepOutputs as CoreOutputs};
use numpy::PyArray2;
use numpy::ndarray::ArrayView2;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::config::{self, Settings};
use crate::guard::Health;
use crate::inbox::Inbox;
use crate::outputs::{self, PlanSizes, Spares, StepOutputs, Transfer};
use crate::policy::PythonPolicy;
use crate::{convert, errors};

/// Block pool, prefix tree and scheduler, one step at a time.
///
/// Keywords are the fields of the core's configuration; `config` shows them in force and `warnings`
/// says which limits were lowered. Raises `ConfigError` with every bad field at once.
///
/// One thread steps. The others use `inbox()`.
#[pyclass(module = "fastserve._core", frozen)]
pub(crate) struct Core {
    shared: Arc<SharedCore>,
    policy: Option<PythonPolicy>,
    spares: Arc<Spares<CoreOutputs>>,
    vocab_size: u32,
    /// Rows and columns of `block_tables`, and its address as the core gave it at construction.
    tables: (usize, usize, usize),
}

/// The core itself, which a [`StepLoop`](crate::steps::StepLoop) shares.
pub(crate) struct SharedCore {
    engine: Mutex<EngineCore>,
    pub(crate) health: Health,
    /// Whether the thread of a `StepLoop` steps it.
    is_driven: AtomicBool,
}

impl SharedCore {
    /// Enter the core in the thread that drives it.
    pub(crate) fn lock(&self) -> MutexGuard<'_, EngineCore> {
        // A panic leaves poison and a bug in `health`, which is asked before anything else is done.
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Say whether a thread drives the core.
    pub(crate) fn set_driven(&self, is_driven: bool) {
        self.is_driven.store(is_driven, Ordering::Release);
    }

    fn is_driven(&self) -> bool {
        self.is_driven.load(Ordering::Acquire)
    }
}

impl Core {
    /// What a `StepLoop` shares, or why there can be none.
    pub(crate) fn share(&self) -> PyResult<Arc<SharedCore>> {
        if self.policy.is_some() {
            return Err(PyValueError::new_err(
                "core: its scheduling_policy is a Python object, which cannot be called without the \
                 GIL; want one by name",
            ));
        }
        Ok(Arc::clone(&self.shared))
    }

    /// Vectors for outputs.
    pub(crate) fn spares(&self) -> Arc<Spares<CoreOutputs>> {
        Arc::clone(&self.spares)
    }

    /// Rows and columns of the block tables.
    pub(crate) fn tables_shape(&self) -> (usize, usize) {
        (self.tables.0, self.tables.1)
    }

    /// Enter the core, or say why not.
    fn with<T>(&self, py: Python<'_>, call: impl FnOnce(&mut EngineCore) -> T) -> PyResult<T> {
        let shared = &self.shared;
        let mut core = loop {
            match shared.engine.try_lock() {
                Ok(core) => break core,
                // `health` remembers the panic.
                Err(TryLockError::Poisoned(poisoned)) => break poisoned.into_inner(),
                Err(TryLockError::WouldBlock) if shared.is_driven() => {
                    py.detach(|| drop(shared.lock()));
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(PyRuntimeError::new_err(
                        "this Core is inside another call: one thread steps, the others use an \
                         Inbox, and a scheduling policy does not call back",
                    ));
                }
            }
        };
        let result = shared.health.guarded(py, || call(&mut core));
        drop(core);
        if let Some(policy) = &self.policy {
            policy.report(py);
        }
        result
    }

    /// Tokens and places of a transfer.
    fn transfer_arguments(
        &self,
        tokens: &Bound<'_, PyAny>,
        places: &Bound<'_, PyAny>,
    ) -> PyResult<(Vec<Token>, Vec<u32>)> {
        let tokens = convert::tokens("tokens", tokens, self.vocab_size)?;
        Ok((tokens, convert::places(places)?))
    }

    /// Stepping belongs to whoever drives.
    fn check_is_not_driven(&self) -> PyResult<()> {
        if self.shared.is_driven() {
            let text = "a StepLoop steps this Core and takes its outputs; stop that first";
            return Err(PyRuntimeError::new_err(text));
        }
        Ok(())
    }

    /// Enter the core with empty outputs and return them filled.
    fn with_outputs(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut EngineCore) -> Result<(), StepError>,
    ) -> PyResult<StepOutputs> {
        self.check_is_not_driven()?;
        let mut filled = self.spares.take();
        let result = self.with(py, |core| {
            call(core)?;
            core.take_outputs(&mut filled);
            Ok(())
        })?;
        result.map_err(|error| errors::step_error(py, &error))?;
        Ok(StepOutputs::new(filled, Arc::clone(&self.spares)))
    }
}

#[pymethods]
impl Core {
    #[new]
    #[pyo3(
        signature = (**keywords),
        text_signature = "(*, num_blocks, block_size=16, max_model_len=4096, max_num_seqs=128, \
            max_num_batched_tokens=2048, max_chunk_tokens=None, long_prefill_threshold=None, \
            max_long_prefill_percent=100, max_num_mixed_prefill_tokens=None, \
            context_per_token=None, max_num_output_rows=1024, max_num_steps_in_flight=1, \
            max_num_draft_tokens=0, enable_prefix_caching=True, scheduling_policy='fcfs', \
            max_wait_s=30.0, watermark_blocks=0, vocab_size=2147483647, \
            max_num_queued_requests=4096, max_num_queued_tokens=67108864, \
            max_num_sequences_per_request=128, max_sampling_words=4096, max_num_step_failures=3, \
            max_num_tickets=8, hash_seed=11400714819323198485, num_step_records=4096, \
            num_timeline_events=65536, enable_block_events=False, groups=None)"
    )]
    fn new(py: Python<'_>, keywords: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let Settings { config, policy } = match keywords {
            Some(keywords) => config::from_keywords(keywords)?,
            None => config::from_keywords(&PyDict::new(py))?,
        };
        let policy = policy.map(PythonPolicy::new);
        let health = Health::default();
        let made = health.guarded(py, || match &policy {
            Some(policy) => EngineCore::with_policy(config, Box::new(policy.clone())),
            None => EngineCore::new(config),
        })?;
        let core = made.map_err(|error| errors::config_error(py, error))?;
        let rows = core.config().max_num_seqs as usize;
        let columns = core.config().max_blocks_per_seq() as usize;
        assert_eq!(core.block_tables().len(), rows * columns, "block tables have their shape");
        Ok(Self {
            spares: Arc::new(Spares::new(rows, CoreOutputs::with_capacity)),
            vocab_size: core.config().vocab_size,
            tables: (rows, columns, core.block_tables().as_ptr().addr()),
            shared: Arc::new(SharedCore {
                engine: Mutex::new(core),
                health,
                is_driven: AtomicBool::new(false),
            }),
            policy,
        })
    }

    /// Sections of an arena by name: (offset, capacity), in words.
    #[getter]
    fn layout<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let layout = self.with(py, |core| core.layout().clone())?;
        let sections = PyDict::new(py);
        for (name, section) in layout.sections() {
            sections.set_item(name, (section.offset, section.capacity))?;
        }
        Ok(sections)
    }

    /// Words that an arena needs.
    #[getter]
    fn plan_words(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |core| core.layout().words)
    }

    /// The configuration in force, by keyword.
    #[getter]
    fn config<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let config = self.with(py, |core| core.config().clone())?;
        let policy = self.policy.as_ref().and_then(|policy| policy.callable(py));
        config::to_dict(py, &config, policy.as_ref())
    }

    /// One sentence for each limit that was lowered at construction.
    #[getter]
    fn warnings(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.with(py, |core| core.warnings().to_vec())
    }

    /// Block tables, int32 `[max_num_seqs, max_blocks]`: a read-only view of the core's own memory.
    ///
    /// The address never changes. `plan`, `commit` and `fail` write it; read it between them.
    #[getter]
    fn block_tables<'py>(this: &Bound<'py, Self>) -> PyResult<Bound<'py, PyArray2<i32>>> {
        let (rows, columns, address) = this.get().tables;
        this.get().with(this.py(), |core| {
            let tables = core.block_tables();
            assert_eq!(tables.as_ptr().addr(), address, "block tables have not moved");
            let tables =
                ArrayView2::from_shape((rows, columns), tables).expect("shape was checked");
            // SAFETY: the core keeps the tables at one address as long as it lives (checked above),
            // and `this` keeps the core.
            unsafe { outputs::view(this.as_any(), &tables) }
        })
    }

    /// Where the core stands: `running`, `paused`, `draining` or `closed`.
    #[getter]
    fn state(&self, py: Python<'_>) -> PyResult<&'static str> {
        self.with(py, |core| core.state().name())
    }

    /// The message of the bug that stopped this core, if one did. Never raises.
    #[getter]
    fn bug(&self) -> Option<&str> {
        self.shared.health.bug()
    }

    /// A handle for the other threads.
    fn inbox(&self, py: Python<'_>) -> PyResult<Inbox> {
        self.with(py, |core| Inbox::new(core.inbox(), self.shared.health.clone(), core.config()))
    }

    /// Write the next step's plan into `arena` and return its sizes.
    ///
    /// `arena` is a C-contiguous int32 array of `plan_words` words, borrowed for this call; there is
    /// one more of them than steps may be in flight. `now` is in nanoseconds on any monotonic clock
    /// of the caller's. Raises `StepError` if too many steps are in flight, the arena is too short or
    /// the core is closed.
    fn plan(&self, py: Python<'_>, now: u64, arena: &Bound<'_, PyAny>) -> PyResult<PlanSizes> {
        self.check_is_not_driven()?;
        let mut arena = convert::words_mut("arena", arena)?;
        let words = arena.as_slice_mut()?;
        let sizes = self.with(py, |core| core.plan(now, words))?;
        sizes.map(PlanSizes::from).map_err(|error| errors::step_error(py, &error))
    }

    /// Give the results of the oldest step in flight and take what it has to say.
    ///
    /// One place per output row in each array. `counts`: 1 for a sampled token, 0 for a score, below
    /// 0 for an error that ends that sequence alone. `tokens`: the sampled tokens.
    fn commit(
        &self,
        py: Python<'_>,
        step: u64,
        now: u64,
        counts: &Bound<'_, PyAny>,
        tokens: &Bound<'_, PyAny>,
    ) -> PyResult<StepOutputs> {
        let counts = convert::words("counts", counts)?;
        let tokens = convert::words("tokens", tokens)?;
        let results = Results { counts: counts.as_slice()?, tokens: tokens.as_slice()? };
        self.with_outputs(py, |core| core.commit(StepId(step), now, results))
    }

    /// The oldest step in flight failed: drop every step in flight and compute their sequences again.
    ///
    /// A sequence under which more than `max_num_step_failures` steps failed since its last token ends
    /// with `error`.
    fn fail(&self, py: Python<'_>, step: u64, now: u64) -> PyResult<StepOutputs> {
        self.with_outputs(py, |core| core.fail(StepId(step), now))
    }

    /// What there is to say between steps: aborts, refusals.
    fn take_outputs(&self, py: Python<'_>) -> PyResult<StepOutputs> {
        self.with_outputs(py, |_| Ok(()))
    }

    /// Copy blocks of a cached prefix of `tokens` to another tier, from `first_block` on.
    ///
    /// `places` numbers them there. Blocks are held until `complete`; `copies_out` of the plans that
    /// follow list them. Raises `TransferError` if nothing can be copied.
    #[pyo3(
        signature = (tokens, places, *, first_block = 0, namespace = None),
        text_signature = "($self, tokens, places, *, first_block=0, namespace=0)"
    )]
    fn offload(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        places: &Bound<'_, PyAny>,
        first_block: usize,
        namespace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Transfer> {
        let (tokens, places) = self.transfer_arguments(tokens, places)?;
        let namespace = convert::namespace(namespace)?;
        let begun = self.with(py, |core| core.offload(namespace, &tokens, first_block, &places))?;
        begun.map(Transfer::from).map_err(|error| errors::transfer_error(py, &error))
    }

    /// Bring the whole blocks of `tokens` that are not cached here from another tier.
    ///
    /// `places` has one place for each whole block. `copies_in` of the plans that follow list them;
    /// sequences that need them wait for `complete`. Raises `TransferError` if nothing can be copied.
    #[pyo3(
        signature = (tokens, places, *, namespace = None),
        text_signature = "($self, tokens, places, *, namespace=0)"
    )]
    fn fetch(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        places: &Bound<'_, PyAny>,
        namespace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Transfer> {
        let (tokens, places) = self.transfer_arguments(tokens, places)?;
        let namespace = convert::namespace(namespace)?;
        let begun = self.with(py, |core| core.fetch(namespace, &tokens, &places))?;
        begun.map(Transfer::from).map_err(|error| errors::transfer_error(py, &error))
    }

    /// A copy has ended, well or not. False: none has this ticket, or its plans did not list it yet.
    fn complete(&self, py: Python<'_>, ticket: u64, ok: bool) -> PyResult<bool> {
        self.with(py, |core| core.complete(Ticket(ticket), ok))
    }

    /// Plan nothing until `resume`; keys and values are kept, requests queue.
    fn pause(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, EngineCore::pause)
    }

    /// Plan again, and take requests again, after `pause` or `drain`.
    fn resume(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, EngineCore::resume)
    }

    /// Take no new request; what was accepted goes on to its end.
    fn drain(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, EngineCore::drain)
    }

    /// End everything with `abort`. The outputs are in `take_outputs`.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, EngineCore::close)
    }

    /// Nothing cached so far is matched any more, with requests running too.
    fn reset_prefix_cache(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, EngineCore::reset_prefix_cache)
    }

    /// Whether anything waits, in the inbox too, runs, is in flight or is in the outputs.
    fn has_work(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, |core| core.has_work())
    }

    /// Counters since construction and gauges of now, by name.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.with(py, |core| core.stats())?;
        outputs::stats_dict(py, &stats)
    }

    /// Prove every invariant, in time that grows with the pool. Raises `CoreBug` if one is broken.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |core| core.check())
    }

    /// State changes of a request, oldest first, as far as they are kept.
    fn timeline<'py>(&self, py: Python<'py>, request_id: u64) -> PyResult<Bound<'py, PyList>> {
        let events = self.with(py, |core| core.timeline(RequestId(request_id)))?;
        outputs::list(py, &events, outputs::event_dict)
    }

    /// Every block that a prefix can be matched in.
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let blocks = self.with(py, |core| core.snapshot())?;
        outputs::list(py, &blocks, outputs::block_dict)
    }

    /// Block events since the last call, oldest first. Empty unless `enable_block_events`.
    fn take_block_events<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let mut events = Vec::new();
        self.with(py, |core| core.take_block_events(&mut events))?;
        outputs::list(py, &events, outputs::block_event_dict)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.policy.as_ref().map_or(Ok(()), |policy| policy.traverse(&visit))
    }

    fn __clear__(&self) {
        if let Some(policy) = &self.policy {
            policy.clear();
        }
    }
}
