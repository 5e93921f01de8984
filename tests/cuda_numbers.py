"""The number formats of CUDA kernels in numpy, where bfloat16 travels as uint16."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

SCALARS: Final = ("float", "__half", "__nv_bfloat16")

ROUNDING: Final = {"float": 2.0**-24, "__half": 2.0**-11, "__nv_bfloat16": 2.0**-8}
"""The most that rounding changes a number, relative."""

_STORED: Final = {"float": np.float32, "__half": np.float16, "__nv_bfloat16": np.uint16}


def stored(values: NDArray[Any], scalar: str) -> NDArray[Any]:
    """Numbers as a kernel's tensor, rounded to nearest even."""
    single = np.ascontiguousarray(values, np.float32)
    if scalar != "__nv_bfloat16":
        return single.astype(_STORED[scalar])
    bits = single.view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    rounded[np.isnan(single)] = 0x7FFF
    return rounded


def loaded(tensor: NDArray[Any], scalar: str) -> NDArray[np.float64]:
    """A kernel's tensor as numbers."""
    if scalar != "__nv_bfloat16":
        return tensor.astype(np.float64)
    return (tensor.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def poisoned(shape: tuple[int, ...], scalar: str) -> NDArray[Any]:
    """A tensor of NaN."""
    return stored(np.full(shape, np.nan), scalar)
