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
