//! See ARCHITECTURE.md.
pub mod plan;
pub use plan::{Header, PlanLayout, PlanView, Section, SlotEvent};
