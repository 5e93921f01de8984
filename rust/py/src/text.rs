//! `fastserve._core.text`: token tables and detokenizers. Converts and forwards, nothing else.

#![allow(clippy::needless_pass_by_value)] // PyO3 hands over owned values.

use std::sync::Arc;

use fastserve_text::{
    Detokenizer as CoreDetokenizer, DetokenizerOptions, StopStrings as CoreStopStrings,
    TokenTable as CoreTokenTable,
};
use numpy::PyReadonlyArray1;
use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyModule};

/// The bytes of every token id of a vocabulary, and which ids are special. Immutable; shared by all
/// sequences of a model.
#[pyclass(module = "fastserve._core.text", frozen)]
struct TokenTable {
    table: Arc<CoreTokenTable>,
}

#[pymethods]
impl TokenTable {
    /// `tokens[id]` is what token `id` stands for, in bytes; `special_ids` mark structure.
    #[new]
    #[pyo3(signature = (tokens, special_ids = Vec::new()))]
    fn new(tokens: Vec<Bound<'_, PyBytes>>, special_ids: Vec<u32>) -> Self {
        let bytes = tokens.iter().map(PyBytesMethods::as_bytes);
        Self { table: Arc::new(CoreTokenTable::new(bytes, &special_ids)) }
    }

    fn __len__(&self) -> usize {
        self.table.len()
    }

    /// The bytes of `token`; empty for an id beyond the table (a padded vocabulary has such ids).
    fn token_bytes<'py>(&self, py: Python<'py>, token: u32) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.table.bytes_of(token))
    }

    /// Whether `token` is special.
    fn is_special(&self, token: u32) -> bool {
        self.table.is_special(token)
    }

    /// The text of `tokens` as a whole; what is no UTF-8 becomes U+FFFD.
    #[pyo3(signature = (tokens, *, skip_special_tokens = true, strip_leading_space = false))]
    fn decode(
        &self,
        tokens: &Bound<'_, PyAny>,
        skip_special_tokens: bool,
        strip_leading_space: bool,
    ) -> PyResult<String> {
        let options = DetokenizerOptions {
            skip_special_tokens,
            strip_leading_space,
            ..DetokenizerOptions::default()
        };
        let stops = Arc::new(CoreStopStrings::default());
        let mut detokenizer = CoreDetokenizer::new(Arc::clone(&self.table), stops, options);
        let mut text = String::new();
        detokenizer.push(&token_ids(tokens)?, &mut text);
        detokenizer.finish(&mut text);
        Ok(text)
    }
}

/// Up to 64 stop strings, ready to be searched for. Immutable; shared by the sequences of a request.
#[pyclass(module = "fastserve._core.text", frozen)]
struct StopStrings {
    stops: Arc<CoreStopStrings>,
}

#[pymethods]
impl StopStrings {
    /// Raises `ValueError` for an empty string and for more than `MAX_NUM_STOP_STRINGS`.
    #[new]
    #[pyo3(signature = (strings = Vec::new()))]
    fn new(strings: Vec<String>) -> PyResult<Self> {
        let stops = CoreStopStrings::new(&strings)
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(Self { stops: Arc::new(stops) })
    }
}

/// Turns one sequence's tokens into text deltas that never split a character. One thread at a time.
#[pyclass(module = "fastserve._core.text")]
struct Detokenizer {
    detokenizer: CoreDetokenizer,
}

#[pymethods]
impl Detokenizer {
    #[new]
    #[pyo3(signature = (
        table,
        stops = None,
        *,
        skip_special_tokens = true,
        include_stop_str_in_output = false,
        min_tokens = 0,
        strip_leading_space = false,
    ))]
    fn new(
        table: &TokenTable,
        stops: Option<&StopStrings>,
        skip_special_tokens: bool,
        include_stop_str_in_output: bool,
        min_tokens: usize,
        strip_leading_space: bool,
    ) -> Self {
        let options = DetokenizerOptions {
            skip_special_tokens,
            include_stop_str_in_output,
            min_tokens,
            strip_leading_space,
        };
        let stops = stops.map_or_else(Arc::default, |stops| Arc::clone(&stops.stops));
        Self { detokenizer: CoreDetokenizer::new(Arc::clone(&table.table), stops, options) }
    }

    /// Take `tokens` and return `(delta, stop index or None, num_tokens_kept)`.
    ///
    /// After a match the delta is empty and the rest repeats itself.
    fn push(&mut self, tokens: &Bound<'_, PyAny>) -> PyResult<(String, Option<usize>, usize)> {
        let mut delta = String::new();
        let stop = self.detokenizer.push(&token_ids(tokens)?, &mut delta);
        Ok((delta, stop.map(|stop| stop.index), self.detokenizer.num_tokens_kept()))
    }

    /// Release what was held back: the sequence is over.
    fn finish(&mut self) -> String {
        let mut delta = String::new();
        self.detokenizer.finish(&mut delta);
        delta
    }
}

/// Token ids from an int32 array, which is what a step's outputs are, or from any sequence of ints.
fn token_ids(tokens: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    if let Ok(array) = tokens.extract::<PyReadonlyArray1<'_, i32>>() {
        let negative = |_| PyOverflowError::new_err("token ids are never negative");
        let ids = array.as_array();
        return ids.iter().map(|&id| u32::try_from(id).map_err(negative)).collect();
    }
    tokens.extract()
}

/// Add the submodule `text` to the extension module.
pub(crate) fn register(parent: &Bound<'_, PyModule>) -> PyResult<()> {
    let text = PyModule::new(parent.py(), "text")?;
    text.add_class::<TokenTable>()?;
    text.add_class::<StopStrings>()?;
    text.add_class::<Detokenizer>()?;
    text.add("MAX_NUM_STOP_STRINGS", fastserve_text::MAX_NUM_STOP_STRINGS)?;
    parent.add_submodule(&text)?;
    // `import fastserve._core.text` works only for modules that are listed.
    parent.py().import("sys")?.getattr("modules")?.set_item("fastserve._core.text", &text)
}
