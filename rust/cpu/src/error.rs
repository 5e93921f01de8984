//! What a caller can get wrong. A kernel checks before it computes, and computes nothing on error.

/// An argument that does not fit: its name, what it was, and what would be right.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{argument}: got {got}, want {want}")]
pub struct ArgumentError {
    /// The argument's name, as in the Python signature.
    pub argument: &'static str,
    /// What was given.
    pub got: String,
    /// What would have been accepted.
    pub want: String,
    /// Whether the argument is right and the system has no memory for it.
    pub is_out_of_memory: bool,
}

impl ArgumentError {
    /// An error for `argument`, which was `got` and should be `want`.
    pub fn new(argument: &'static str, got: impl Into<String>, want: impl Into<String>) -> Self {
        Self { argument, got: got.into(), want: want.into(), is_out_of_memory: false }
    }

    /// An error for `argument`, which the system has no memory for.
    pub fn out_of_memory(argument: &'static str, got: impl Into<String>) -> Self {
        let want = "as many as there is memory for";
        Self { is_out_of_memory: true, ..Self::new(argument, got, want) }
    }
}

/// `Ok` when `holds`, otherwise an error built from the two closures.
pub(crate) fn require(
    holds: bool,
    argument: &'static str,
    got: impl FnOnce() -> String,
    want: impl FnOnce() -> String,
) -> Result<(), ArgumentError> {
    if holds { Ok(()) } else { Err(ArgumentError::new(argument, got(), want())) }
}
