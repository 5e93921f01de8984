//! A whole decoder: Python describes the model once, and calls once a step.

use std::sync::Arc;

use fastserve_cpu as cpu;
use fastserve_cpu::{DType, KvCache, Numbers};
use pyo3::prelude::*;

use super::kv::KvArray;
use super::weights::Weight;
use super::{Pool, run, value_error};
use crate::arrays::{Array, Words, check_overlap};

/// One layer of a decoder. Vectors are copied, weights are shared.
#[pyclass(frozen, module = "fastserve._core.cpu")]
pub(crate) struct Layer {
    layer: cpu::Layer,
}

#[pymethods]
impl Layer {
    #[new]
    #[pyo3(signature = (*, attention_norm, qkv, output, mlp_norm, gate_up, down, window=0,
                        qkv_bias=None, q_norm=None, k_norm=None, output_bias=None,
                        gate_up_bias=None, down_bias=None))]
    #[expect(clippy::too_many_arguments, reason = "a layer's parts, by name in Python")]
    fn new(
        attention_norm: &Bound<'_, PyAny>,
        qkv: &Weight,
        output: &Weight,
        mlp_norm: &Bound<'_, PyAny>,
        gate_up: &Weight,
        down: &Weight,
        window: usize,
        qkv_bias: Option<&Bound<'_, PyAny>>,
        q_norm: Option<&Bound<'_, PyAny>>,
        k_norm: Option<&Bound<'_, PyAny>>,
        output_bias: Option<&Bound<'_, PyAny>>,
        gate_up_bias: Option<&Bound<'_, PyAny>>,
        down_bias: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let optional = |name, array: Option<&Bound<'_, PyAny>>| {
            array.map(|array| numbers(name, array)).transpose()
        };
        let layer = cpu::Layer {
            attention_norm: numbers("attention_norm", attention_norm)?,
            qkv: Arc::clone(&qkv.weight),
            qkv_bias: optional("qkv_bias", qkv_bias)?,
            q_norm: optional("q_norm", q_norm)?,
            k_norm: optional("k_norm", k_norm)?,
            output: Arc::clone(&output.weight),
            output_bias: optional("output_bias", output_bias)?,
            mlp_norm: numbers("mlp_norm", mlp_norm)?,
            gate_up: Arc::clone(&gate_up.weight),
            gate_up_bias: optional("gate_up_bias", gate_up_bias)?,
            down: Arc::clone(&down.weight),
            down_bias: optional("down_bias", down_bias)?,
            window,
        };
        Ok(Self { layer })
    }
}

fn numbers(name: &'static str, array: &Bound<'_, PyAny>) -> PyResult<Numbers> {
    Array::new(name, array)?.numbers()
}

/// A model, and memory for its activations. Threads that compute with it take turns.
#[pyclass(frozen, module = "fastserve._core.cpu")]
pub(crate) struct Decoder {
    pub(crate) decoder: Arc<cpu::Decoder>,
    pub(crate) head_dim: usize,
}

#[pymethods]
impl Decoder {
    /// `bfloat16`: store activations as that, otherwise as float32.
    #[new]
    #[pyo3(signature = (*, bfloat16, num_q_heads, num_kv_heads, head_dim, norm_eps,
                        attention_scale, embedding, layers, norm, lm_head))]
    #[expect(clippy::too_many_arguments, reason = "a model's parts, by name in Python")]
    #[expect(clippy::needless_pass_by_value, reason = "how arguments come from Python")]
    fn new(
        bfloat16: bool,
        num_q_heads: usize,
        num_kv_heads: usize,
        head_dim: usize,
        norm_eps: f32,
        attention_scale: f32,
        embedding: &Weight,
        layers: Vec<Bound<'_, Layer>>,
        norm: &Bound<'_, PyAny>,
        lm_head: &Weight,
    ) -> PyResult<Self> {
        let model = cpu::Model {
            dtype: if bfloat16 { DType::Bf16 } else { DType::F32 },
            num_q_heads,
            num_kv_heads,
            head_dim,
            norm_eps,
            attention_scale,
            embedding: Arc::clone(&embedding.weight),
            layers: layers.iter().map(|layer| layer.get().layer.clone()).collect(),
            norm: numbers("norm", norm)?,
            lm_head: Arc::clone(&lm_head.weight),
        };
        let decoder = Arc::new(cpu::Decoder::new(model).map_err(value_error)?);
        Ok(Self { decoder, head_dim })
    }

    /// Run a step: copies, then every layer, then the logits of `out_rows`. The arrays are a plan's,
    /// by their names there; `kv` is of shape `kv_shape(...)`, `cos_sin` has cosines, then sines.
    #[pyo3(signature = (pool, kv, logits, *, token_ids, last_samples, positions, slot_mapping,
                        row_slots, query_indptr, seq_lens, num_shared_blocks, block_tables,
                        out_rows, copies, cos_sin))]
    #[expect(clippy::too_many_arguments, reason = "a plan's arrays, by name in Python")]
    fn forward(
        &self,
        pool: &Pool,
        kv: &Bound<'_, PyAny>,
        logits: &Bound<'_, PyAny>,
        token_ids: &Bound<'_, PyAny>,
        last_samples: &Bound<'_, PyAny>,
        positions: &Bound<'_, PyAny>,
        slot_mapping: &Bound<'_, PyAny>,
        row_slots: &Bound<'_, PyAny>,
        query_indptr: &Bound<'_, PyAny>,
        seq_lens: &Bound<'_, PyAny>,
        num_shared_blocks: &Bound<'_, PyAny>,
        block_tables: &Bound<'_, PyAny>,
        out_rows: &Bound<'_, PyAny>,
        copies: &Bound<'_, PyAny>,
        cos_sin: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let py = kv.py();
        let kv = KvArray::all_mut("kv", kv, self.head_dim)?;
        let logits = Array::new_mut("logits", logits)?;
        let cos_sin = Array::new("cos_sin", cos_sin)?;
        check_overlap(&[Some(&kv), Some(&logits)], &[Some(&cos_sin)])?;
        let token_ids = Words::new("token_ids", token_ids)?;
        let last_samples = Words::new("last_samples", last_samples)?;
        let positions = Words::new("positions", positions)?;
        let slot_mapping = Words::new("slot_mapping", slot_mapping)?;
        let row_slots = Words::new("row_slots", row_slots)?;
        let query_indptr = Words::new("query_indptr", query_indptr)?;
        let seq_lens = Words::new("seq_lens", seq_lens)?;
        let num_shared_blocks = Words::new("num_shared_blocks", num_shared_blocks)?;
        let block_tables = Words::new_2d("block_tables", block_tables)?;
        let out_rows = Words::new("out_rows", out_rows)?;
        let copies = Words::new_2d("copies", copies)?;
        for words in [
            &token_ids,
            &last_samples,
            &positions,
            &slot_mapping,
            &row_slots,
            &query_indptr,
            &seq_lens,
            &num_shared_blocks,
            &block_tables,
            &out_rows,
            &copies,
        ] {
            words.check_apart(&[&kv, &logits])?;
        }
        let step = cpu::Step {
            token_ids: token_ids.slice(),
            last_samples: last_samples.slice(),
            positions: positions.slice(),
            slot_mapping: slot_mapping.slice(),
            row_slots: row_slots.slice(),
            query_indptr: query_indptr.slice(),
            seq_lens: seq_lens.slice(),
            num_shared_blocks: num_shared_blocks.slice(),
            block_tables: block_tables.slice(),
            max_blocks: block_tables.num_cols(),
            out_rows: out_rows.slice(),
            copies: copies.slice(),
            cos_sin: cos_sin.matrix()?,
        };
        // SAFETY: `kv` is a C-contiguous, aligned, writable array of that many layers of the layout's
        // shape, borrowed for this call, that overlaps no other argument.
        let mut kv = unsafe { KvCache::from_raw(kv.data_mut(), kv.num_layers(), kv.layout()) };
        let mut logits = logits.matrix_mut()?;
        run(py, || self.decoder.forward(&pool.pool, &step, &mut kv, &mut logits))
    }
}
