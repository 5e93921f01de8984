"""Stored numbers to float32 or bfloat16, a run of blocks at a time.

The results are those of ``gguf.dequantize`` to the last bit (tests compare them), then rounded once
where bfloat16 is wanted. The formats of our kernels are decoded in Rust, without the GIL; the rest
go through the ``gguf`` package, which takes some hundred times as long.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from fastserve._core import cpu
from fastserve.models.tensors import Array, Format, find_format

FORMATS: Final = frozenset(cpu.weight_formats())
"""Formats that our kernels know."""


def is_known(layout: Format) -> bool:
    """Whether our kernels or ``gguf`` know the format."""
    return layout.name in FORMATS or find_format(layout.name) is not None


def decode(layout: Format, raw: NDArray[np.uint8], out: Array) -> None:
    """Fill ``out`` with the numbers in ``raw``.

    Args:
        layout: A known format.
        raw: Whole blocks as they are in the file, one axis.
        out: As many numbers, C-contiguous.
    """
    if layout.name in FORMATS:
        cpu.decode(layout.name, raw, out)
        return
    import gguf

    blocks = raw.reshape(-1, layout.block_bytes)
    numbers = gguf.dequantize(blocks, gguf.GGMLQuantizationType[layout.name])
    cpu.decode("F32", np.ascontiguousarray(numbers).reshape(-1).view(np.uint8), out)
