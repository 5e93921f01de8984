"""Rows for the kernels of paged attention, their launches, and what they should give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda_emulator.guarded import Side
from cuda_launch import EmulatedKernel, kernel
from cuda_numbers import loaded, poisoned, stored

RANGE = 256
NUM_UNUSED_SLOTS = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """What a kernel is compiled for, and what it is told of the model."""

    scalar: str
    head_dim: int
    block_size: int
    group: int = 1
    num_kv_heads: int = 1
    window: int = 0
    soft_cap: float = 0.0

    @property
    def num_heads(self) -> int:
        return self.group * self.num_kv_heads

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def row_bytes(self) -> int:
        """From one row of a tile in shared memory to the next."""
        size = 4 if self.scalar == "float" else 2
        return self.head_dim * size + 16

    def kernel(self, name: str, mode: str) -> EmulatedKernel:
        macros: dict[str, Any] = {"SCALAR": self.scalar, "HEAD_DIM": self.head_dim}
        if name != "paged_merge":
            macros["BLOCK_SIZE"] = self.block_size
        return kernel(name, mode=mode, **macros)


@dataclass(frozen=True, slots=True)
class Rows:
    """A step: one entry a row, ``(tokens, keys)``; no keys: a padding row."""

    sizes: tuple[tuple[int, int], ...]
    q: NDArray[Any]
    k_cache: NDArray[Any]
    v_cache: NDArray[Any]
    block_tables: NDArray[np.int32]
    row_slots: NDArray[np.int32]

    @property
    def query_indptr(self) -> NDArray[np.int32]:
        return np.cumsum([0, *(tokens for tokens, _ in self.sizes)], dtype=np.int32)

    @property
    def seq_lens(self) -> NDArray[np.int32]:
        return np.array([keys for _, keys in self.sizes], np.int32)

    def only(self, row: int) -> Rows:
        """The same row without company."""
        first, end = self.query_indptr[row : row + 2].tolist()
        return replace(
            self, sizes=(self.sizes[row],), q=self.q[first:end], row_slots=self.row_slots[[row]]
        )

    def token_as_row(self, row: int, token: int) -> Rows:
        """One token of a row, with the keys that it sees, as a row of one token."""
        tokens, keys = self.sizes[row]
        at = int(self.query_indptr[row]) + token
        return replace(
            self,
            sizes=((1, keys - tokens + token + 1),),
            q=self.q[at : at + 1],
            row_slots=self.row_slots[[row]],
        )

    def chunk(self, row: int, first: int, end: int) -> Rows:
        """Some of a row's tokens, as an earlier step would have attended them."""
        tokens, keys = self.sizes[row]
        at = int(self.query_indptr[row])
        return replace(
            self,
            sizes=((end - first, keys - tokens + end),),
            q=self.q[at + first : at + end],
            row_slots=self.row_slots[[row]],
        )


def make_rows(
    random: np.random.Generator,
    shape: Shape,
    sizes: Sequence[tuple[int, int]],
    *,
    num_shared_blocks: int = 0,
    spread: float = 1.0,
) -> Rows:
    """Random rows over permuted blocks. What no row may read is NaN.

    Args:
        random: Draws.
        shape: The model's.
        sizes: ``(tokens, keys)`` of each row.
        num_shared_blocks: Leading blocks that all rows have in common, where they have as many.
        spread: Standard deviation of queries; of keys and values it is 1.
    """
    num_rows, block = len(sizes), shape.block_size
    longest = max(-(-keys // block) for _, keys in sizes)
    max_blocks = max(longest, 1) + 1
    num_slots = num_rows + NUM_UNUSED_SLOTS
    num_blocks = num_rows * max_blocks + 1
    free = random.permutation(num_blocks).astype(np.int32).tolist()
    tables = np.full((num_slots, max_blocks), -1, np.int32)
    slots = random.permutation(num_slots)[:num_rows].astype(np.int32)
    plane = (num_blocks, shape.num_kv_heads, block, shape.head_dim)
    k_cache, v_cache = (poisoned(plane, shape.scalar) for _ in range(2))
    common: list[int] = []
    for (_, keys), slot in zip(sizes, slots, strict=True):
        for index in range(-(-keys // block)):
            is_shared = index < min(num_shared_blocks, keys // block)
            if is_shared and index < len(common):
                number = common[index]
            else:
                number = free.pop()
                used = min(keys - index * block, block)
                for cache_ in (k_cache, v_cache):
                    values = random.standard_normal((shape.num_kv_heads, used, shape.head_dim))
                    cache_[number, :, :used] = stored(values, shape.scalar)
                if is_shared:
                    common.append(number)
            tables[slot, index] = number
    num_tokens = sum(tokens for tokens, _ in sizes)
    q = spread * random.standard_normal((num_tokens, shape.num_heads, shape.head_dim))
    return Rows(tuple(sizes), stored(q, shape.scalar), k_cache, v_cache, tables, slots)


def attend(
    shape: Shape,
    rows: Rows,
    *,
    extra_ranges: int = 0,
    order: int = 0,
    guard: Side = "end",
    mode: str = "plain",
) -> NDArray[Any]:
    """Launch the kernels as a step does. What none of them writes stays NaN."""
    out = poisoned(rows.q.shape, shape.scalar)
    of_rows: dict[str, Any] = {"query_indptr": rows.query_indptr, "seq_lens": rows.seq_lens}
    inputs: dict[str, Any] = {
        "q": rows.q,
        "k_cache": rows.k_cache,
        "v_cache": rows.v_cache,
        "block_tables": rows.block_tables,
        "row_slots": rows.row_slots,
        **of_rows,
    }
    for array in inputs.values():
        array.flags.writeable = False
    window = {"window": shape.window}
    numbers = {"group": shape.group, "scale": shape.scale, "soft_cap": shape.soft_cap, **window}
    common = {"out": out, **inputs, **numbers, "max_blocks": rows.block_tables.shape[1]}
    how: dict[str, Any] = {"order": order, "guard": guard}
    kinds = [tokens == 1 for tokens, keys in rows.sizes if keys]
    num_rows = len(rows.sizes)
    if any(kinds):
        max_ranges = -(-max(keys for _, keys in rows.sizes) // RANGE) + extra_ranges
        partials = (num_rows, shape.num_heads, max_ranges)
        partial = {
            "partial_out": np.full((*partials, shape.head_dim), np.nan, np.float32),
            "partial_weights": np.full((*partials, 2), np.nan, np.float32),
        }
        stages = 4 if shape.row_bytes - 16 <= 256 else 2
        shape.kernel("paged_decode", mode).launch(
            (max_ranges, shape.num_kv_heads, num_rows),
            128,
            common | partial,
            shared_bytes=(16 + 64 * stages) * shape.row_bytes + 512,
            **how,
        )
        merged = {"out": out, **partial, **of_rows, **window, "max_ranges": max_ranges}
        shape.kernel("paged_merge", mode).launch(
            (shape.num_heads, num_rows), shape.head_dim, merged, **how
        )
    if not all(kinds):
        tile = 32 if shape.scalar == "float" else 64
        most = max(tokens for tokens, _ in rows.sizes)
        shape.kernel("paged_chunk", mode).launch(
            (-(-most // (tile // shape.group)), shape.num_kv_heads, num_rows),
            2 * tile * (2 if shape.head_dim > 128 else 1),
            common,
            shared_bytes=(tile + 128) * shape.row_bytes + tile * shape.head_dim * 4,
            **how,
        )
    return out


def reference(shape: Shape, rows: Rows) -> NDArray[np.float64]:
    """The formula in float64, over keys and values as they are stored. NaN for padding rows."""
    q = loaded(rows.q, shape.scalar)
    out = np.full(q.shape, np.nan)
    first = 0
    for (tokens, keys), slot in zip(rows.sizes, rows.row_slots, strict=True):
        if keys:
            blocks = rows.block_tables[slot, : -(-keys // shape.block_size)]
            k, v = (
                loaded(plane[blocks], shape.scalar)
                .transpose(1, 0, 2, 3)
                .reshape(shape.num_kv_heads, -1, shape.head_dim)[:, :keys]
                for plane in (rows.k_cache, rows.v_cache)
            )
            positions = keys - tokens + np.arange(tokens)[:, None]
            is_visible = np.arange(keys)[None] <= positions
            if shape.window:
                is_visible &= np.arange(keys)[None] > positions - shape.window
            for head in range(shape.num_heads):
                of = head // shape.group
                scores = q[first : first + tokens, head] @ k[of].T * shape.scale
                if shape.soft_cap:
                    scores = shape.soft_cap * np.tanh(scores / shape.soft_cap)
                scores = np.where(is_visible, scores, -np.inf)
                weights = np.exp(scores - scores.max(1, keepdims=True))
                out[first : first + tokens, head] = weights @ v[of] / weights.sum(1, keepdims=True)
        first += tokens
    return out
