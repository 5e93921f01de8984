"""Projections in the layout of the CPU's product kernels, in the number format of the file or int8.

A fused projection has parts that a file may keep in different formats; each stays in its own, so
that a weight takes the room that it takes in the file. A format that the kernels do not know is
read as float32. Where int8 is asked for, tensors of every format are read as float32 and quantized
a row at a time (``rust/cpu/src/product/quantize.rs``).
"""

from __future__ import annotations

from fastserve._core import cpu
from fastserve.errors import ModelError
from fastserve.models.checkpoint import TensorReader
from fastserve.models.dequant import FORMATS
from fastserve.models.tensors import DType, TensorInfo


class PackedRows:
    """One tensor of a checkpoint, on its way into a :class:`PackedMatrix`.

    Args:
        shape: Rows and columns.
        dtype: What the numbers are converted to; ``None`` leaves them in the file's format.
        is_int8: Quantize them, whatever they are.
    """

    def __init__(
        self, shape: tuple[int, int], dtype: DType | None, *, is_int8: bool = False
    ) -> None:
        self.shape = shape
        self._dtype = DType.FLOAT32 if is_int8 else dtype
        self._is_int8 = is_int8
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
            if not self._is_int8:
                raise
            raise ModelError(
                f"{info.path}: tensor {info.name} cannot be quantized to int8: {error}; run the "
                "model without quantization"
            ) from None

    def _pack(
        self, reader: TensorReader, info: TensorInfo, dtype: DType | None, num_paired_heads: int
    ) -> cpu.Packed:
        name = info.format.name if dtype is None else dtype.format_name
        packed = cpu.Packed("I8" if self._is_int8 else name, *self.shape)
        first = 0
        for rows in reader.rows(info, dtype, whole=num_paired_heads > 0):
            count, row_bytes = rows.shape
            if num_paired_heads:
                rows = rows.reshape(num_paired_heads, -1, 2, row_bytes).swapaxes(1, 2)
            packed.fill(first, rows.reshape(-1))
            first += count
        return packed

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
