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

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastserve.arena import PlanView
from fastserve.layers import Array, Buffers, Indices, Kernels, rope_table
from fastserve.models.config import DecoderConfig
from fastserve.models.weights import DecoderWeights, LayerWeights, Matrix

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


@dataclass(slots=True, kw_only=True)
class _Layer:
    """A layer's weights as the kernels take them."""

    attention_norm: Array
    qkv: Matrix
    qkv_bias: Array | None
    q_norm: Array | None
    k_norm: Array | None
    output: Matrix
    output_bias: Array | None
    mlp_norm: Array
    gate_up: Matrix
    gate_up_bias: Array | None
    down: Matrix
    down_bias: Array | None


class _Rows:
    """Activations of a step's tokens, and the parts of them that kernels take.

    Cutting and reshaping costs microseconds each, of which a step of one token has few to lose:
    all of it is done once for a number of tokens.
    """

    def __init__(
        self, tensors: dict[str, Tensor], config: DecoderConfig, prepare: Callable[[Tensor], Array]
    ) -> None:
        num_tokens = tensors["hidden"].shape[0]
        self.num_tokens = num_tokens
        self.hidden, self.added = tensors["hidden"], tensors["added"]
        arrays = {name: prepare(tensor) for name, tensor in tensors.items()}
        self.residual, self.delta = arrays["hidden"], arrays["added"]
        self.normed, self.qkv = arrays["normed"], arrays["qkv"]
        self.gate_up, self.activated = arrays["gate_up"], arrays["activated"]
        self.attended = arrays["attended"]
        heads = (num_tokens, -1, config.head_dim)
        ends = (config.q_size, config.q_size + config.kv_size)
        self.q = self.qkv[:, : ends[0]].reshape(heads)
        self.k = self.qkv[:, ends[0] : ends[1]].reshape(heads)
        self.v = self.qkv[:, ends[1] :].reshape(heads)
        self.attended_heads = self.attended.reshape(heads)


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
        # torch multiplies tensors; our own products take what our kernels take.
        is_packed = not isinstance(weights.lm_head, Tensor)
        self._prepare: Callable[[Tensor], Array] = kernels.prepare if is_packed else _as_it_is
        self._layers = [self._prepared(layer) for layer in weights.layers]
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
        self._rows: _Rows | None = None
        self._logits = torch.empty(0, config.vocab_size, dtype=torch.float32)

    def _prepared(self, layer: LayerWeights) -> _Layer:
        def prepared(value: Matrix | None) -> Matrix | Array:
            return self._prepare(value) if isinstance(value, Tensor) else value

        return _Layer(**{name: prepared(getattr(layer, name)) for name in LayerWeights.__slots__})

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
        kernels, eps = self.kernels, self.config.norm_eps
        rows = self._rows_of(plan.num_tokens)
        kernels.embed(token_ids, self.weights.embedding, rows.hidden)
        kernels.rms_norm(rows.residual, self._layers[0].attention_norm, eps, out=rows.normed)
        for index, layer in enumerate(self._layers):
            if index:
                kernels.rms_norm(
                    rows.delta, layer.attention_norm, eps, residual=rows.residual, out=rows.normed
                )
            self._attend(index, layer, rows, plan, cache)
            kernels.rms_norm(
                rows.delta, layer.mlp_norm, eps, residual=rows.residual, out=rows.normed
            )
            kernels.linear(rows.normed, layer.gate_up, layer.gate_up_bias, rows.gate_up)
            kernels.silu_mul(rows.gate_up, out=rows.activated)
            kernels.linear(rows.activated, layer.down, layer.down_bias, rows.delta)
        return self._logits_of(rows, plan)

    def _rows_of(self, num_tokens: int) -> _Rows:
        """Those of the last step, if it had as many tokens: while sequences decode, it had."""
        rows = self._rows
        if rows is None or rows.num_tokens != num_tokens:
            rows = _Rows(self._buffers.rows(num_tokens), self.config, self._prepare)
            self._rows = rows
        return rows

    def _attend(
        self, index: int, layer: _Layer, rows: _Rows, plan: PlanView, cache: KvCache
    ) -> None:
        """From ``normed`` to what the attention adds."""
        config, kernels = self.config, self.kernels
        kernels.linear(rows.normed, layer.qkv, layer.qkv_bias, rows.qkv)
        kernels.rope_and_write_kv(
            rows.q,
            rows.k,
            rows.v,
            plan.positions,
            plan.slot_mapping,
            cache.cos_sin,
            cache.layers[index],
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            norm_eps=config.norm_eps,
        )
        kernels.paged_attention(
            rows.q,
            cache.layers[index],
            cache.block_tables,
            plan.row_slots,
            plan.query_indptr,
            plan.seq_lens,
            scale=config.attention_scale,
            window=config.windows[index],
            out=rows.attended_heads,
        )
        kernels.linear(rows.attended, layer.output, layer.output_bias, rows.delta)

    def _logits_of(self, rows: _Rows, plan: PlanView) -> Tensor:
        """The LM head, on the rows that have an output and on no other."""
        wanted = torch.from_numpy(plan.out_rows)
        residual = rows.hidden.index_select(0, wanted)
        last = rows.added.index_select(0, wanted)
        normed = torch.empty_like(last)
        self.kernels.rms_norm(
            last, self.weights.norm, self.config.norm_eps, residual=residual, out=normed
        )
        logits = self._logits_buffer(plan.num_outputs)
        self.kernels.linear(normed, self.weights.lm_head, None, logits)
        return logits

    def _logits_buffer(self, num_rows: int) -> Tensor:
        if num_rows <= self._logits.shape[0]:
            return self._logits[:num_rows]
        fresh = torch.empty(num_rows, self.config.vocab_size, dtype=torch.float32)
        if fresh.nbytes <= _KEPT_LOGITS_BYTES:
            self._logits = fresh
        return fresh


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
