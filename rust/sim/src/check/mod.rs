//! The checkers: what a plan, a commit and the end of a run must satisfy.
//!
//! | module | checks |
//! |---|---|
//! | [`step`] | slot events, table edits and copies; then the step itself, run on the shadow |
//! | [`rows`] | each row: where it starts, its tokens, its places, what it attends to |
//! | [`outputs`] | output rows: what is sampled and scored, and which forks begin |
//! | [`limits`] | budgets of tokens, rows, outputs, chunks, prompts and long prompts |
//! | [`order`] | decode first, victims last, admission in order, nothing idle without need |
//! | [`results`] | what a commit hands back: tokens, finish reasons, counts |
//! | [`explain`] | timelines, step records and what the inbox shows |
//! | [`counters`] | every counter of `stats()`, counted again from plans and outputs |

pub mod counters;
pub mod explain;
pub mod limits;
pub mod order;
pub mod outputs;
pub mod results;
pub mod rows;
pub mod step;

pub use counters::Counters;
pub use step::{Flight, FlightOutput, PlanCheck};
