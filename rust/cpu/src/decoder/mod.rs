//! A whole decoder: one call a step, whatever the number of layers.
//!
//! ```text
//! hidden = embedding[tokens]
//! for each layer:
//!     q, k, v = split(norm(hidden) @ qkv)
//!     rotate q and k; store k and v in the cache        for all rows, before any row attends
//!     hidden += attention(q, cache) @ output
//!     gate, up = split(norm(hidden) @ gate_up)
//!     hidden += (silu(gate) * up) @ down
//! logits = norm(hidden[output rows]) @ lm_head
//! ```
//!
//! What a layer adds is kept apart from `hidden` until the next norm, which adds it in the same pass
//! over memory, and prepares the rows for the product behind it. Gate and up are never in memory as a
//! whole. Nothing here knows about sequences: rows, positions and block tables come with the
//! step.

mod buffers;
mod cache;
mod weights;

pub use buffers::Numbers;
pub use cache::KvCache;
pub use weights::{Layer, Model};

use std::sync::{Mutex, PoisonError};

use buffers::{Buffers, Stream};

use crate::attention::{Attention, paged_attention};
use crate::element::DType;
use crate::error::{ArgumentError, require};
use crate::pool::Pool;
use crate::product::{gather, linear, linear_silu_mul};
use crate::rope::{Rope, rope_and_write_kv};
use crate::view::{Matrix, MatrixMut};

/// What a step computes: a plan's arrays, by their names there.
#[derive(Debug, Clone, Copy)]
pub struct Step<'a> {
    /// `[T]` a token, or −1 − slot: that slot's last sample.
    pub token_ids: &'a [i32],
    /// `[slots]` the token that each slot sampled last.
    pub last_samples: &'a [i32],
    /// `[T]` position in the sequence: a row of `cos_sin`.
    pub positions: &'a [i32],
    /// `[T]` `block * block_size + offset`; −1: write nothing.
    pub slot_mapping: &'a [i32],
    /// `[S]` row slot of each row.
    pub row_slots: &'a [i32],
    /// `[S + 1]` where each row's tokens start.
    pub query_indptr: &'a [i32],
    /// `[S]` tokens with K and V after this step; 0 marks a padding row.
    pub seq_lens: &'a [i32],
    /// `[S]` leading blocks equal to the previous row's, all before the queries of both.
    pub num_shared_blocks: &'a [i32],
    /// `[slots, max_blocks]` block ids of each row slot in order.
    pub block_tables: &'a [i32],
    /// Columns of `block_tables`.
    pub max_blocks: usize,
    /// `[R]` index into the step's tokens whose logits are wanted; may repeat.
    pub out_rows: &'a [i32],
    /// `[n, 2]` blocks to copy before anything else: source, destination.
    pub copies: &'a [i32],
    /// `[positions, rotary_dim]` of `f32`: cosines, then sines.
    pub cos_sin: Matrix<'a>,
}

/// A model, and memory for its activations.
///
/// Threads that compute with it take turns. In a process forked from the one that made it, where another
/// thread may have been in the middle of a step, every call has memory of its own.
#[derive(Debug)]
pub struct Decoder {
    model: Model,
    buffers: Mutex<Buffers>,
    process: u32,
}

impl Decoder {
    /// Put a model together.
    ///
    /// # Errors
    ///
    /// A part of the model whose shape does not fit the others, by name.
    pub fn new(model: Model) -> Result<Self, ArgumentError> {
        model.check()?;
        let buffers = Mutex::new(Buffers::of(&model));
        Ok(Self { model, buffers, process: std::process::id() })
    }

    /// What it computes with.
    pub const fn model(&self) -> &Model {
        &self.model
    }

    /// Compute the step's tokens, store their keys and values, and write the output rows' logits,
    /// `[R, vocab_size]` of `f32`.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit each other and indices out of range, named by argument. Blocks that the
    /// step copies or writes may have been written then; logits are not.
    pub fn forward(
        &self,
        pool: &Pool,
        step: &Step<'_>,
        kv: &mut KvCache<'_>,
        logits: &mut MatrixMut<'_>,
    ) -> Result<(), ArgumentError> {
        self.check(step, kv, logits.as_matrix())?;
        kv.copy_blocks(step.copies)?;
        if step.token_ids.is_empty() {
            return Ok(());
        }
        if std::process::id() != self.process {
            return self.compute(&mut Buffers::of(&self.model), pool, step, kv, logits);
        }
        // What a panic left in them is written before it is read.
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        self.compute(&mut buffers, pool, step, kv, logits)
    }

    fn compute(
        &self,
        buffers: &mut Buffers,
        pool: &Pool,
        step: &Step<'_>,
        kv: &mut KvCache<'_>,
        logits: &mut MatrixMut<'_>,
    ) -> Result<(), ArgumentError> {
        let model = &self.model;
        let _session = pool.session();
        buffers.resize(step.token_ids.len());
        fill_in(&mut buffers.token_ids, step)?;
        let hidden = &mut buffers.stream.hidden.view_mut();
        gather(pool, &model.embedding, &buffers.token_ids, hidden)?;
        for (index, layer) in model.layers.iter().enumerate() {
            attend(pool, model, index, buffers, step, kv)?;
            let Buffers { stream, activated, .. } = buffers;
            let norm = stream.norm(&layer.mlp_norm, model.norm_eps);
            let bias = layer.gate_up_bias.as_ref().map(Numbers::as_row);
            let out = &mut activated.view_mut();
            linear_silu_mul(pool, norm, &layer.gate_up, bias.as_ref(), out)?;
            let Buffers { stream: Stream { added, .. }, activated, .. } = buffers;
            let bias = layer.down_bias.as_ref().map(Numbers::as_row);
            linear(pool, &activated.view(), &layer.down, bias.as_ref(), &mut added.view_mut())?;
        }
        if step.out_rows.is_empty() {
            return Ok(());
        }
        let Buffers { stream, last, .. } = buffers;
        last.take_rows(stream, step.out_rows);
        linear(pool, last.norm(&model.norm, model.norm_eps), &model.lm_head, None, logits)
    }

    fn check(
        &self,
        step: &Step<'_>,
        kv: &KvCache<'_>,
        logits: &Matrix<'_>,
    ) -> Result<(), ArgumentError> {
        let model = &self.model;
        let (num_tokens, vocab) = (step.token_ids.len(), model.lm_head.num_rows());
        require(
            logits.dtype() == DType::F32
                && (logits.num_rows(), logits.num_cols()) == (step.out_rows.len(), vocab),
            "logits",
            || logits.describe(),
            || format!("[{}, {vocab}] float32", step.out_rows.len()),
        )?;
        let layout = kv.layout();
        let got = (kv.num_layers(), layout.num_kv_heads, layout.head_dim);
        let want = (model.layers.len(), model.num_kv_heads, model.head_dim);
        let describe = |(layers, heads, dim)| format!("{layers} layers of {heads} heads of {dim}");
        require(got == want, "kv", || describe(got), || describe(want))?;
        let wrong = step
            .out_rows
            .iter()
            .find(|&&row| usize::try_from(row).map_or(true, |row| row >= num_tokens));
        match wrong {
            None => Ok(()),
            Some(row) => Err(ArgumentError::new(
                "out_rows",
                row.to_string(),
                format!("0 to {}, of {num_tokens} tokens", num_tokens.saturating_sub(1)),
            )),
        }
    }
}

impl Buffers {
    /// Memory for the activations of `model`.
    fn of(model: &Model) -> Self {
        let (hidden, inner) = (model.hidden_size(), model.intermediate_size());
        Self::new(model.dtype, hidden, model.q_size(), model.kv_size(), inner)
    }
}

/// The step's tokens, with every −1 − slot replaced by that slot's last sample.
fn fill_in(known: &mut Vec<i32>, step: &Step<'_>) -> Result<(), ArgumentError> {
    known.clear();
    for &id in step.token_ids {
        let slot = if id < 0 { -1 - id } else { 0 } as usize;
        known.push(match step.last_samples.get(slot) {
            _ if id >= 0 => id,
            Some(&sample) => sample,
            None => {
                let num_slots = step.last_samples.len();
                let want = format!("a token, or −1 − slot of {num_slots} slots");
                return Err(ArgumentError::new("token_ids", id.to_string(), want));
            }
        });
    }
    Ok(())
}

/// From the residual stream to what the attention adds to it.
fn attend(
    pool: &Pool,
    model: &Model,
    index: usize,
    buffers: &mut Buffers,
    step: &Step<'_>,
    kv: &mut KvCache<'_>,
) -> Result<(), ArgumentError> {
    let Buffers { stream, qkv, attended, .. } = buffers;
    let layer = &model.layers[index];
    let bias = layer.qkv_bias.as_ref().map(Numbers::as_row);
    let norm = match index {
        0 => stream.first_norm(&layer.attention_norm, model.norm_eps),
        _ => stream.norm(&layer.attention_norm, model.norm_eps),
    };
    linear(pool, norm, &layer.qkv, bias.as_ref(), &mut qkv.view_mut())?;
    let (mut q, k, v) = qkv.split([model.q_size(), model.kv_size(), model.kv_size()]);
    let mut kv = kv.layer(index);
    let rope = Rope {
        k,
        v,
        positions: step.positions,
        slot_mapping: step.slot_mapping,
        cos_sin: step.cos_sin,
        q_norm: layer.q_norm.as_ref().map(Numbers::as_row),
        k_norm: layer.k_norm.as_ref().map(Numbers::as_row),
        norm_eps: model.norm_eps,
    };
    rope_and_write_kv(pool, &mut q, &mut kv, &rope)?;
    let attention = Attention {
        q: *q.as_matrix(),
        kv: *kv.as_view(),
        block_tables: step.block_tables,
        max_blocks: step.max_blocks,
        row_slots: step.row_slots,
        query_indptr: step.query_indptr,
        seq_lens: step.seq_lens,
        num_shared_blocks: step.num_shared_blocks,
        scale: model.attention_scale,
        window: layer.window,
        softcap: 0.0,
    };
    paged_attention(pool, &attention, &mut attended.view_mut())?;
    let bias = layer.output_bias.as_ref().map(Numbers::as_row);
    linear(pool, &attended.view(), &layer.output, bias.as_ref(), &mut stream.added.view_mut())
}
