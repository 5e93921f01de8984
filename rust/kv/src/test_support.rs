//! What the tests of several modules need.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// The message with which `f` panics, `None` if it does not.
pub(crate) fn panics<T>(f: impl FnOnce() -> T) -> Option<String> {
    let panic = catch_unwind(AssertUnwindSafe(f)).err()?;
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
}

/// Run `f`, which must panic with a message that contains `message`.
#[track_caller]
pub(crate) fn assert_panics<T>(message: &str, f: impl FnOnce() -> T) {
    let text = panics(f);
    let text = text.unwrap_or_else(|| panic!("no panic with \"{message}\""));
    assert!(text.contains(message), "panic \"{text}\" without \"{message}\"");
}
