"""The decoder on torch tensors, for products that are torch's.

On the CPU that is bfloat16 on processors with instructions for it. What is computed, and in which
order, is the same as in ``rust/cpu/src/decoder``.

What a layer adds is kept apart from ``hidden`` until the next norm, which adds it in the same pass
over memory. Nothing here knows about sequences: rows, positions and block tables come with the
plan.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastserve._core import cpu
from fastserve.arena import PlanView, Words
from fastserve.kernels.cpu import CpuKernels
from fastserve.layers import Buffers, Kernels
from fastserve.models.config import DecoderConfig
from fastserve.models.memory import KvCache, Logits, LogitsBuffer
from fastserve.models.torch_weights import TorchLayer, as_torch, torch_dtype
from fastserve.models.weights import DecoderWeights

__all__ = ["TorchDecoder", "on_cpu"]


class TorchDecoder:
    """Weights and kernels, put together.

    Args:
        config: The architecture.
        weights: Not packed; their memory is shared.
        kernels: The back end's fused operations.
    """

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, kernels: Kernels) -> None:
        self._config = config
        self._weights = as_torch(weights)
        self._kernels = kernels
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
            torch_dtype(weights.dtype),
        )
        self._logits = LogitsBuffer(config.vocab_size)

    @torch.inference_mode()
    def forward(self, plan: PlanView, last_samples: Words, cache: KvCache) -> Logits:
        """Run one step: copies of blocks, every layer, the logits of the output rows.

        Args:
            plan: The step.
            last_samples: ``[slots]`` what a token id of −1 − slot stands for.
            cache: Keys and values.
        """
        if len(plan.copies):
            cache.kv[:, plan.copies[:, 1]] = cache.kv[:, plan.copies[:, 0]]
        kernels, eps = self._kernels, self._config.norm_eps
        layers = self._weights.layers
        rows = self._buffers.rows(plan.num_tokens)
        hidden, normed, added = rows["hidden"], rows["normed"], rows["added"]
        token_ids = torch.from_numpy(known_tokens(plan.token_ids, last_samples))
        torch.index_select(self._weights.embedding, 0, token_ids, out=hidden)
        kernels.rms_norm(hidden, layers[0].attention_norm, eps, out=normed)
        for index, layer in enumerate(layers):
            if index:
                kernels.rms_norm(added, layer.attention_norm, eps, residual=hidden, out=normed)
            self._attend(index, layer, rows, plan, cache)
            kernels.rms_norm(added, layer.mlp_norm, eps, residual=hidden, out=normed)
            kernels.linear(normed, layer.gate_up, layer.gate_up_bias, rows["gate_up"])
            kernels.silu_mul(rows["gate_up"], out=rows["activated"])
            kernels.linear(rows["activated"], layer.down, layer.down_bias, added)
        return self._logits_of(hidden, added, plan)

    def _attend(
        self,
        index: int,
        layer: TorchLayer,
        rows: dict[str, Tensor],
        plan: PlanView,
        cache: KvCache,
    ) -> None:
        """From ``normed`` to what the attention adds."""
        config, kernels = self._config, self._kernels
        kernels.linear(rows["normed"], layer.qkv, layer.qkv_bias, rows["qkv"])
        heads = (plan.num_tokens, -1, config.head_dim)
        widths = [config.q_size, config.kv_size, config.kv_size]
        q, k, v = (part.unflatten(1, heads[1:]) for part in rows["qkv"].split(widths, dim=1))
        kernels.rope_and_write_kv(
            q,
            k,
            v,
            plan.positions,
            plan.slot_mapping,
            cache.cos_sin,
            cache.kv[index],
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            norm_eps=config.norm_eps,
        )
        kernels.paged_attention(
            q,
            cache.kv[index],
            cache.block_tables,
            plan.row_slots,
            plan.query_indptr,
            plan.seq_lens,
            scale=config.attention_scale,
            window=config.windows[index],
            num_shared_blocks=plan.num_shared_blocks,
            out=rows["attended"].view(heads),
        )
        kernels.linear(rows["attended"], layer.output, layer.output_bias, rows["added"])

    def _logits_of(self, hidden: Tensor, added: Tensor, plan: PlanView) -> Logits:
        """The LM head, on the rows that have an output and on no other."""
        wanted = torch.from_numpy(plan.out_rows)
        residual = hidden.index_select(0, wanted)
        last = added.index_select(0, wanted)
        normed = torch.empty_like(last)
        self._kernels.rms_norm(
            last, self._weights.norm, self._config.norm_eps, residual=residual, out=normed
        )
        logits = self._logits.rows(plan.num_outputs)
        self._kernels.linear(normed, self._weights.lm_head, None, torch.from_numpy(logits))
        return logits


def on_cpu(config: DecoderConfig, weights: DecoderWeights, pool: cpu.Pool) -> TorchDecoder:
    """A decoder whose products are torch's and whose other operations are our kernels.

    Sets the number of torch's threads, which is one number for the whole process.
    """
    torch.set_num_threads(pool.num_threads)
    return TorchDecoder(config, weights, CpuKernels(pool))


def known_tokens(token_ids: Words, last_samples: Words) -> NDArray[np.int64]:
    """Token ids with every −1 − slot replaced by that slot's last sample."""
    known = token_ids.astype(np.int64)
    unknown = np.flatnonzero(known < 0)
    if unknown.size:
        known[unknown] = last_samples[-1 - known[unknown]]
    return known
