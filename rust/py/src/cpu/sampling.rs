//! What a step does with its logits: best tokens, draws, log probabilities.

use fastserve_cpu as cpu;
use numpy::{Element, IntoPyArray, PyArray1, PyReadonlyArray1};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use super::{Pool, run};
use crate::arrays::{Array, Words};

/// Token, logit and whether the row is finite, of each row.
type BestTokens<'py> =
    (Bound<'py, PyArray1<i32>>, Bound<'py, PyArray1<f32>>, Bound<'py, PyArray1<bool>>);

/// Rank of the chosen token, token ids and log probabilities of one row.
type RowLogprobs = (usize, Vec<i32>, Vec<f32>);

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
