//! The manager against a model, at random and exhaustively; its rules; its checker.

mod exhaustive;
mod faults;
mod model;
mod pair;
mod rules;
mod walk;

use super::*;

const NUM_SLOTS: usize = 4;

/// A pool of `num_blocks` blocks of `block_size` tokens, for a few sequences, with events.
fn small(num_blocks: u32, block_size: u32) -> CoreConfig {
    CoreConfig {
        block_size,
        num_blocks,
        max_model_len: num_blocks * block_size,
        max_num_seqs: NUM_SLOTS as u32,
        enable_block_events: true,
        ..CoreConfig::default()
    }
}
