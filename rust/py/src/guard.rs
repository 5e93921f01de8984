//! What happens when the core panics: one exception, once, and a core that says so ever after.
//!
//! A panic is a bug of ours and leaves the core's state unknown. [`Health::guarded`] wraps every call
//! into the core: the panic becomes one `CoreBug` that carries the message and the place, and each
//! later call on the same `Core`, and on its `Inbox`es, raises `CoreBug` with that first message. So
//! whoever waits for an answer can be told, and the process lives on.
//!
//! Rust would also print the panic to stderr, a second report of the same thing. The hook installed
//! here keeps the text for the exception instead, on threads that are inside a guarded call; every
//! other panic goes to the hook that was there before. A hook belongs to the copy of Rust's standard
//! library inside this extension: other extensions and an embedding program keep theirs.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::cell::RefCell;
use std::fmt::Write as _;
use std::panic::{self, AssertUnwindSafe, PanicHookInfo};
use std::sync::{Arc, Once, OnceLock};

use pyo3::prelude::*;

use crate::errors;

/// The first bug of one core, if it had one. Shared by the `Core` and its `Inbox`es.
#[derive(Debug, Clone, Default)]
pub(crate) struct Health {
    bug: Arc<OnceLock<Bug>>,
}

#[derive(Debug, Default)]
struct Bug {
    /// `message (file:line:column)`.
    text: String,
    /// Where `RUST_BACKTRACE` asks for one.
    backtrace: Option<String>,
}

thread_local! {
    /// Where the hook leaves a panic of this thread; `None` outside guarded calls.
    static WATCHED: RefCell<Option<Health>> = const { RefCell::new(None) };
}

/// Puts back what was watched before, however the call ends.
struct Watch(Option<Health>);

impl Watch {
    fn set(health: Option<Health>) -> Self {
        Self(WATCHED.replace(health))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        WATCHED.set(self.0.take());
    }
}

impl Health {
    /// The message of the first bug.
    pub(crate) fn bug(&self) -> Option<&str> {
        self.bug.get().map(|bug| bug.text.as_str())
    }

    /// Call into the core, or raise `CoreBug`: for the panic that happens now, or the earlier one.
    pub(crate) fn guarded<T>(&self, py: Python<'_>, call: impl FnOnce() -> T) -> PyResult<T> {
        if let Some(bug) = self.bug() {
            return Err(errors::core_bug(py, &format!("this Core stopped at a bug: {bug}"), None));
        }
        self.caught(call).ok_or_else(|| self.first_report(py))
    }

    /// Call into the core in a thread without the GIL. `None`: it panicked, and what `first_report` says
    /// is known.
    pub(crate) fn caught<T>(&self, call: impl FnOnce() -> T) -> Option<T> {
        let watch = Watch::set(Some(self.clone()));
        let caught = panic::catch_unwind(AssertUnwindSafe(call));
        drop(watch);
        caught.ok()
    }

    /// The exception for a panic that has just been caught.
    pub(crate) fn first_report(&self, py: Python<'_>) -> PyErr {
        // The hook ran before the stack was unwound, so the bug is there.
        let bug = self.bug.get_or_init(Bug::default);
        let text = &bug.text;
        errors::core_bug(
            py,
            &format!("bug in the core, which cannot be used any more; please report it: {text}"),
            bug.backtrace.as_deref(),
        )
    }
}

/// Run code that is not the core's, called from inside it: its panics are not the core's bugs.
pub(crate) fn unguarded<T>(call: impl FnOnce() -> T) -> T {
    let _watch = Watch::set(None);
    call()
}

/// Install the hook, once in the life of the process.
pub(crate) fn install_hook() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let watched = WATCHED.try_with(|watched| watched.borrow().clone()).ok().flatten();
            match watched {
                Some(health) => drop(health.bug.set(describe(info))),
                None => before(info),
            }
        }));
    });
}

fn describe(info: &PanicHookInfo<'_>) -> Bug {
    let payload = info.payload();
    let message = match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
        (Some(text), _) => text,
        (None, Some(text)) => text.as_str(),
        (None, None) => "a panic without a message",
    };
    let mut text = message.to_owned();
    if let Some(location) = info.location() {
        let _ = write!(text, " ({location})");
    }
    let backtrace = Backtrace::capture();
    let captured = backtrace.status() == BacktraceStatus::Captured;
    Bug { text, backtrace: captured.then(|| backtrace.to_string()) }
}
