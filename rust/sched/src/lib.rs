//! The mechanisms of scheduling: sequences and their queue, policies, budgets, the order of rows,
//! and the plan they become. What the engine's `Core` composes into a step.
//!
//! Architecture invariant: nothing here knows of the block pool or the prefix tree; blocks are numbers
//! that the engine passes through.

#![forbid(unsafe_code)]

pub mod budget;
pub mod heap;
pub mod plan;
pub mod policy;
pub mod queue;
pub mod rows;
pub mod sequence;
pub mod writer;

pub use budget::StepBudget;
pub use plan::{Header, PlanLayout, PlanView, Section, SlotEvent};
pub use policy::{Candidate, Fcfs, OrderKey, Policy, Priority};
pub use queue::WaitQueue;
pub use rows::{PlanOrder, Row, ServiceOrder};
pub use sequence::{RequestState, Sequence, Slab, Status};
pub use writer::{Assignment, PlanWriter};
