//! What a step does with its logits: the sampler, and the kernels that it is made of.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fastserve_cpu as cpu;
use fastserve_sched::plan;
use numpy::ndarray::ArrayView;
use numpy::{Element, IntoPyArray, PyArray1, PyReadonlyArray1};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use super::{Pool, run};
use crate::arrays::{Array, Words};
use crate::outputs::{Spares, view};

/// Token, logit and whether the row is finite, of each row.
type BestTokens<'py> =
    (Bound<'py, PyArray1<i32>>, Bound<'py, PyArray1<f32>>, Bound<'py, PyArray1<bool>>);

/// Rank of the chosen token, token ids and log probabilities of one row.
type RowLogprobs = (usize, Vec<i32>, Vec<f32>);

/// Sampling state by row slot. Samples step after step, in the order of the steps.
#[pyclass(frozen, module = "fastserve._core.cpu")]
pub(crate) struct Sampler {
    state: Mutex<cpu::Sampler>,
    /// Where `last_samples` lie, and how many there are.
    last_samples: (usize, usize),
    spares: Arc<Spares<cpu::Samples>>,
}

impl Sampler {
    fn lock(&self) -> MutexGuard<'_, cpu::Sampler> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Take over the slots that `events` assign and forget those they release.
pub(crate) fn apply_events<'a>(
    sampler: &mut cpu::Sampler,
    events: impl Iterator<Item = plan::SlotEvent<'a>>,
) -> Result<(), cpu::ArgumentError> {
    for event in events {
        if event.assigned {
            sampler.assign(&cpu::Assignment {
                slot: event.slot,
                request: event.request,
                index: event.index,
                num_prompt_tokens: event.num_prompt_tokens,
                record: event.sampling,
                tokens: event.tokens,
            })?;
        } else {
            sampler.release(event.slot)?;
        }
    }
    Ok(())
}

#[pymethods]
impl Sampler {
    #[new]
    fn new(max_num_seqs: usize, vocab_size: usize) -> Self {
        let sampler = cpu::Sampler::new(max_num_seqs, vocab_size);
        let last = sampler.last_samples();
        let last_samples = (last.as_ptr().addr(), last.len());
        let spares = Arc::new(Spares::new(max_num_seqs, cpu::Samples::with_capacity));
        Self { state: Mutex::new(sampler), last_samples, spares }
    }

    /// The token that each slot sampled last: a read-only view of the sampler's own memory.
    ///
    /// The address never changes. `sample` writes it; read it between two steps.
    #[getter]
    fn last_samples<'py>(this: &Bound<'py, Self>) -> Bound<'py, PyArray1<i32>> {
        let sampler = this.get().lock();
        let last = sampler.last_samples();
        assert_eq!((last.as_ptr().addr(), last.len()), this.get().last_samples, "have not moved");
        // SAFETY: the sampler keeps them at one address as long as it lives (checked above), and
        // `this` keeps the sampler.
        unsafe { view(this.as_any(), &ArrayView::from(last)) }
    }

    /// Take over the slots that a plan assigns and forget those it releases. The arrays are the plan's,
    /// by their names there. To be called once for every plan, before `sample`.
    fn apply_events(
        &self,
        py: Python<'_>,
        slot_events: &Bound<'_, PyAny>,
        event_words: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let events = Words::new_2d("slot_events", slot_events)?;
        let payload = Words::new("event_words", event_words)?;
        let (events, payload) = (events.slice(), payload.slice());
        run(py, || apply_events(&mut self.lock(), plan::slot_events(events, payload)))
    }

    /// One token for every output row of a step, from `logits`, float32 `[num_outputs, vocab_size]`. The
    /// other arrays are the plan's, by their names there.
    #[pyo3(signature = (pool, logits, *, positions, out_rows, out_slots, out_kinds))]
    #[expect(clippy::too_many_arguments, reason = "a plan's arrays, by name in Python")]
    fn sample(
        &self,
        py: Python<'_>,
        pool: &Pool,
        logits: &Bound<'_, PyAny>,
        positions: &Bound<'_, PyAny>,
        out_rows: &Bound<'_, PyAny>,
        out_slots: &Bound<'_, PyAny>,
        out_kinds: &Bound<'_, PyAny>,
    ) -> PyResult<Samples> {
        let logits = Array::new("logits", logits)?;
        let positions = Words::new("positions", positions)?;
        let out_rows = Words::new("out_rows", out_rows)?;
        let out_slots = Words::new("out_slots", out_slots)?;
        let out_kinds = Words::new("out_kinds", out_kinds)?;
        let outputs = cpu::Outputs {
            positions: positions.slice(),
            out_rows: out_rows.slice(),
            out_slots: out_slots.slice(),
            out_kinds: out_kinds.slice(),
        };
        let logits = logits.matrix()?;
        let mut samples = self.spares.take();
        run(py, || self.lock().sample(&pool.pool, &logits, &outputs, &mut samples))?;
        Ok(Samples::new(samples, Arc::clone(&self.spares)))
    }
}

/// What a step's output rows gave.
#[pyclass(frozen, module = "fastserve._core.cpu")]
pub(crate) struct Samples {
    samples: cpu::Samples,
    spares: Arc<Spares<cpu::Samples>>,
}

impl Samples {
    pub(crate) fn new(samples: cpu::Samples, spares: Arc<Spares<cpu::Samples>>) -> Self {
        Self { samples, spares }
    }
}

impl Drop for Samples {
    fn drop(&mut self) {
        self.spares.give(std::mem::take(&mut self.samples));
    }
}

#[pymethods]
impl Samples {
    /// Tokens appended a row: 1 for a sample, 0 for a score, `NOT_FINITE` or `ALL_MASKED` for a row that
    /// failed.
    #[getter]
    fn counts<'py>(this: &Bound<'py, Self>) -> Bound<'py, PyArray1<i32>> {
        // SAFETY: the class is frozen, so its vectors do not change before it is dropped.
        unsafe { view(this.as_any(), &ArrayView::from(this.get().samples.counts.as_slice())) }
    }

    /// The sampled token a row; of no meaning where the count is not 1.
    #[getter]
    fn tokens<'py>(this: &Bound<'py, Self>) -> Bound<'py, PyArray1<i32>> {
        // SAFETY: as above.
        unsafe { view(this.as_any(), &ArrayView::from(this.get().samples.tokens.as_slice())) }
    }

    /// Of the sampled tokens that they were asked for: output row, then as `row_logprobs` returns it.
    fn logprobs(&self) -> Vec<(i32, RowLogprobs)> {
        self.samples.logprobs.iter().map(|(row, found)| (*row, row_of(found))).collect()
    }

    /// Of prompt tokens: request, position, then as `row_logprobs` returns it.
    fn scores(&self) -> Vec<(u64, i32, RowLogprobs)> {
        let scores = self.samples.scores.iter();
        scores.map(|score| (score.request, score.position, row_of(&score.logprobs))).collect()
    }
}

fn row_of(found: &cpu::RowLogprobs) -> RowLogprobs {
    (found.rank, found.token_ids.clone(), found.logprobs.clone())
}

/// The best token of each row of `logits`, the lowest of equals; its logit, NaN if the row has one;
/// and whether the row is finite.
#[pyfunction]
pub(crate) fn best_tokens<'py>(
    py: Python<'py>,
    pool: &Pool,
    logits: &Bound<'py, PyAny>,
) -> PyResult<BestTokens<'py>> {
    let logits = Array::new("logits", logits)?;
    let logits = logits.matrix()?;
    let best = run(py, || cpu::best_tokens(&pool.pool, &logits))?;
    let tokens: Vec<i32> = best.iter().map(|best| best.token).collect();
    let values: Vec<f32> = best.iter().map(|best| best.logit).collect();
    let finite: Vec<bool> = best.iter().map(|best| best.is_finite).collect();
    Ok((tokens.into_pyarray(py), values.into_pyarray(py), finite.into_pyarray(py)))
}

/// One token for each of `rows` of `logits`, drawn with its own settings and 64 bits.
#[pyfunction]
#[pyo3(signature = (pool, logits, rows, *, temperature, top_k, top_p, min_p, bits))]
#[expect(clippy::too_many_arguments, reason = "the settings of a draw, by name in Python")]
pub(crate) fn draw_tokens<'py>(
    py: Python<'py>,
    pool: &Pool,
    logits: &Bound<'py, PyAny>,
    rows: &Bound<'py, PyAny>,
    temperature: &Bound<'py, PyAny>,
    top_k: &Bound<'py, PyAny>,
    top_p: &Bound<'py, PyAny>,
    min_p: &Bound<'py, PyAny>,
    bits: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyArray1<i32>>> {
    let logits = Array::new("logits", logits)?;
    let (rows, top_k) = (Words::new("rows", rows)?, Words::new("top_k", top_k)?);
    let logits = logits.matrix()?;
    let temperature = values("temperature", temperature)?;
    let (top_p, min_p) = (values("top_p", top_p)?, values("min_p", min_p)?);
    let bits = values("bits", bits)?;
    let draws = cpu::Draws {
        rows: rows.slice(),
        temperature: slice("temperature", &temperature)?,
        top_k: top_k.slice(),
        top_p: slice("top_p", &top_p)?,
        min_p: slice("min_p", &min_p)?,
        bits: slice("bits", &bits)?,
    };
    Ok(run(py, || cpu::draw_tokens(&pool.pool, &logits, &draws))?.into_pyarray(py))
}

/// For each of `rows` of `logits`: the rank of its `chosen` token, then that token and the
/// `num_best` best ones, and their log probabilities.
#[pyfunction]
pub(crate) fn row_logprobs(
    py: Python<'_>,
    pool: &Pool,
    logits: &Bound<'_, PyAny>,
    rows: &Bound<'_, PyAny>,
    chosen: &Bound<'_, PyAny>,
    num_best: &Bound<'_, PyAny>,
) -> PyResult<Vec<RowLogprobs>> {
    let logits = Array::new("logits", logits)?;
    let (rows, chosen) = (Words::new("rows", rows)?, Words::new("chosen", chosen)?);
    let num_best = Words::new("num_best", num_best)?;
    let logits = logits.matrix()?;
    let (rows, chosen, num_best) = (rows.slice(), chosen.slice(), num_best.slice());
    let scores = run(py, || cpu::row_logprobs(&pool.pool, &logits, rows, chosen, num_best))?;
    Ok(scores.into_iter().map(|row| (row.rank, row.token_ids, row.logprobs)).collect())
}

/// Four random words, a function of a counter of four and a key of two.
#[pyfunction]
pub(crate) fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> (u32, u32, u32, u32) {
    cpu::philox4x32(counter, key).into()
}

/// 64 random bits for each (seed, sequence index, position of the token to draw).
#[pyfunction]
pub(crate) fn draw_bits<'py>(
    py: Python<'py>,
    seeds: &Bound<'py, PyAny>,
    sequence_indices: &Bound<'py, PyAny>,
    positions: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyArray1<u64>>> {
    let seeds = values("seeds", seeds)?;
    let seeds = slice("seeds", &seeds)?;
    let indices = Words::new("sequence_indices", sequence_indices)?;
    let positions = Words::new("positions", positions)?;
    let (indices, positions) = (indices.slice(), positions.slice());
    if indices.len() != seeds.len() || positions.len() != seeds.len() {
        let lens = [seeds.len(), indices.len(), positions.len()];
        return Err(PyValueError::new_err(format!(
            "seeds, sequence_indices, positions: got {lens:?} values, want equally many"
        )));
    }
    let names = seeds.iter().zip(indices).zip(positions);
    let bits: Vec<u64> = names
        .map(|((&seed, &index), &position)| cpu::draw_bits(seed, index as u32, position as u32))
        .collect();
    Ok(bits.into_pyarray(py))
}

/// `object` as an array of one axis.
fn values<'py, T: Element>(
    argument: &str,
    object: &Bound<'py, PyAny>,
) -> PyResult<PyReadonlyArray1<'py, T>> {
    object.extract().map_err(|_| {
        let want = T::get_dtype(object.py());
        let got = object.get_type();
        PyTypeError::new_err(format!("{argument}: got {got}, want an array of {want}, one axis"))
    })
}

/// The values of `array`, which must lie side by side.
fn slice<'a, T: Element>(argument: &str, array: &'a PyReadonlyArray1<'_, T>) -> PyResult<&'a [T]> {
    array.as_slice().map_err(|_| {
        PyValueError::new_err(format!(
            "{argument}: got an array with gaps or not aligned, want a contiguous and aligned one"
        ))
    })
}
