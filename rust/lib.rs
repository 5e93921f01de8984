//! The public core of fastserve: what Rust embedders and `benches/*.rs` import.
//!
//! Everything here is a re-export. The crates behind it are the floors of the house; see
//! `ARCHITECTURE.md`.

#![forbid(unsafe_code)]

pub use fastserve_alloc as alloc;
pub use fastserve_base as base;
pub use fastserve_engine as engine;
pub use fastserve_kv as kv;
pub use fastserve_sched as sched;
