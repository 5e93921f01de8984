from typing import Final, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ALL_MASKED",
    "NOT_FINITE",
    "Decoder",
    "Layer",
    "Packed",
    "Pool",
    "Sampler",
    "Samples",
    "Weight",
    "available_isas",
    "best_tokens",
    "decode",
    "detect_isa",
    "draw_bits",
    "draw_tokens",
    "encode",
    "kv_layer_shape",
    "kv_shape",
    "philox4x32",
    "row_logprobs",
    "weight_formats",
]

# bfloat16 travels as uint16.
_Array: TypeAlias = NDArray[np.float32] | NDArray[np.uint16]
_Kv: TypeAlias = _Array | NDArray[np.int8]
_Words: TypeAlias = NDArray[np.int32]

ALL_MASKED: Final[int]
NOT_FINITE: Final[int]

def detect_isa() -> str: ...
def available_isas() -> list[str]: ...
def kv_shape(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
) -> tuple[int, int, int, int, int]: ...
def kv_layer_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str
) -> tuple[int, int, int, int]: ...
def weight_formats() -> list[str]: ...
def decode(format: str, blocks: NDArray[np.uint8], out: _Array) -> None: ...
def encode(format: str, numbers: NDArray[np.float32], out: NDArray[np.uint8]) -> None: ...
def best_tokens(
    pool: Pool, logits: NDArray[np.float32]
) -> tuple[_Words, NDArray[np.float32], NDArray[np.bool_]]: ...
def draw_tokens(
    pool: Pool,
    logits: NDArray[np.float32],
    rows: _Words,
    *,
    temperature: NDArray[np.float32],
    top_k: _Words,
    top_p: NDArray[np.float32],
    min_p: NDArray[np.float32],
    bits: NDArray[np.uint64],
) -> _Words: ...
def row_logprobs(
    pool: Pool, logits: NDArray[np.float32], rows: _Words, chosen: _Words, num_best: _Words
) -> list[tuple[int, list[int], list[float]]]: ...
def draw_bits(
    seeds: NDArray[np.uint64], sequence_indices: _Words, positions: _Words
) -> NDArray[np.uint64]: ...
def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]: ...

@final
class Sampler:
    def __new__(cls, max_num_seqs: int, vocab_size: int) -> Sampler: ...
    @property
    def last_samples(self) -> _Words: ...
    def apply_events(self, slot_events: _Words, event_words: _Words) -> None: ...
    def sample(
        self,
        pool: Pool,
        logits: NDArray[np.float32],
        *,
        positions: _Words,
        out_rows: _Words,
        out_slots: _Words,
        out_kinds: _Words,
    ) -> Samples: ...

@final
class Samples:
    @property
    def counts(self) -> _Words: ...
    @property
    def tokens(self) -> _Words: ...
    def logprobs(self) -> list[tuple[int, tuple[int, list[int], list[float]]]]: ...
    def scores(self) -> list[tuple[int, int, tuple[int, list[int], list[float]]]]: ...

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
class Layer:
    def __new__(
        cls,
        *,
        attention_norm: _Array,
        qkv: Weight,
        output: Weight,
        mlp_norm: _Array,
        gate_up: Weight,
        down: Weight,
        window: int = 0,
        qkv_bias: _Array | None = None,
        q_norm: _Array | None = None,
        k_norm: _Array | None = None,
        output_bias: _Array | None = None,
        gate_up_bias: _Array | None = None,
        down_bias: _Array | None = None,
    ) -> Layer: ...

@final
class Decoder:
    def __new__(
        cls,
        *,
        bfloat16: bool,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        norm_eps: float,
        attention_scale: float,
        embedding: Weight,
        layers: list[Layer],
        norm: _Array,
        lm_head: Weight,
    ) -> Decoder: ...
    def forward(
        self,
        pool: Pool,
        kv: _Kv,
        logits: NDArray[np.float32],
        *,
        token_ids: _Words,
        last_samples: _Words,
        positions: _Words,
        slot_mapping: _Words,
        row_slots: _Words,
        query_indptr: _Words,
        seq_lens: _Words,
        num_shared_blocks: _Words,
        block_tables: _Words,
        out_rows: _Words,
        copies: _Words,
        cos_sin: _Array,
    ) -> None: ...

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
        kv_layer: _Kv,
        *,
        q_norm: _Array | None = None,
        k_norm: _Array | None = None,
        norm_eps: float = 0.0,
    ) -> None: ...
    def paged_attention(
        self,
        q: _Array,
        kv_layer: _Kv,
        block_tables: _Words,
        row_slots: _Words,
        query_indptr: _Words,
        seq_lens: _Words,
        out: _Array,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        num_shared_blocks: _Words | None = None,
    ) -> None: ...
