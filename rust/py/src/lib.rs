//! `fastserve._core`: the scheduler, the CPU kernels and the text side, as one Python extension.
//!
//! Buffers and errors, nothing else. A class here unwraps arguments, calls the crate that does the
//! work, maps the error and converts the result; logic belongs a floor down.
//!
//! | module | Python | over |
//! |---|---|---|
//! | [`core`], [`inbox`], [`outputs`], [`policy`] | `_core` (public as `fastserve.core`) | `fastserve-engine` |
//! | [`cpu`] | `_core.cpu` | `fastserve-cpu` |
//! | [`text`] | `_core.text` | `fastserve-text` |
//! | [`steps`] | `_core` | the engine and the CPU's decoder together: a thread that steps |
//!
//! The extension needs the GIL: plans and commits rely on it for order, and free-threaded Python is
//! not claimed. [`steps`] alone has a thread of its own, which never takes it.

mod arrays;
mod config;
mod convert;
mod core;
mod cpu;
mod errors;
mod guard;
mod inbox;
mod outputs;
mod policy;
mod steps;
mod text;

use fastserve_base::CoreConfig;
use fastserve_sched::plan::{
    COPY_WORDS, HEADER_WORDS, Header, PLAN_VERSION, SLOT_EVENT_WORDS, TABLE_EDIT_WORDS,
    TIER_COPY_WORDS,
};
use pyo3::prelude::*;
use pyo3::types::PyDict;

#[global_allocator]
static ALLOCATOR: fastserve_alloc::HugePages = fastserve_alloc::HugePages;

/// Block pool, prefix tree and scheduler of a language-model serving engine.
#[pymodule(gil_used = true)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    guard::install_hook();
    errors::register(module)?;
    module.add_class::<core::Core>()?;
    module.add_class::<inbox::Inbox>()?;
    module.add_class::<outputs::PlanSizes>()?;
    module.add_class::<outputs::StepOutputs>()?;
    module.add_class::<outputs::Transfer>()?;
    module.add_class::<policy::Candidate>()?;
    module.add_class::<steps::StepLoop>()?;
    module.add_class::<steps::StepNews>()?;
    constants(module)?;
    cpu::register(module)?;
    text::register(module)
}

/// What both sides of the arena must agree on, and what messages need.
fn constants(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("PLAN_VERSION", PLAN_VERSION)?;
    module.add("HEADER_WORDS", HEADER_WORDS)?;
    module.add("SLOT_EVENT_WORDS", SLOT_EVENT_WORDS)?;
    module.add("TABLE_EDIT_WORDS", TABLE_EDIT_WORDS)?;
    module.add("TIER_COPY_WORDS", TIER_COPY_WORDS)?;
    module.add("COPY_WORDS", COPY_WORDS)?;

    let header = PyDict::new(py);
    for (name, field) in [
        ("VERSION", Header::Version),
        ("STEP_LOW", Header::StepLow),
        ("STEP_HIGH", Header::StepHigh),
        ("NUM_ROWS", Header::NumRows),
        ("NUM_TOKENS", Header::NumTokens),
        ("NUM_OUTPUTS", Header::NumOutputs),
        ("NUM_TABLE_EDITS", Header::NumTableEdits),
        ("NUM_SLOT_EVENTS", Header::NumSlotEvents),
        ("NUM_EVENT_WORDS", Header::NumEventWords),
        ("NUM_COPIES_OUT", Header::NumCopiesOut),
        ("NUM_COPIES_IN", Header::NumCopiesIn),
        ("NUM_COPIES", Header::NumCopies),
    ] {
        header.set_item(name, field as usize)?;
    }
    module.add("HEADER", header)?;

    let reasons = PyDict::new(py);
    for reason in inbox::FINISH_REASONS {
        reasons.set_item(reason as u8, reason.name())?;
    }
    module.add("FINISH_REASONS", reasons)?;
    module.add("CORE_DEFAULTS", config::to_dict(py, &CoreConfig::default(), None)?)?;
    module.add("DISTRIBUTION", env!("FASTSERVE_DISTRIBUTION"))?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}
