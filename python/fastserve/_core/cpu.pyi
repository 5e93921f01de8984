from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Packed",
    "Pool",
    "Weight",
    "available_isas",
    "detect_isa",
    "kv_layer_shape",
    "kv_shape",
    "weight_formats",
]

# bfloat16 travels as uint16.
_Array: TypeAlias = NDArray[np.float32] | NDArray[np.uint16]
_Words: TypeAlias = NDArray[np.int32]

def detect_isa() -> str: ...
def available_isas() -> list[str]: ...
def kv_shape(
    num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int, int, int, int]: ...
def kv_layer_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int, int, int]: ...
def weight_formats() -> list[str]: ...

@final
class Packed:
    def __new__(cls, format: str, num_rows: int, num_cols: int) -> Packed: ...
    def fill(self, first_row: int, rows: NDArray[np.uint8]) -> None: ...

@final
class Weight:
    def __new__(cls, parts: list[Packed]) -> Weight: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def formats(self) -> list[str]: ...

@final
class Pool:
    def __new__(cls, num_threads: int, isa: str | None = None) -> Pool: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def isa(self) -> str: ...
    def rms_norm(
        self, x: _Array, weight: _Array, eps: float, out: _Array, residual: _Array | None = None
    ) -> None: ...
    def linear(
        self, x: _Array, weight: Weight, out: _Array, bias: _Array | None = None
    ) -> None: ...
    def gather(self, weight: Weight, rows: _Words, out: _Array) -> None: ...
    def silu_mul(self, gate_up: _Array, out: _Array) -> None: ...
    def rope_and_write_kv(
        self,
        q: _Array,
        k: _Array,
        v: _Array,
        positions: _Words,
        slot_mapping: _Words,
        cos_sin: _Array,
        kv_layer: _Array,
        *,
        q_norm: _Array | None = None,
        k_norm: _Array | None = None,
        norm_eps: float = 0.0,
    ) -> None: ...
    def paged_attention(
        self,
        q: _Array,
        kv_layer: _Array,
        block_tables: _Words,
        row_slots: _Words,
        query_indptr: _Words,
        seq_lens: _Words,
        out: _Array,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> None: ...
