//! A simulator that knows what the core must do, and watches it do it.
//!
//! A seed makes a configuration, a workload and a run of bad luck; a fake model answers for the
//! device; a shadow of every KV slot is kept from the plans alone; checkers compare. Nothing is read
//! from the core's state but what any embedder can read. The same seed gives the same run, on any
//! machine.
//!
//! ```text
//!   generate ──▶ Scenario ──▶ chaos ──▶ Sim ──▶ Core
//!                                        │ plans, outputs, stats
//!             model ─▶ Ledger, Device ◀──┤
//!                                        ▼
//!                                     checkers ──▶ Violation, Trace
//! ```
//!
//! Architecture invariant: no clock, no environment, no I/O but in the binary; chance comes from
//! [`rng`] alone.

#![forbid(unsafe_code)]
#![allow(clippy::missing_errors_doc, reason = "a check has one way to fail: a Violation")]

pub mod blocks;
pub mod chaos;
pub mod check;
pub mod device;
pub mod generate;
pub mod ledger;
pub mod model;
pub mod patience;
pub mod policy;
pub mod report;
pub mod rng;
pub mod sim;
pub mod trace;
pub mod transfers;
pub mod violation;

pub use chaos::{Rates, Scenario};
pub use generate::scenario;
pub use policy::PolicyChoice;
pub use report::{Failure, Run, Summary, run};
pub use sim::Sim;
pub use trace::{Event, Trace};
pub use violation::{Check, Violation};
