"""What a checkpoint says about a tensor: its name, shape, number format and place in a file.

Both kinds of checkpoint, safetensors and GGUF, are a header followed by raw data. Their readers
turn the header into :class:`TensorInfo`; from there on one loader serves both. What tensors become
in memory is an :data:`Array` of a :class:`DType`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastserve.errors import ModelError

Array: TypeAlias = NDArray[np.float32] | NDArray[np.uint16]
"""Numbers in memory. bfloat16, which numpy lacks, travels as uint16."""


class DType(StrEnum):
    """What is computed in. Its value is what an option of the engine calls it."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @classmethod
    def of(cls, array: Array) -> DType:
        """What an array's numbers are."""
        return cls.BFLOAT16 if array.dtype == np.uint16 else cls.FLOAT32

    @property
    def numpy(self) -> np.dtype[Any]:
        """The dtype of an :data:`Array` of it."""
        return np.dtype(np.float32 if self is DType.FLOAT32 else np.uint16)

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return self.numpy.itemsize

    @property
    def format_name(self) -> str:
        """The format of a file that has the same bytes."""
        return "F32" if self is DType.FLOAT32 else "BF16"


@dataclass(frozen=True, slots=True)
class Format:
    """How numbers are stored: in blocks of ``block_elements`` numbers and ``block_bytes`` bytes."""

    name: str
    block_elements: int
    block_bytes: int


_COMMON = (
    Format("F32", 1, 4),
    Format("F16", 1, 2),
    Format("BF16", 1, 2),
    Format("Q8_0", 32, 34),
    Format("Q4_0", 32, 18),
    Format("Q4_1", 32, 20),
    Format("Q4_K", 256, 144),
    Format("Q6_K", 256, 210),
)
COMMON_FORMATS = tuple(known.name for known in _COMMON)
"""Formats that are read without the ``gguf`` package's slow path."""

_FORMATS = {known.name: known for known in _COMMON}
_GGML_IDS = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    8: "Q8_0",
    12: "Q4_K",
    14: "Q6_K",
    30: "BF16",
}


def find_format(name: str) -> Format | None:
    """The format of that name, ``None`` if no kernel or library here reads it."""
    return _FORMATS.get(name) or _rare_formats().get(name)


def find_ggml_format(type_id: int) -> Format | None:
    """The format that GGUF gives this number."""
    name = _GGML_IDS.get(type_id)
    if name is not None:
        return _FORMATS[name]
    import gguf

    try:
        return find_format(gguf.GGMLQuantizationType(type_id).name)
    except ValueError:
        return None


def _rare_formats() -> dict[str, Format]:
    """What the ``gguf`` package can dequantize beyond the common formats. Slow, but it works."""
    import gguf  # Late: it takes a quarter of a second, and the common formats do without.

    return {
        kind.name: Format(kind.name, *gguf.GGML_QUANT_SIZES[kind])
        for kind in gguf.quants._type_traits
    }


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is.

    Attributes:
        name: Its name in the checkpoint.
        shape: Outermost dimension first.
        format: Number format of its data.
        path: The file.
        offset: First byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    format: Format
    path: Path
    offset: int

    @property
    def num_elements(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in the file. A row is a whole number of blocks."""
        return self.num_elements // self.format.block_elements * self.format.block_bytes


def check_extent(info: TensorInfo, num_file_bytes: int) -> None:
    """Refuse a tensor that the file is too short for, or whose rows are not whole blocks."""
    if info.shape and info.shape[-1] % info.format.block_elements:
        raise ModelError(
            f"{info.path}: tensor {info.name} has rows of {info.shape[-1]} numbers in format "
            f"{info.format.name}, which takes multiples of {info.format.block_elements}; "
            "the file is corrupt"
        )
    end = info.offset + info.num_bytes
    if end > num_file_bytes:
        raise ModelError(
            f"{info.path}: truncated: tensor {info.name} ends at byte {end}, the file has "
            f"{num_file_bytes}; download or copy it again"
        )
