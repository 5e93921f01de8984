"""What packed matrices hold."""

from __future__ import annotations

import numpy as np

from fastserve._core import cpu
from fastserve.models.packed import PackedMatrix
from fastserve.models.tensors import find_format


def as_floats(matrix: PackedMatrix) -> np.ndarray:
    """All rows as float32, exactly."""
    out = np.empty(matrix.shape, np.float32)
    cpu.Pool(1).gather(matrix.weight, np.arange(matrix.shape[0], dtype=np.int32), out)
    return out


def rounded_to_int8(rows: np.ndarray) -> np.ndarray:
    """What float32 rows are as int8, by the definition: integers times the scale, float32 again."""
    scale = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
    return np.rint(rows / np.where(scale > 0, scale, np.inf)).clip(-127, 127) * scale


def encoded(rows: np.ndarray, name: str) -> np.ndarray:
    """What float32 rows are in blocks of a format, float32 again."""
    layout = find_format(name)
    assert layout is not None
    blocks = np.empty(rows.size // layout.block_elements * layout.block_bytes, np.uint8)
    cpu.encode(name, np.ascontiguousarray(rows).reshape(-1), blocks)
    out = np.empty(rows.shape, np.float32)
    cpu.decode(name, blocks, out.reshape(-1))
    return out
