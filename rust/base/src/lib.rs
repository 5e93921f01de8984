//! Ids, units, limits, errors and configuration: the words every other floor speaks.
//!
//! Architecture invariant: nothing here knows what a block pool, a scheduler or a step is for.
//! There is no clock, no I/O, no environment and no random state.

#![forbid(unsafe_code)]

pub mod config;
pub mod error;
pub mod fault;
pub mod ids;
pub mod request;

pub use config::{ConfigError, CoreConfig, LayerGroup, PolicyKind};
pub use error::{RequestError, StepError};
pub use ids::{BlockId, Namespace, Nanos, RequestId, RowSlot, SeqId, StepId, Ticket, Token};
pub use request::{FinishReason, OutputKind, Request, Span};
