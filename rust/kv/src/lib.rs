//! Where keys and values live: which block is whose, and which prefixes can be shared.
//!
//! ```text
//!                KvManager            one block table per row slot; the only public door
//!               /    |     \
//!      BlockPool  PrefixTree  Lru     states and free list; whole-block prefixes; who is evicted next
//! ```
//!
//! A block is `block_size` consecutive token slots across every layer. This crate hands out block
//! *ids* and remembers which tokens they hold; it never touches the memory behind them.
//!
//! Architecture invariant: nothing here knows requests, queues, budgets or plans. Time does not
//! exist; order comes from a logical counter. Nothing allocates after construction, with two
//! exceptions that are off by default: block events, and prompts with spans.

#![forbid(unsafe_code)]

mod events;
mod hash;
mod lru;
mod manager;
mod pool;
mod spans;
mod table;
#[cfg(test)]
mod test_support;
mod tree;

pub use events::{BlockEvent, BlockInfo, CacheTier, ChainHash};
pub use manager::{BlockCounts, KvManager, OutOfBlocks, Probe, SeqKey};
