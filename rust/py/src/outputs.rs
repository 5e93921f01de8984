//! What `plan` and `commit` return. Arrays, not objects: a step costs the same to read whatever the
//! batch.
//!
//! [`StepOutputs`] keeps the vectors that the core filled and shows them as numpy views. When Python
//! is done with it, the vectors go back to the core and are filled again, so that a step at its steady
//! size allocates nothing but a few small Python objects.

use std::sync::{Arc, Mutex, PoisonError};

use fastserve_engine::{EventKind, PlanSizes as CorePlanSizes, StepOutputs as CoreOutputs};
use fastserve_engine::{Stats, StepRecord, TimelineEvent, Transfer as CoreTransfer};
use fastserve_kv::{BlockEvent, BlockInfo, CacheTier, ChainHash};
use numpy::ndarray::{ArrayView, Dimension};
use numpy::{Element, PyArray, PyArray1, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

/// Sizes of a plan. Unless `is_step`, there is nothing to run and no step was created.
#[pyclass(module = "fastserve._core", frozen, get_all)]
pub(crate) struct PlanSizes {
    /// The step to commit, if it is one.
    step: u64,
    /// Rows.
    num_rows: u32,
    /// Tokens to compute.
    num_tokens: u32,
    /// Output rows: results to give to `commit`.
    num_outputs: u32,
    /// Copies, within the pool and to and from another tier. A step may have nothing else.
    num_copies: u32,
}

#[pymethods]
impl PlanSizes {
    /// Whether there is a step to run and commit.
    #[getter]
    fn is_step(&self) -> bool {
        self.num_rows > 0 || self.num_copies > 0
    }

    fn __repr__(&self) -> String {
        format!(
            "PlanSizes(step={}, num_rows={}, num_tokens={}, num_outputs={}, num_copies={})",
            self.step, self.num_rows, self.num_tokens, self.num_outputs, self.num_copies
        )
    }
}

impl From<CorePlanSizes> for PlanSizes {
    fn from(sizes: CorePlanSizes) -> Self {
        Self {
            step: sizes.step.0,
            num_rows: sizes.num_rows,
            num_tokens: sizes.num_tokens,
            num_outputs: sizes.num_outputs,
            num_copies: sizes.num_copies,
        }
    }
}

/// A copy between the pool and another tier that was accepted.
#[pyclass(module = "fastserve._core", frozen, get_all)]
pub(crate) struct Transfer {
    /// To be given to `complete`.
    ticket: u64,
    /// First block of the prefix that is copied.
    first_block: u32,
    /// Blocks that are copied.
    num_blocks: u32,
}

#[pymethods]
impl Transfer {
    fn __repr__(&self) -> String {
        format!(
            "Transfer(ticket={}, first_block={}, num_blocks={})",
            self.ticket, self.first_block, self.num_blocks
        )
    }
}

impl From<CoreTransfer> for Transfer {
    fn from(transfer: CoreTransfer) -> Self {
        Self {
            ticket: transfer.ticket.0,
            first_block: transfer.first_block,
            num_blocks: transfer.num_blocks,
        }
    }
}

/// Vectors waiting to be filled again.
pub(crate) struct Spares<T> {
    vectors: Mutex<Vec<T>>,
    /// Makes new ones, with room for so many entries.
    make: fn(usize) -> T,
    num_entries: usize,
}

impl<T> Spares<T> {
    /// Who keeps more outputs than this at a time lets the rest be allocated again.
    const MAX_NUM_KEPT: usize = 4;

    pub(crate) fn new(num_entries: usize, make: fn(usize) -> T) -> Self {
        let vectors = Mutex::new(Vec::with_capacity(Self::MAX_NUM_KEPT));
        Self { vectors, make, num_entries }
    }

    pub(crate) fn take(&self) -> T {
        let mut vectors = self.vectors.lock().unwrap_or_else(PoisonError::into_inner);
        vectors.pop().unwrap_or_else(|| (self.make)(self.num_entries))
    }

    pub(crate) fn give(&self, outputs: T) {
        let mut vectors = self.vectors.lock().unwrap_or_else(PoisonError::into_inner);
        if vectors.len() < Self::MAX_NUM_KEPT {
            vectors.push(outputs);
        }
    }
}

/// What a step has to say: flat arrays, one entry per sequence with something to say.
///
/// The arrays are read-only views that keep this object alive.
#[pyclass(module = "fastserve._core", frozen)]
pub(crate) struct StepOutputs {
    outputs: CoreOutputs,
    spares: Arc<Spares<CoreOutputs>>,
}

impl StepOutputs {
    pub(crate) fn new(outputs: CoreOutputs, spares: Arc<Spares<CoreOutputs>>) -> Self {
        Self { outputs, spares }
    }
}

impl Drop for StepOutputs {
    fn drop(&mut self) {
        self.spares.give(std::mem::take(&mut self.outputs));
    }
}

/// A read-only numpy array over memory that `owner` keeps where it is.
///
/// # Safety
///
/// `values` lives in memory that neither moves nor goes while `owner` lives.
pub(crate) unsafe fn view<'py, T: Element, D: Dimension>(
    owner: &Bound<'py, PyAny>,
    values: &ArrayView<'_, T, D>,
) -> Bound<'py, PyArray<T, D>> {
    // SAFETY: the array holds a reference to `owner`, so it cannot outlive the memory.
    let array = unsafe { PyArray::borrow_from_array(values, owner.clone()) };
    drop(array.readwrite().make_nonwriteable());
    array
}

fn flat<'py, T: Element>(
    owner: &Bound<'py, StepOutputs>,
    values: fn(&CoreOutputs) -> &Vec<T>,
) -> Bound<'py, PyArray1<T>> {
    let values = ArrayView::from(values(&owner.get().outputs).as_slice());
    // SAFETY: the class is frozen, so its vectors do not change before it is dropped.
    unsafe { view(owner.as_any(), &values) }
}

#[pymethods]
impl StepOutputs {
    /// Request of each entry.
    #[getter]
    fn request_ids<'py>(this: &Bound<'py, Self>) -> Bound<'py, PyArray1<u64>> {
        flat(this, |outputs| &outputs.request_ids)
    }

    /// Sequence of the request.
    #[getter]
    fn seq_indices<'py>(this: &Bound<'py, Self>) -> Bound<'py, PyArray1<u32>> {
        flat(this, |outputs| &outputs.seq_indices)
    }

    /// Output row of the step whose result it is; −1: none (an abort, say).
    #[getter]
    fn source_rows<'py>(this: &Bound<'py, Self>) -> Bound<'py, PyArray1<i32>> {
        flat(this, |outputs| &outputs.source_rows)
    }

    /// CSR starts of `tokens`, one more than there are entries.
    #[getter]
    fn token_indptr<'py>(this: &Bound<'py, Self>) -> Bound<'py, PyArray1<u32>> {
        flat(this, |outputs| &outputs.token_indptr)
    }

    /// New tokens.
    #[getter]
    fn tokens<'py>(this: &Bound<'py, Self>) -> Bound<'py, PyArray1<i32>> {
        flat(this, |outputs| &outputs.tokens)
    }

    /// 0 while the sequence goes on, else a key of `FINISH_REASONS`.
    #[getter]
    fn finish_reasons<'py>(this: &Bound<'py, Self>) -> Bound<'py, PyArray1<u8>> {
        flat(this, |outputs| &outputs.finish_reasons)
    }

    /// The stop token that ended the sequence, −1 for none.
    #[getter]
    fn stop_tokens<'py>(this: &Bound<'py, Self>) -> Bound<'py, PyArray1<i32>> {
        flat(this, |outputs| &outputs.stop_tokens)
    }

    /// Prompt tokens that came from the cache when the sequence was first admitted.
    #[getter]
    fn num_cached_tokens<'py>(this: &Bound<'py, Self>) -> Bound<'py, PyArray1<u32>> {
        flat(this, |outputs| &outputs.num_cached_tokens)
    }

    /// Output tokens of the sequence so far.
    #[getter]
    fn num_output_tokens<'py>(this: &Bound<'py, Self>) -> Bound<'py, PyArray1<u32>> {
        flat(this, |outputs| &outputs.num_output_tokens)
    }

    /// Entries.
    fn __len__(&self) -> usize {
        self.outputs.len()
    }

    fn __repr__(&self) -> String {
        let num_finished = self.outputs.finish_reasons.iter().filter(|&&code| code != 0).count();
        format!(
            "<StepOutputs of {} sequences: {} tokens, {num_finished} finished>",
            self.outputs.len(),
            self.outputs.tokens.len()
        )
    }
}

/// Every counter and gauge by name.
pub(crate) fn stats_dict<'py>(py: Python<'py>, stats: &Stats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (name, value) in stats.fields() {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}

/// One state change: `seq_index`, `step`, `at`, `kind`, and what belongs to the kind.
pub(crate) fn event_dict<'py>(
    py: Python<'py>,
    event: &TimelineEvent,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("seq_index", event.seq.index)?;
    dict.set_item("step", event.step.0)?;
    dict.set_item("at", event.at)?;
    let kind = match event.kind {
        EventKind::Queued { ahead } => {
            dict.set_item("ahead", ahead)?;
            "queued"
        }
        EventKind::Admitted { cached, slot } => {
            dict.set_item("cached", cached)?;
            dict.set_item("slot", slot)?;
            "admitted"
        }
        EventKind::Forked { slot } => {
            dict.set_item("slot", slot)?;
            "forked"
        }
        EventKind::LeaderWait { leader } => {
            dict.set_item("leader", leader)?;
            "leader_wait"
        }
        EventKind::Preempted { by, computed } => {
            dict.set_item("by", by)?;
            dict.set_item("computed", computed)?;
            "preempted"
        }
        EventKind::RolledBack { failures } => {
            dict.set_item("failures", failures)?;
            "rolled_back"
        }
        EventKind::FirstToken => "first_token",
        EventKind::Finished { reason } => {
            dict.set_item("reason", reason.name())?;
            "finished"
        }
    };
    dict.set_item("kind", kind)?;
    Ok(dict)
}

/// One step that was planned.
pub(crate) fn step_dict<'py>(py: Python<'py>, step: &StepRecord) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("step", step.step.0)?;
    dict.set_item("planned_at", step.planned_at)?;
    dict.set_item("committed_at", step.committed_at)?;
    dict.set_item("num_rows", step.num_rows)?;
    dict.set_item("num_decode_rows", step.num_decode_rows)?;
    dict.set_item("num_tokens", step.num_tokens)?;
    dict.set_item("num_preempted", step.num_preempted)?;
    dict.set_item("failed", step.failed)?;
    Ok(dict)
}

/// One block of the prefix tree.
pub(crate) fn block_dict<'py>(py: Python<'py>, info: &BlockInfo) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("block", info.block.0)?;
    dict.set_item("parent", info.parent.map(|parent| parent.0))?;
    dict.set_item("namespace", info.namespace.0)?;
    dict.set_item("num_uses", info.num_uses)?;
    dict.set_item("hash", info.hash.map(|hash| hash.0))?;
    dict.set_item("tier", tier_name(info.tier))?;
    Ok(dict)
}

/// One change of the prefix tree.
pub(crate) fn block_event_dict<'py>(
    py: Python<'py>,
    event: &BlockEvent,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    match *event {
        BlockEvent::Stored { block, hash, parent, namespace, tier } => {
            dict.set_item("kind", "stored")?;
            dict.set_item("block", block.0)?;
            dict.set_item("hash", hash.0)?;
            dict.set_item("parent", parent.map(|ChainHash(parent)| parent))?;
            dict.set_item("namespace", namespace.0)?;
            dict.set_item("tier", tier_name(tier))?;
        }
        BlockEvent::Removed { block, hash, tier } => {
            dict.set_item("kind", "removed")?;
            dict.set_item("block", block.0)?;
            dict.set_item("hash", hash.0)?;
            dict.set_item("tier", tier_name(tier))?;
        }
        BlockEvent::Cleared => dict.set_item("kind", "cleared")?,
    }
    Ok(dict)
}

fn tier_name(tier: CacheTier) -> &'static str {
    match tier {
        CacheTier::Device => "device",
        _ => "other",
    }
}

/// Records as a list of dicts, for what is asked rarely.
pub(crate) fn list<'py, T>(
    py: Python<'py>,
    records: &[T],
    dict: fn(Python<'py>, &T) -> PyResult<Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for record in records {
        list.append(dict(py, record)?)?;
    }
    Ok(list)
}
