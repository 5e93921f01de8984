//! What a model is made of, and the check that its parts fit each other.

use std::sync::Arc;

use super::buffers::Numbers;
use crate::element::DType;
use crate::error::{ArgumentError, require};
use crate::layout::MAX_HEAD_DIM;
use crate::product::Weight;

/// One layer. Biases and head norms are `None` where the architecture has none.
#[derive(Debug, Clone)]
pub struct Layer {
    /// Scale of the norm in front of the attention.
    pub attention_norm: Numbers,
    /// Queries, keys and values: `[q_size + 2 * kv_size, hidden_size]`.
    pub qkv: Arc<Weight>,
    /// Bias of that product.
    pub qkv_bias: Option<Numbers>,
    /// Scale of a norm over each head of the queries.
    pub q_norm: Option<Numbers>,
    /// The same for keys.
    pub k_norm: Option<Numbers>,
    /// What the attention adds: `[hidden_size, q_size]`.
    pub output: Arc<Weight>,
    /// Bias of that product.
    pub output_bias: Option<Numbers>,
    /// Scale of the norm in front of the MLP.
    pub mlp_norm: Numbers,
    /// Gate, then up, in equal parts: `[2 * intermediate_size, hidden_size]`.
    pub gate_up: Arc<Weight>,
    /// Bias of that product.
    pub gate_up_bias: Option<Numbers>,
    /// What the MLP adds: `[hidden_size, intermediate_size]`.
    pub down: Arc<Weight>,
    /// Bias of that product.
    pub down_bias: Option<Numbers>,
    /// Tokens that attention sees, the current one included; 0: all.
    pub window: usize,
}

/// A whole model.
#[derive(Debug, Clone)]
pub struct Model {
    /// What activations are stored as.
    pub dtype: DType,
    /// Query heads.
    pub num_q_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Size of a head.
    pub head_dim: usize,
    /// Added to the mean square in every norm.
    pub norm_eps: f32,
    /// Factor of the attention scores.
    pub attention_scale: f32,
    /// `[vocab_size, hidden_size]`.
    pub embedding: Arc<Weight>,
    /// One a layer.
    pub layers: Vec<Layer>,
    /// Scale of the last norm.
    pub norm: Numbers,
    /// `[vocab_size, hidden_size]`; the embedding again where they are tied.
    pub lm_head: Arc<Weight>,
}

impl Model {
    /// Width of the residual stream.
    pub fn hidden_size(&self) -> usize {
        self.embedding.num_cols()
    }

    /// Width of all query heads.
    pub const fn q_size(&self) -> usize {
        self.num_q_heads * self.head_dim
    }

    /// Width of all key heads; of all value heads too.
    pub const fn kv_size(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Width of the gated MLP.
    pub fn intermediate_size(&self) -> usize {
        self.layers.first().map_or(0, |layer| layer.down.num_cols())
    }

    /// Check that every part has the shape that the others call for.
    pub(super) fn check(&self) -> Result<(), ArgumentError> {
        let (hidden, inner) = (self.hidden_size(), self.intermediate_size());
        require(!self.layers.is_empty(), "layers", || "none".into(), || "at least one".into())?;
        require(
            (1..=MAX_HEAD_DIM).contains(&self.head_dim) && self.head_dim.is_multiple_of(8),
            "head_dim",
            || self.head_dim.to_string(),
            || format!("a multiple of 8, at most {MAX_HEAD_DIM}"),
        )?;
        require(
            self.num_kv_heads > 0 && self.num_q_heads.is_multiple_of(self.num_kv_heads),
            "num_q_heads",
            || self.num_q_heads.to_string(),
            || format!("a multiple of num_kv_heads={}", self.num_kv_heads),
        )?;
        // Far beyond any model; products of them then fit a usize.
        let most = 1 << 20;
        require(
            self.num_q_heads <= most,
            "num_q_heads",
            || self.num_q_heads.to_string(),
            || format!("at most {most}"),
        )?;
        for (name, value) in
            [("norm_eps", self.norm_eps), ("attention_scale", self.attention_scale)]
        {
            require(
                value.is_finite() && value >= 0.0,
                name,
                || value.to_string(),
                || "a finite number, 0 or more".into(),
            )?;
        }
        let vocab = self.embedding.num_rows();
        matrix("lm_head", &self.lm_head, [vocab, hidden])?;
        vector("norm", Some(&self.norm), hidden)?;
        let (q, qkv) = (self.q_size(), self.q_size() + 2 * self.kv_size());
        for layer in &self.layers {
            vector("attention_norm", Some(&layer.attention_norm), hidden)?;
            matrix("qkv", &layer.qkv, [qkv, hidden])?;
            vector("qkv_bias", layer.qkv_bias.as_ref(), qkv)?;
            vector("q_norm", layer.q_norm.as_ref(), self.head_dim)?;
            vector("k_norm", layer.k_norm.as_ref(), self.head_dim)?;
            matrix("output", &layer.output, [hidden, q])?;
            vector("output_bias", layer.output_bias.as_ref(), hidden)?;
            vector("mlp_norm", Some(&layer.mlp_norm), hidden)?;
            matrix("gate_up", &layer.gate_up, [2 * inner, hidden])?;
            layer.gate_up.check_halves("gate_up")?;
            vector("gate_up_bias", layer.gate_up_bias.as_ref(), 2 * inner)?;
            matrix("down", &layer.down, [hidden, inner])?;
            vector("down_bias", layer.down_bias.as_ref(), hidden)?;
        }
        Ok(())
    }
}

fn matrix(
    name: &'static str,
    weight: &Weight,
    [rows, cols]: [usize; 2],
) -> Result<(), ArgumentError> {
    let (got_rows, got_cols) = (weight.num_rows(), weight.num_cols());
    require(
        (got_rows, got_cols) == (rows, cols),
        name,
        || format!("[{got_rows}, {got_cols}]"),
        || format!("[{rows}, {cols}]"),
    )
}

fn vector(name: &'static str, numbers: Option<&Numbers>, len: usize) -> Result<(), ArgumentError> {
    let got = numbers.map_or(len, Numbers::len);
    require(got == len, name, || format!("[{got}]"), || format!("[{len}]"))
}
