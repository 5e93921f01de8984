"""Memory that one step leaves to the next: keys and values, and the logits' buffer.

The layout of a KV block is described in ``rust/cpu/src/layout.rs``; here a block is opaque.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastserve._core import cpu
from fastserve.arena import Words

__all__ = ["KvArray", "KvCache", "KvDType", "Logits", "LogitsBuffer", "empty_kv"]

Logits: TypeAlias = NDArray[np.float32]
"""``[num_outputs, vocab_size]``, valid until the next step."""

KvArray: TypeAlias = NDArray[np.float32] | NDArray[np.uint16] | NDArray[np.int8]
"""Keys and values in memory. bfloat16, which numpy lacks, travels as uint16."""

_KEPT_BYTES: Final = 64 << 20


class KvDType(StrEnum):
    """What keys and values are stored as. Its value is what an option of the engine calls it.

    ``int8`` has a float32 scale for each token's key and for its value, of each head: the largest
    number over 127. They are part of a block.
    """

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"

    @property
    def numpy(self) -> np.dtype[Any]:
        """The dtype of a :data:`KvArray` of it."""
        return np.dtype({"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}[self])


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache:
    """Keys and values of all layers, and which block belongs to whom.

    Attributes:
        kv: What :func:`empty_kv` made.
        block_tables: ``[slots, max_blocks]``, the core's own memory.
        cos_sin: float32 ``[positions, rotary_dim]``, the rotary table of every position that a
            sequence can reach.
    """

    kv: KvArray
    block_tables: Words
    cos_sin: NDArray[np.float32]


def empty_kv(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: KvDType,
) -> KvArray:
    """KV of all layers, untouched memory: axis 0 is the layer, axis 1 the block.

    Raises:
        ValueError: Blocks or heads of a size that the kernels do not know.
    """
    shape = cpu.kv_shape(num_layers, num_blocks, block_size, num_kv_heads, head_dim, dtype)
    return np.empty(shape, dtype.numpy)


class LogitsBuffer:
    """Rows of logits, kept from step to step unless they are many."""

    def __init__(self, vocab_size: int) -> None:
        self._logits: Logits = np.empty((0, vocab_size), np.float32)

    def rows(self, num_rows: int) -> Logits:
        """So many rows. Contents are whatever was left in them."""
        if num_rows <= len(self._logits):
            return self._logits[:num_rows]
        fresh = np.empty((num_rows, self._logits.shape[1]), np.float32)
        if fresh.nbytes <= _KEPT_BYTES:
            self._logits = fresh
        return fresh
