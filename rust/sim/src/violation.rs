//! What a checker says when the core breaks a contract.

use std::fmt;

/// A broken contract.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Which checker noticed.
    pub checker: &'static str,
    /// What it saw.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}] {}", self.checker, self.what)
    }
}

/// What every checker answers.
pub type Check<T = ()> = Result<T, Violation>;

/// Return a [`Violation`] unless the condition holds.
macro_rules! ensure {
    ($holds:expr, $checker:expr, $($what:tt)+) => {
        if !$holds {
            return Err($crate::violation::Violation { checker: $checker, what: format!($($what)+) });
        }
    };
}
pub(crate) use ensure;
