//! Causal attention of any mix of rows (chunks and single tokens) over paged KV.
//!
//! # What is computed, and in which order
//!
//! The keys of a sequence are cut into *ranges* at absolute multiples of [`RANGE`]. A *partial* is
//! plain softmax attention of one query head over one range: scores (one chain over the dimensions
//! each), their maximum, weights 2^(score − maximum), the sum of weights, and the weighted sum of
//! values (one chain over the keys each). Partials are combined in ascending order. All of that is
//! fixed by the query token's position and the window alone. Which rows share a tile, whether the
//! token came alone or in a chunk, and which thread computes a partial change when and where an
//! operation runs, never which operations a result is made of; so the bits stay the same
//! (`tests/invariance.rs`). Scores, weights and sums are `f32`, whatever is stored.
//!
//! Where queries and cache are both bfloat16, so are the weights, before they are added up or multiplied
//! with anything. Then every product in the chains is one of two bfloat16, exact in `f32`, and
//! instructions for pairs of them compute the same chains (`dots`), but that they take numbers nearer
//! to zero than 2^-126 for zero.
//!
//! Where the cache has scales (`int8`), a score is the chain over the stored integers, then times the
//! key's scale, then times [`Attention::scale`]; a value's weight is multiplied by the value's scale
//! before its chain, and enters the sum of weights without it.
//!
//! # How it is made fast
//!
//! * A *tile* is up to [`tile::MAX_ROWS`] query rows (token × head) of one sequence that share a KV
//!   head. Keys and values of a range pass through the first-level cache once a tile.
//! * `micro` computes 6 rows × 64 keys, or × 64 dimensions, in registers.
//! * Rows that share leading blocks are stacked into one tile over the ranges that they share.
//! * Work is claimed by tiles; a tile too large for an even share is split between ranges, its
//!   partials parked in memory, and whoever finishes its last piece combines them (`work`).
//!
//! Keys that a row does not see are never used: their scores are replaced, not masked by
//! arithmetic, and their values not read into any sum, so NaN in unwritten slots goes nowhere.

mod cached;
mod check;
#[cfg(target_arch = "x86_64")]
mod dots;
mod micro;
mod partial;
mod scratch;
mod tile;
mod work;

use crate::element::Bf16;
use crate::error::ArgumentError;
use crate::layout::KvDType;
use crate::pool::Pool;
use crate::view::{KvView, Matrix, MatrixMut};

use cached::Cached;

/// Keys of a partial. Part of what results mean: another value gives other bits.
pub const RANGE: usize = 256;

/// Everything of [`paged_attention`] that is only read.
#[derive(Debug, Clone, Copy)]
pub struct Attention<'a> {
    /// Queries `[tokens, heads * head_dim]`.
    pub q: Matrix<'a>,
    /// The layer's keys and values.
    pub kv: KvView<'a>,
    /// `[slots, max_blocks]`: block ids of each row slot, in order.
    pub block_tables: &'a [i32],
    /// Columns of `block_tables`.
    pub max_blocks: usize,
    /// Which block table each row uses.
    pub row_slots: &'a [i32],
    /// Row i owns tokens `query_indptr[i]..query_indptr[i + 1]` of q.
    pub query_indptr: &'a [i32],
    /// Tokens of each row that have K and V: its last query token is at `seq_lens[i] - 1`. 0 is a
    /// padding row, whose output is zero.
    pub seq_lens: &'a [i32],
    /// Leading blocks of each row that are those of the row before, all of them before the queries of
    /// both; empty: none. It changes how often memory is read, and no bit of the result.
    pub num_shared_blocks: &'a [i32],
    /// Factor of the logits.
    pub scale: f32,
    /// Keys that a token sees, itself included; 0: all.
    pub window: usize,
    /// Logits become `softcap * tanh(logit / softcap)`; 0: they stay.
    pub softcap: f32,
}

/// `out = softmax(scale * q k^T) v` for every row, causal.
///
/// # Errors
///
/// Shapes that do not fit each other and indices out of range, named by argument; nothing is computed.
pub fn paged_attention(
    pool: &Pool,
    args: &Attention<'_>,
    out: &mut MatrixMut<'_>,
) -> Result<(), ArgumentError> {
    check::check(args, out.as_matrix())?;
    match args.kv.dtype() {
        KvDType::F32 => run::<f32>(pool, args, out),
        KvDType::Bf16 => run::<Bf16>(pool, args, out),
        KvDType::I8 => run::<i8>(pool, args, out),
    }
    Ok(())
}

/// `C` is the type of the cache.
fn run<C: Cached>(pool: &Pool, args: &Attention<'_>, out: &MatrixMut<'_>) {
    scratch::with_workspace(|workspace| {
        let work_ns = workspace.plan(args, pool);
        let partials = workspace.partials.as_mut_ptr();
        let isa = pool.isa();
        let kernel = |items| tile::Tiles::<C>::new(args, out, items, workspace, partials, isa);
        kernel(&workspace.items).zero_padding();
        pool.run(&kernel(&workspace.stacks), workspace.stacks.len(), work_ns.stacks);
        pool.run(&kernel(&workspace.items), workspace.items.len(), work_ns.items);
    });
}
