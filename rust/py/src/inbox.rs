//! `fastserve.core.Inbox`: submit, abort and read, from any thread.
//!
//! No call waits for a step. A request is checked and refused at once, before anything is queued.

use fastserve_base::{CoreConfig, FinishReason, Request, RequestId, SeqId, StepId};
use fastserve_engine::Inbox as EngineInbox;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::guard::Health;
use crate::{convert, errors, outputs};

/// A handle for submitting, aborting and reading. Any thread may use it, and nothing waits for a step.
#[pyclass(module = "fastserve._core", frozen)]
pub(crate) struct Inbox {
    engine: EngineInbox,
    health: Health,
    vocab_size: u32,
}

impl Inbox {
    pub(crate) fn new(engine: EngineInbox, health: Health, config: &CoreConfig) -> Self {
        Self { engine, health, vocab_size: config.vocab_size }
    }

    fn with<T>(&self, py: Python<'_>, call: impl FnOnce(&EngineInbox) -> T) -> PyResult<T> {
        self.health.guarded(py, || call(&self.engine))
    }
}

#[pymethods]
impl Inbox {
    /// Queue a request for the next plan, or raise `RequestError` and queue nothing.
    ///
    /// `prompt` and `stop_token_ids` are int32, uint32 or int64 arrays or sequences of ints.
    /// `namespace` (128 bits) says who may share the request's blocks; `spans` are
    /// `(start, end, digest)` of stretches that are more than their tokens. `sampling` is an int32
    /// array that reaches the sampler as it is. `arrival` is on the clock that `plan` is given.
    #[pyo3(
        signature = (
            request_id,
            prompt,
            *,
            max_tokens,
            arrival,
            min_tokens = None,
            stop_token_ids = None,
            num_sequences = None,
            priority = None,
            score_prompt = false,
            namespace = None,
            adapter = None,
            spans = None,
            sampling = None,
        ),
        text_signature = "($self, request_id, prompt, *, max_tokens, arrival, min_tokens=0, \
            stop_token_ids=(), num_sequences=1, priority=0, score_prompt=False, namespace=0, \
            adapter=0, spans=(), sampling=None)"
    )]
    #[expect(clippy::too_many_arguments, reason = "they are Python keywords, named at every call")]
    fn submit(
        &self,
        py: Python<'_>,
        request_id: &Bound<'_, PyAny>,
        prompt: &Bound<'_, PyAny>,
        max_tokens: &Bound<'_, PyAny>,
        arrival: &Bound<'_, PyAny>,
        min_tokens: Option<&Bound<'_, PyAny>>,
        stop_token_ids: Option<&Bound<'_, PyAny>>,
        num_sequences: Option<&Bound<'_, PyAny>>,
        priority: Option<&Bound<'_, PyAny>>,
        score_prompt: bool,
        namespace: Option<&Bound<'_, PyAny>>,
        adapter: Option<&Bound<'_, PyAny>>,
        spans: Option<&Bound<'_, PyAny>>,
        sampling: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let id = RequestId(convert::number("request_id", request_id, "0 to 2^64 - 1")?);
        let prompt = convert::tokens("prompt", prompt, self.vocab_size)?;
        let max_tokens = convert::number("max_tokens", max_tokens, "at least 1")?;
        // Everything is converted before the core is entered, for conversion may run Python.
        let mut request = Request::new(id, prompt, max_tokens);
        request.arrival = convert::number("arrival", arrival, "0 to 2^64 - 1 nanoseconds")?;
        request.score_prompt = score_prompt;
        if let Some(value) = min_tokens {
            request.min_tokens = convert::number("min_tokens", value, "0 to max_tokens")?;
        }
        if let Some(value) = stop_token_ids {
            let stop_token_ids = convert::tokens("stop_token_ids", value, self.vocab_size)?;
            request.stop_token_ids = stop_token_ids;
        }
        if let Some(value) = num_sequences {
            request.num_sequences = convert::number("num_sequences", value, "at least 1")?;
        }
        if let Some(value) = priority {
            request.priority = convert::number("priority", value, "-2^31 to 2^31 - 1")?;
        }
        request.namespace = convert::namespace(namespace)?;
        if let Some(value) = adapter {
            request.adapter = convert::number("adapter", value, "0 to 2^32 - 1")?;
        }
        if let Some(value) = spans {
            request.spans = convert::spans(value)?;
        }
        if let Some(value) = sampling {
            request.sampling = convert::words("sampling", value)?.as_slice()?.to_vec();
        }
        self.with(py, |inbox| inbox.submit(request))?
            .map_err(|error| errors::request_error(py, &error))
    }

    /// End every sequence of a request with `abort` at the next plan, whatever its state.
    ///
    /// Idempotent. False: no such request is live.
    fn abort(&self, py: Python<'_>, request_id: u64) -> PyResult<bool> {
        self.with(py, |inbox| inbox.abort(RequestId(request_id)))
    }

    /// End one sequence at the next plan on behalf of the text side: a stop string was found.
    ///
    /// `reason` is `stop`, `length`, `abort` or `error`; `num_tokens_kept` says how many of its output
    /// tokens count. False: no such request is live.
    fn finish(
        &self,
        py: Python<'_>,
        request_id: u64,
        index: u32,
        reason: &str,
        num_tokens_kept: u32,
    ) -> PyResult<bool> {
        let reason =
            FINISH_REASONS.into_iter().find(|known| known.name() == reason).ok_or_else(|| {
                PyValueError::new_err(format!(
                    "reason='{reason}': want 'stop', 'length', 'abort' or 'error'"
                ))
            })?;
        let seq = SeqId { request: RequestId(request_id), index };
        self.with(py, |inbox| inbox.finish(seq, reason, num_tokens_kept))
    }

    /// Whether the request has not ended.
    fn is_live(&self, py: Python<'_>, request_id: u64) -> PyResult<bool> {
        self.with(py, |inbox| inbox.is_live(RequestId(request_id)))
    }

    /// Whether anything lies here for the next plan.
    fn has_commands(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, EngineInbox::has_commands)
    }

    /// Where the core stands: `running`, `paused`, `draining` or `closed`.
    #[getter]
    fn state(&self, py: Python<'_>) -> PyResult<&'static str> {
        self.with(py, |inbox| inbox.state().name())
    }

    /// The message of the bug that stopped the core, if one did. Never raises.
    #[getter]
    fn bug(&self) -> Option<&str> {
        self.health.bug()
    }

    /// Nanoseconds that a request submitted now would wait for those ahead, at the present rate.
    fn predicted_wait(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, EngineInbox::predicted_wait)
    }

    /// Counters and gauges as of the last plan or commit, the queue as of now.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.with(py, EngineInbox::stats)?;
        outputs::stats_dict(py, &stats)
    }

    /// State changes of a request, oldest first, as far as they are kept.
    fn timeline<'py>(&self, py: Python<'py>, request_id: u64) -> PyResult<Bound<'py, PyList>> {
        let events = self.with(py, |inbox| inbox.timeline(RequestId(request_id)))?;
        outputs::list(py, &events, outputs::event_dict)
    }

    /// Steps `step` and later, oldest first, as far as they are kept: to join with a timeline.
    fn steps_since<'py>(&self, py: Python<'py>, step: u64) -> PyResult<Bound<'py, PyList>> {
        let records = self.with(py, |inbox| inbox.steps_since(StepId(step)))?;
        outputs::list(py, &records, outputs::step_dict)
    }
}

/// Every finish reason; its code is what `StepOutputs.finish_reasons` carries.
pub(crate) const FINISH_REASONS: [FinishReason; 4] =
    [FinishReason::Stop, FinishReason::Length, FinishReason::Abort, FinishReason::Error];
