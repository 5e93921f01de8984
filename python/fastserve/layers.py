"""What the decoder on torch tensors is made of: buffers, and what it asks of kernels.

Products, and what is between two of them, are kernels of the back end. The decoder knows only
:class:`Kernels`, so that a CUDA back end can take the CPU's place and a test can bring a plain
reference.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Indices: TypeAlias = NDArray[np.int32]
Array: TypeAlias = Any
"""A tensor, or an array of numpy's."""


class Kernels(Protocol):
    """The fused operations. ``fastserve.kernels.cpu`` documents each argument."""

    def rms_norm(
        self,
        x: Array,
        weight: Array,
        eps: float,
        *,
        residual: Array | None = None,
        out: Array,
    ) -> Array:
        """Norm of ``x``, or of ``residual`` after ``residual += x``."""

    def silu_mul(self, gate_up: Array, *, out: Array) -> Array:
        """``silu(gate) * up``."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """``x @ weight.T + bias`` into ``out``."""

    def rope_and_write_kv(
        self,
        q: Array,
        k: Array,
        v: Array,
        positions: Indices,
        slot_mapping: Indices,
        cos_sin: Array,
        kv_layer: Array,
        *,
        q_norm: Array | None = None,
        k_norm: Array | None = None,
        norm_eps: float = 0.0,
    ) -> None:
        """Norm and rotate queries and keys; store keys and values."""

    def paged_attention(
        self,
        q: Array,
        kv_layer: Array,
        block_tables: Indices,
        row_slots: Indices,
        query_indptr: Indices,
        seq_lens: Indices,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        num_shared_blocks: Indices | None = None,
        out: Array,
    ) -> Array:
        """Causal attention over block tables."""


class Buffers:
    """Activations of one step, kept from step to step.

    A step of 2,048 tokens has tens of megabytes of them. Fresh memory of that size comes from the
    kernel page by page, which takes longer than some of the operations that fill it.
    """

    def __init__(self, widths: dict[str, int], dtype: torch.dtype) -> None:
        self._widths = widths
        self._dtype = dtype
        self._capacity = 0
        self._tensors: dict[str, Tensor] = {}

    def rows(self, num_rows: int) -> dict[str, Tensor]:
        """A ``[num_rows, width]`` view for each name. Contents are whatever was left in them."""
        if num_rows > self._capacity:
            self._capacity = num_rows
            self._tensors = {
                name: torch.empty(num_rows, width, dtype=self._dtype)
                for name, width in self._widths.items()
            }
        return {name: tensor[:num_rows] for name, tensor in self._tensors.items()}
