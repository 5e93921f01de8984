//! See ARCHITECTURE.md.
mod outputs;
pub use outputs::*;
