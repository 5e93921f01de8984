"""What packed matrices hold."""

from __future__ import annotations

import numpy as np

from fastserve._core import cpu
from fastserve.models.packed import PackedMatrix


def as_floats(matrix: PackedMatrix) -> np.ndarray:
    """All rows as float32, exactly."""
    out = np.empty(matrix.shape, np.float32)
    cpu.Pool(1).gather(matrix.weight, np.arange(matrix.shape[0], dtype=np.int32), out)
    return out


def rounded_to_int8(rows: np.ndarray) -> np.ndarray:
    """What float32 rows are as int8, by the definition: integers times the scale, float32 again."""
    scale = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
    return np.rint(rows / np.where(scale > 0, scale, np.inf)).clip(-127, 127) * scale
