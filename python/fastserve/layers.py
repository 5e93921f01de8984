"""What the decoder is made of: the rotary table, buffers, and what it asks of kernels.

Products, and what is between two of them, are kernels of the back end. The decoder knows only
:class:`Kernels`, so that a CUDA back end can take the CPU's place and a test can bring a plain
reference.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastserve.models.config import RopeConfig
from fastserve.models.packed import PackedMatrix

Indices: TypeAlias = NDArray[np.int32]
Array: TypeAlias = Any
"""A tensor, or what the back end's ``prepare`` made of one to save doing so every step."""


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

    def prepare(self, tensor: Tensor) -> Array:
        """The tensor's memory in the form that costs least to pass on; to be cut like a tensor."""

    def linear(
        self, x: Array, weight: Tensor | PackedMatrix, bias: Array | None, out: Array
    ) -> Array:
        """``x @ weight.T + bias`` into ``out``."""

    def embed(self, token_ids: Tensor, weight: Tensor | PackedMatrix, out: Tensor) -> None:
        """``weight[token_ids]`` into ``out``."""

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
        out: Array,
    ) -> Array:
        """Causal attention over block tables."""


def rope_table(
    rope: RopeConfig, rotary_dim: int, num_positions: int, divisors: Tensor | None = None
) -> Tensor:
    """Cosines, then sines, of every position: float32 ``[num_positions, rotary_dim]``.

    The operations and their precision are those of transformers, so that the angles are equal.

    Args:
        rope: The position embedding.
        rotary_dim: Dimensions of a head that are rotated.
        num_positions: Rows of the table.
        divisors: What a GGUF file divides the frequencies by, if it does.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        frequencies /= rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3_frequencies(rope, frequencies)
    if divisors is not None:
        frequencies /= divisors
    angles = torch.arange(num_positions).float().unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def _llama3_frequencies(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended."""
    context = rope.original_max_positions
    wavelengths = 2 * math.pi / frequencies
    stretched = frequencies / rope.factor
    blend = (context / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - blend) * stretched + blend * frequencies
    is_long = wavelengths > context / rope.low_freq_factor
    is_short = wavelengths < context / rope.high_freq_factor
    return torch.where(is_long, stretched, torch.where(is_short, frequencies, between))


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
