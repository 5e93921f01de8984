//! `Core`'s keywords as a [`CoreConfig`], and back.
//!
//! One keyword a field, by the field's own name, except where Python has the better type: the wait is
//! in seconds, and the policy may be a callable. A value that does not fit is a problem like any
//! other: all are named at once, together with what the core itself finds wrong.

use std::time::Duration;

use fastserve_base::{ConfigError, CoreConfig, LayerGroup, PolicyKind};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::errors;

/// Calls `$then` with every field that crosses as it is.
macro_rules! with_plain_fields {
    ($then:ident) => {
        $then! {
            block_size: u32,
            num_blocks: u32,
            max_model_len: u32,
            max_num_seqs: u32,
            max_num_batched_tokens: u32,
            max_chunk_tokens: Option<u32>,
            long_prefill_threshold: Option<u32>,
            max_long_prefill_percent: u32,
            max_num_mixed_prefill_tokens: Option<u32>,
            context_per_token: Option<u32>,
            max_num_output_rows: u32,
            max_num_steps_in_flight: u32,
            max_num_draft_tokens: u32,
            enable_prefix_caching: bool,
            watermark_blocks: u32,
            vocab_size: u32,
            max_num_queued_requests: u32,
            max_num_queued_tokens: u64,
            max_num_sequences_per_request: u32,
            max_sampling_words: u32,
            max_num_step_failures: u32,
            max_num_tickets: u32,
            hash_seed: u64,
            num_step_records: u32,
            num_timeline_events: u32,
            enable_block_events: bool,
        }
    };
}

/// What a field of a type takes, for messages.
trait Want {
    const WANT: &'static str;
}

impl Want for u32 {
    const WANT: &'static str = "an int from 0 to 2^32 - 1";
}

impl Want for u64 {
    const WANT: &'static str = "an int from 0 to 2^64 - 1";
}

impl Want for Option<u32> {
    const WANT: &'static str = "an int from 0 to 2^32 - 1, or None";
}

impl Want for bool {
    const WANT: &'static str = "True or False";
}

const WANT_WAIT: &str = "seconds from 0 to 1e9, or None";
const WANT_POLICY: &str = "'fcfs', 'priority' or a callable that ranks a Candidate";
const WANT_GROUPS: &str = "[{'layers': int, 'window': int or None}], or None";

/// What the keywords of `Core` say.
pub(crate) struct Settings {
    /// As given; the core checks it and lowers limits.
    pub(crate) config: CoreConfig,
    /// The policy, where it is a callable and not a name.
    pub(crate) policy: Option<Py<PyAny>>,
}

/// Read keywords.
///
/// # Errors
///
/// `TypeError` for a keyword that does not exist, and for none at all; `ConfigError` for all values
/// that do not fit.
pub(crate) fn from_keywords(keywords: &Bound<'_, PyDict>) -> PyResult<Settings> {
    let py = keywords.py();
    if !keywords.contains("num_blocks")? {
        return Err(PyTypeError::new_err("Core() needs num_blocks, the size of the block pool"));
    }
    let mut config = CoreConfig::default();
    let mut policy = None;
    let mut problems = Vec::new();
    for (key, value) in keywords {
        let key: String = key.extract()?;
        let taken = match key.as_str() {
            "max_wait_s" => set_max_wait(&value, &mut config),
            "groups" => set_groups(&value, &mut config),
            "scheduling_policy" => set_policy(&value, &mut config, &mut policy),
            name => match set_plain_field(name, &value, &mut config) {
                Some(taken) => taken,
                None => return Err(unknown_keyword(py, name)),
            },
        };
        if let Err(want) = taken {
            let shown = value.repr().map_or_else(|_| "?".to_owned(), |text| text.to_string());
            problems.push(format!("{key}={shown}: want {want}"));
        }
    }
    if problems.is_empty() {
        return Ok(Settings { config, policy });
    }
    if let Err(error) = config.validated() {
        problems.extend(error.problems);
    }
    Err(errors::config_error(py, ConfigError { problems }))
}

/// A field was set, or what it takes instead.
type Taken = Result<(), &'static str>;

/// Set the field called `name`. `None`: there is none.
fn set_plain_field(name: &str, value: &Bound<'_, PyAny>, config: &mut CoreConfig) -> Option<Taken> {
    macro_rules! set {
        ($($field:ident: $type:ty,)*) => {
            match name {
                $(stringify!($field) => match value.extract::<$type>() {
                    Ok(value) => {
                        config.$field = value;
                        Some(Ok(()))
                    }
                    Err(_) => Some(Err(<$type>::WANT)),
                },)*
                _ => None,
            }
        };
    }
    with_plain_fields!(set)
}

/// Seconds, or `None` for no limit.
fn set_max_wait(value: &Bound<'_, PyAny>, config: &mut CoreConfig) -> Taken {
    let seconds = value.extract::<Option<f64>>().map_err(|_| WANT_WAIT)?;
    if seconds.is_some_and(|seconds| !(0.0..=1e9).contains(&seconds)) {
        return Err(WANT_WAIT);
    }
    config.max_wait = seconds.map(|seconds| Duration::from_secs_f64(seconds).as_nanos() as u64);
    Ok(())
}

/// A name or a callable.
fn set_policy(
    value: &Bound<'_, PyAny>,
    config: &mut CoreConfig,
    policy: &mut Option<Py<PyAny>>,
) -> Taken {
    match value.extract::<&str>() {
        Ok("fcfs") => config.scheduling_policy = PolicyKind::Fcfs,
        Ok("priority") => config.scheduling_policy = PolicyKind::Priority,
        Err(_) if value.is_callable() => *policy = Some(value.clone().unbind()),
        _ => return Err(WANT_POLICY),
    }
    Ok(())
}

/// Layer groups as a list of dicts, or `None` for one group without a window.
fn set_groups(value: &Bound<'_, PyAny>, config: &mut CoreConfig) -> Taken {
    if value.is_none() {
        return Ok(());
    }
    let items = value.extract::<Vec<Bound<'_, PyDict>>>().map_err(|_| WANT_GROUPS)?;
    let groups = items.iter().map(group).collect::<Option<_>>();
    config.groups = groups.ok_or(WANT_GROUPS)?;
    Ok(())
}

fn group(item: &Bound<'_, PyDict>) -> Option<LayerGroup> {
    let layers = item.get_item("layers").ok()??.extract().ok()?;
    let window = match item.get_item("window").ok()? {
        Some(window) => window.extract().ok()?,
        None => None,
    };
    let num_known = 1 + usize::from(item.contains("window").ok()?);
    (item.len() == num_known).then_some(LayerGroup { layers, window })
}

fn unknown_keyword(py: Python<'_>, name: &str) -> PyErr {
    let known = to_dict(py, &CoreConfig::default(), None).map(|fields| fields.keys().to_string());
    let known = known.unwrap_or_default();
    PyTypeError::new_err(format!("Core() has no keyword '{name}'; it takes {known}"))
}

/// Every field by its keyword, as Python has it.
pub(crate) fn to_dict<'py>(
    py: Python<'py>,
    config: &CoreConfig,
    policy: Option<&Py<PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    macro_rules! get {
        ($($field:ident: $type:ty,)*) => {{
            // No `..`: a new field must be given a keyword.
            let CoreConfig { $($field,)* scheduling_policy, max_wait, groups } = config;
            let fields = PyDict::new(py);
            $(fields.set_item(stringify!($field), $field)?;)*
            (fields, scheduling_policy, max_wait, groups)
        }};
    }
    let (fields, kind, max_wait, groups) = with_plain_fields!(get);
    match (policy, kind) {
        (Some(policy), _) => fields.set_item("scheduling_policy", policy)?,
        (None, PolicyKind::Fcfs) => fields.set_item("scheduling_policy", "fcfs")?,
        (None, PolicyKind::Priority) => fields.set_item("scheduling_policy", "priority")?,
    }
    let wait = max_wait.map(|wait| Duration::from_nanos(wait).as_secs_f64());
    fields.set_item("max_wait_s", wait)?;
    let list = PyList::empty(py);
    for group in groups {
        let item = PyDict::new(py);
        item.set_item("layers", group.layers)?;
        item.set_item("window", group.window)?;
        list.append(item)?;
    }
    fields.set_item("groups", list)?;
    Ok(fields)
}
