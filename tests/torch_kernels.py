"""The CPU kernels on torch tensors, as tests compare them with torch: no copies, no logic.

A tensor is passed on as a numpy view of its memory; bfloat16, which numpy lacks, as ``uint16``.
Index arrays are the plan's own numpy ``int32`` views. Activations may be columns of one fused
projection: only the axes after the first need to be contiguous.

The layout of a KV block is described in ``rust/cpu/src/layout.rs``; here a block is opaque.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import numpy as np
import torch

from fastserve._core import cpu

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Indices = NDArray[np.int32]
    Array = torch.Tensor | NDArray[np.float32] | NDArray[np.uint16]
    KvLayer = Array | NDArray[np.int8]


class CpuKernels:
    """The kernels that run on a pool of threads.

    Args:
        pool: From :func:`fastserve.kernels.pool.make_pool`.
    """

    def __init__(self, pool: cpu.Pool) -> None:
        self._pool = pool

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: Array,
        eps: float,
        *,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Norm each row of ``x`` and multiply by ``weight``.

        With a ``residual``, ``residual += x`` in place, and the norm is of the residual.
        """
        out = torch.empty(x.shape, dtype=x.dtype) if out is None else out
        carried = None if residual is None else as_array(residual)
        self._pool.rms_norm(as_array(x), as_array(weight), eps, as_array(out), carried)
        return out

    def silu_mul(self, gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """``silu(gate) * up``, where a row of ``gate_up`` is the gate's half, then up's."""
        if out is None:
            out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)
        self._pool.silu_mul(as_array(gate_up), as_array(out))
        return out

    def rope_and_write_kv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: Indices,
        slot_mapping: Indices,
        cos_sin: Array,
        kv_layer: KvLayer,
        *,
        q_norm: Array | None = None,
        k_norm: Array | None = None,
        norm_eps: float = 0.0,
    ) -> None:
        """Rotate ``q`` in place; rotate ``k`` and store it and ``v`` at ``slot_mapping``.

        Args:
            q: ``[tokens, heads, head_dim]``, rotated in place.
            k: ``[tokens, kv_heads, head_dim]``, left as it is.
            v: Like ``k``.
            positions: Of each token; a row of ``cos_sin``.
            slot_mapping: ``block * block_size + offset`` of each token; -1 stores nothing.
            cos_sin: float32 ``[positions, rotary_dim]``: cosines, then sines.
            kv_layer: One layer of :func:`fastserve.models.memory.empty_kv`.
            q_norm: Weight of an RMS norm over each head of ``q`` before the rotation.
            k_norm: The same for ``k``.
            norm_eps: Epsilon of both.
        """
        self._pool.rope_and_write_kv(
            as_array(q),
            as_array(k),
            as_array(v),
            positions,
            slot_mapping,
            as_array(cos_sin),
            as_array(kv_layer),
            q_norm=None if q_norm is None else as_array(q_norm),
            k_norm=None if k_norm is None else as_array(k_norm),
            norm_eps=norm_eps,
        )

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_layer: KvLayer,
        block_tables: Indices,
        row_slots: Indices,
        query_indptr: Indices,
        seq_lens: Indices,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        num_shared_blocks: Indices | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of any mix of rows over the KV of one layer.

        Args:
            q: ``[tokens, heads, head_dim]``.
            kv_layer: One layer of :func:`fastserve.models.memory.empty_kv`.
            block_tables: ``[slots, max_blocks]``, block ids of each row slot in order.
            row_slots: The block table of each row.
            query_indptr: Row i owns ``q[query_indptr[i]:query_indptr[i + 1]]``.
            seq_lens: Tokens of each row with K and V; its last query is at ``seq_lens[i] - 1``.
                0 is a padding row, whose output is zero.
            scale: Factor of the logits.
            window: Keys that a token sees, itself included; 0 is all.
            softcap: Logits become ``softcap * tanh(logit / softcap)``; 0 leaves them.
            num_shared_blocks: Leading blocks of each row that are those of the row before, all of
                them before the queries of both: their keys and values are read once.
            out: Like ``q``; allocated when absent.
        """
        out = torch.empty(q.shape, dtype=q.dtype) if out is None else out
        self._pool.paged_attention(
            as_array(q),
            as_array(kv_layer),
            block_tables,
            row_slots,
            query_indptr,
            seq_lens,
            as_array(out),
            scale=scale,
            window=window,
            softcap=softcap,
            num_shared_blocks=num_shared_blocks,
        )
        return out


@overload
def as_array(tensor: Array) -> NDArray[np.float32] | NDArray[np.uint16]: ...
@overload
def as_array(tensor: NDArray[np.int8]) -> NDArray[np.int8]: ...
def as_array(tensor: KvLayer) -> NDArray[np.float32] | NDArray[np.uint16] | NDArray[np.int8]:
    """The tensor's own memory as a numpy array. Keep it to save the microsecond of making it."""
    if isinstance(tensor, np.ndarray):
        return tensor
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: NDArray[np.float32] | NDArray[np.uint16] = tensor.numpy()
    return array
