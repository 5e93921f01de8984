"""The decoder of the extension: one call a step.

What it computes is described where it is: ``rust/cpu/src/decoder``.
"""

from __future__ import annotations

from fastserve._core import cpu
from fastserve.arena import PlanView, Words
from fastserve.models.config import DecoderConfig
from fastserve.models.memory import KvCache, Logits, LogitsBuffer
from fastserve.models.tensors import DType
from fastserve.models.weights import DecoderWeights, LayerWeights

__all__ = ["NativeDecoder"]


class NativeDecoder:
    """A model on the CPU's own kernels.

    Args:
        config: The architecture.
        weights: Packed.
        pool: Threads that compute.

    Attributes:
        decoder: The extension's own.
    """

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, pool: cpu.Pool) -> None:
        self._pool = pool
        self._logits = LogitsBuffer(config.vocab_size)
        self.decoder = cpu.Decoder(
            bfloat16=weights.dtype is DType.BFLOAT16,
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.norm_eps,
            attention_scale=config.attention_scale,
            embedding=weights.embedding.weight,
            layers=[
                _layer(layer, window)
                for layer, window in zip(weights.layers, config.windows, strict=True)
            ],
            norm=weights.norm,
            lm_head=weights.lm_head.weight,
        )

    def forward(self, plan: PlanView, last_samples: Words, cache: KvCache) -> Logits:
        """Run one step: copies of blocks, every layer, the logits of the output rows.

        Args:
            plan: The step.
            last_samples: ``[slots]`` what a token id of −1 − slot stands for.
            cache: Keys and values.
        """
        logits = self._logits.rows(plan.num_outputs)
        self.decoder.forward(
            self._pool,
            cache.kv,
            logits,
            token_ids=plan.token_ids,
            last_samples=last_samples,
            positions=plan.positions,
            slot_mapping=plan.slot_mapping,
            row_slots=plan.row_slots,
            query_indptr=plan.query_indptr,
            seq_lens=plan.seq_lens,
            num_shared_blocks=plan.num_shared_blocks,
            block_tables=cache.block_tables,
            out_rows=plan.out_rows,
            copies=plan.copies,
            cos_sin=cache.cos_sin,
        )
        return logits


def _layer(weights: LayerWeights, window: int) -> cpu.Layer:
    return cpu.Layer(
        attention_norm=weights.attention_norm,
        qkv=weights.qkv.weight,
        qkv_bias=weights.qkv_bias,
        q_norm=weights.q_norm,
        k_norm=weights.k_norm,
        output=weights.output.weight,
        output_bias=weights.output_bias,
        mlp_norm=weights.mlp_norm,
        gate_up=weights.gate_up.weight,
        gate_up_bias=weights.gate_up_bias,
        down=weights.down.weight,
        down_bias=weights.down_bias,
        window=window,
    )
