"""The decoder, written once for every architecture that :class:`DecoderConfig` describes.

::

    hidden = embedding[tokens]
    for each layer:
        q, k, v = split(norm(hidden) @ qkv)
        rotate q and k; store k and v in the cache        for all rows, before any row attends
        hidden += attention(q, cache) @ output
        gate, up = split(norm(hidden) @ gate_up)
        hidden += (silu(gate) * up) @ down
    logits = norm(hidden[output rows]) @ lm_head

What a layer adds is kept apart from ``hidden`` until the next norm, which adds it in the same pass
over memory. Nothing here knows about sequences: rows, positions and block tables come with the
plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastserve.arena import PlanView
from fastserve.layers import Array, Buffers, Indices, Kernels, rope_table
from fastserve.models.config import DecoderConfig
from fastserve.models.weights import DecoderWeights, LayerWeights

_KEPT_LOGITS_BYTES = 64 << 20


@dataclass(slots=True, kw_only=True)
class KvCache:
    """Keys and values of all layers, and which block belongs to whom.

    Attributes:
        layers: One layer's blocks each, as the kernels take them.
        block_tables: ``[slots, max_blocks]``, the core's own memory.
        cos_sin: Rotary table for every position a sequence can reach.
    """

    layers: list[Array]
    block_tables: Indices
    cos_sin: Array


class Decoder:
    """Weights and kernels, put together.

    Args:
        config: The architecture.
        weights: Those that are tensors in one dtype, which is what is computed in.
        kernels: The back end's fused operations.
    """

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, kernels: Kernels) -> None:
        self.config = config
        self.weights = weights
        self.kernels = kernels
        self.dtype = weights.dtype
        self._buffers = Buffers(
            {
                "hidden": config.hidden_size,
                "normed": config.hidden_size,
                "added": config.hidden_size,
                "qkv": config.q_size + 2 * config.kv_size,
                "attended": config.q_size,
                "gate_up": 2 * config.intermediate_size,
                "activated": config.intermediate_size,
            },
            self.dtype,
        )
        self._logits = torch.empty(0, config.vocab_size, dtype=torch.float32)

    def rope_table(self, num_positions: int) -> Tensor:
        """The rotary table of this model."""
        config = self.config
        divisors = self.weights.rope_divisors
        return rope_table(config.rope, config.head_dim, num_positions, divisors)

    def forward(self, token_ids: Tensor, plan: PlanView, cache: KvCache) -> Tensor:
        """Compute the plan's tokens, store their keys and values, return the output rows' logits.

        Args:
            token_ids: int64 ``[num_tokens]``, all known.
            plan: The step.
            cache: Where keys and values are.

        Returns:
            float32 ``[num_outputs, vocab_size]``, valid until the next call.
        """
        config, weights, kernels = self.config, self.weights, self.kernels
        rows = self._buffers.rows(plan.num_tokens)
        hidden, normed, added = rows["hidden"], rows["normed"], rows["added"]
        kernels.embed(token_ids, weights.embedding, hidden)
        first = weights.layers[0]
        kernels.rms_norm(hidden, first.attention_norm, config.norm_eps, out=normed)
        for index, layer in enumerate(weights.layers):
            if index:
                kernels.rms_norm(
                    added, layer.attention_norm, config.norm_eps, residual=hidden, out=normed
                )
            self._attend(index, layer, rows, plan, cache)
            kernels.rms_norm(added, layer.mlp_norm, config.norm_eps, residual=hidden, out=normed)
            kernels.linear(normed, layer.gate_up, layer.gate_up_bias, rows["gate_up"])
            kernels.silu_mul(rows["gate_up"], out=rows["activated"])
            kernels.linear(rows["activated"], layer.down, layer.down_bias, added)
        return self._logits_of(hidden, added, plan)

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        rows: dict[str, Tensor],
        plan: PlanView,
        cache: KvCache,
    ) -> None:
        """From ``normed`` to what the attention adds."""
        config = self.config
        qkv = self.kernels.linear(rows["normed"], layer.qkv, layer.qkv_bias, rows["qkv"])
        heads = (plan.num_tokens, -1, config.head_dim)
        sizes = [config.q_size, config.kv_size, config.kv_size]
        q, k, v = (part.view(heads) for part in qkv.split(sizes, dim=1))
        self.kernels.rope_and_write_kv(
            q,
            k,
            v,
            plan.positions,
            plan.slot_mapping,
            cache.cos_sin,
            cache.layers[index],
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            norm_eps=config.norm_eps,
        )
        self.kernels.paged_attention(
            q,
            cache.layers[index],
            cache.block_tables,
            plan.row_slots,
            plan.query_indptr,
            plan.seq_lens,
            scale=config.attention_scale,
            window=config.windows[index],
            out=rows["attended"].view(heads),
        )
        self.kernels.linear(rows["attended"], layer.output, layer.output_bias, rows["added"])

    def _logits_of(self, hidden: Tensor, added: Tensor, plan: PlanView) -> Tensor:
        """The LM head, on the rows that have an output and on no other."""
        wanted = torch.from_numpy(plan.out_rows)
        residual, last = hidden.index_select(0, wanted), added.index_select(0, wanted)
        normed = self.kernels.rms_norm(
            last, self.weights.norm, self.config.norm_eps, residual=residual
        )
        logits = self._logits_buffer(plan.num_outputs)
        return self.kernels.linear(normed, self.weights.lm_head, None, logits)

    def _logits_buffer(self, num_rows: int) -> Tensor:
        if num_rows <= self._logits.shape[0]:
            return self._logits[:num_rows]
        fresh = torch.empty(num_rows, self.config.vocab_size, dtype=torch.float32)
        if fresh.nbytes <= _KEPT_LOGITS_BYTES:
            self._logits = fresh
        return fresh
