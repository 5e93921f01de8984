"""Projections in the layout of the CPU's product kernels, in the file's number format or quantized.

A fused projection has parts that a file may keep in different formats; each stays in its own, so
that a weight takes the room that it takes in the file. A format that the kernels do not know is
read as float32. Where eight or four bits are asked for, tensors of every format are read as float32
and quantized a row at a time (``rust/cpu/src/product/quantize.rs`` and ``encode.rs``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastserve._core import cpu
from fastserve.errors import ModelError
from fastserve.models.checkpoint import TensorReader
from fastserve.models.dequant import FORMATS
from fastserve.models.tensors import DType, TensorInfo, find_format


@dataclass(frozen=True, slots=True)
class Quantized:
    """What rows become when they are loaded.

    Attributes:
        option: What was asked for, in errors.
        format: The kernels' name: ``I8``, ``Q8_0`` or ``Q4_1``.
    """

    option: str
    format: str


class PackedRows:
    """One tensor of a checkpoint, on its way into a :class:`PackedMatrix`.

    Args:
        shape: Rows and columns.
        dtype: What the numbers are converted to; ``None`` leaves them in the file's format.
        quantized: What they become, whatever they are.
    """

    def __init__(
        self, shape: tuple[int, int], dtype: DType | None, quantized: Quantized | None = None
    ) -> None:
        self.shape = shape
        self._dtype = DType.FLOAT32 if quantized else dtype
        self._quantized = quantized
        self._packed: cpu.Packed | None = None

    def read(self, reader: TensorReader, info: TensorInfo, num_paired_heads: int = 0) -> None:
        """Read the tensor.

        Args:
            reader: Reads.
            info: What.
            num_paired_heads: Heads whose rows 2i and 2i + 1 in the file are rows i and
                i + head_dim / 2 here; 0: rows are in order.

        Raises:
            ModelError: The file ends early, its number format is not known, or the numbers cannot
                be quantized: some are not finite, or rows are too long.
        """
        dtype = self._dtype
        if dtype is None and info.format.name not in FORMATS:
            dtype = DType.FLOAT32
        try:
            self._packed = self._pack(reader, info, dtype, num_paired_heads)
        except ValueError as error:
            if self._quantized is None:
                raise
            option = self._quantized.option
            remedy = "choose int8, or run" if option == "int4" else "run"
            raise ModelError(
                f"{info.path}: tensor {info.name} cannot be quantized to {option}: {error}; "
                f"{remedy} the model without quantization"
            ) from None

    def _pack(
        self, reader: TensorReader, info: TensorInfo, dtype: DType | None, num_paired_heads: int
    ) -> cpu.Packed:
        name = info.format.name if dtype is None else dtype.format_name
        if self._quantized is not None:
            name = self._quantized.format
        packed = cpu.Packed(name, *self.shape)
        first = 0
        for rows in reader.rows(info, dtype, whole=num_paired_heads > 0):
            count, row_bytes = rows.shape
            if num_paired_heads:
                rows = rows.reshape(num_paired_heads, -1, 2, row_bytes).swapaxes(1, 2)
            packed.fill(first, self._in_blocks(rows.reshape(-1)))
            first += count
        return packed

    def _in_blocks(self, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Bytes of float32 in blocks of the format, where it has blocks."""
        if self._quantized is None or self._quantized.format == "I8":
            return rows  # Its panels quantize.
        layout = find_format(self._quantized.format)
        assert layout is not None, "the kernels' formats are known"
        numbers = rows.view(np.float32)
        num_blocks = numbers.size // layout.block_elements
        blocks = np.empty(num_blocks * layout.block_bytes, np.uint8)
        cpu.encode(self._quantized.format, numbers, blocks)
        return blocks

    def take(self) -> cpu.Packed:
        """What was read, once."""
        packed, self._packed = self._packed, None
        if packed is None:
            raise RuntimeError("the rows were not read, or were taken already")
        return packed


class PackedMatrix:
    """A projection ``[outputs, inputs]``.

    Args:
        parts: Its tensors, one below the other.
    """

    def __init__(self, parts: list[PackedRows]) -> None:
        self._parts = parts
        self._weight: cpu.Weight | None = None
        self.shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])

    def close(self) -> None:
        """All parts were read: put them together."""
        self._weight = cpu.Weight([part.take() for part in self._parts])
        self._parts = []

    @property
    def weight(self) -> cpu.Weight:
        """What the kernels take."""
        if self._weight is None:
            raise RuntimeError("the parts were not put together")
        return self._weight

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.weight.num_bytes
