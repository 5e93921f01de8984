"""Weights as torch tensors, for the decoder whose products are torch's.

Only that path imports this module: the loader itself does without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastserve.models.packed import PackedMatrix
from fastserve.models.tensors import Array, DType
from fastserve.models.weights import DecoderWeights, LayerWeights, Matrix

__all__ = ["TorchLayer", "TorchWeights", "as_torch", "torch_dtype"]


@dataclass(slots=True, kw_only=True)
class TorchLayer:
    """:class:`LayerWeights`, as tensors."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(slots=True, kw_only=True)
class TorchWeights:
    """:class:`DecoderWeights`, as tensors."""

    embedding: Tensor
    layers: list[TorchLayer]
    norm: Tensor
    lm_head: Tensor


def torch_dtype(dtype: DType) -> torch.dtype:
    """What torch calls it."""
    return torch.float32 if dtype is DType.FLOAT32 else torch.bfloat16


def as_torch(weights: DecoderWeights) -> TorchWeights:
    """The same weights as tensors that share their memory.

    Raises:
        TypeError: They are packed for other products.
    """
    return TorchWeights(
        embedding=_as_tensor(weights.embedding),
        layers=[_as_layer(layer) for layer in weights.layers],
        norm=_as_tensor(weights.norm),
        lm_head=_as_tensor(weights.lm_head),
    )


def _as_layer(layer: LayerWeights) -> TorchLayer:
    def optional(array: Array | None) -> Tensor | None:
        return None if array is None else _as_tensor(array)

    return TorchLayer(
        attention_norm=_as_tensor(layer.attention_norm),
        qkv=_as_tensor(layer.qkv),
        qkv_bias=optional(layer.qkv_bias),
        q_norm=optional(layer.q_norm),
        k_norm=optional(layer.k_norm),
        output=_as_tensor(layer.output),
        output_bias=optional(layer.output_bias),
        mlp_norm=_as_tensor(layer.mlp_norm),
        gate_up=_as_tensor(layer.gate_up),
        gate_up_bias=optional(layer.gate_up_bias),
        down=_as_tensor(layer.down),
        down_bias=optional(layer.down_bias),
    )


def _as_tensor(matrix: Matrix) -> Tensor:
    if isinstance(matrix, PackedMatrix):
        raise TypeError("torch takes weights that are not packed; load them without a packing")
    tensor = torch.from_numpy(matrix)
    return tensor.view(torch.bfloat16) if matrix.dtype == np.uint16 else tensor
