//! The engine's core: [`Core`] plans and commits steps, [`Inbox`] takes requests from any thread.
//!
//! ```
//! use fastserve_base::{CoreConfig, Request, RequestId};
//! use fastserve_engine::{Core, Results, StepOutputs};
//!
//! let mut core = Core::new(CoreConfig::default())?;
//! let mut arena = vec![0; core.layout().words];
//! core.inbox().submit(Request::new(RequestId(7), vec![1, 2, 3], 1))?;
//!
//! let sizes = core.plan(0, &mut arena)?;
//! assert_eq!((sizes.num_rows, sizes.num_tokens, sizes.num_outputs), (1, 3, 1));
//! // A runner computes the step here, and samples token 9.
//! core.commit(sizes.step, 1, Results { counts: &[1], tokens: &[9] })?;
//!
//! let mut outputs = StepOutputs::default();
//! core.take_outputs(&mut outputs);
//! assert_eq!((outputs.request_ids[0], outputs.tokens[0]), (7, 9));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod admit;
mod check;
mod commit;
mod core;
mod emit;
mod inbox;
mod intake;
mod lookahead;
mod outputs;
mod schedule;
mod tail;
mod timeline;
mod transfer;

pub use crate::core::Core;
pub use crate::inbox::Inbox;
pub use crate::outputs::{
    EventKind, Lifecycle, PlanSizes, Results, Stats, StepOutputs, StepRecord, TimelineEvent,
};
pub use crate::transfer::{Transfer, TransferError};
pub use fastserve_sched::{Candidate, Fcfs, PlanLayout, PlanView, Policy, Priority};
