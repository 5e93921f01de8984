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

    @property
    def tile_rows(self) -> int:
        """Rows that a block of `paged_chunk` attends."""
        return 32 if self.scalar == "float" else 64

    def shared_bytes(self, name: str) -> int:
        """Dynamic shared memory of a block, as the kernel's contract says."""
        if name == "paged_chunk":
            return (self.tile_rows + 128) * self.row_bytes + self.tile_rows * self.head_dim * 4
        stages = 4 if self.row_bytes - 16 <= 256 else 2
        return (16 + 64 * stages) * self.row_bytes + 512

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


@dataclass(frozen=True, slots=True)
class How:
    """A launch.

    Attributes:
        extra_ranges: Ranges of the grid beyond those of the longest row.
        order: Of threads.
        guard: The end of arrays that is guarded.
        mode: The emulator's.
    """

    extra_ranges: int = 0
    order: int = 0
    guard: Side = "end"
    mode: str = "plain"


def attend(shape: Shape, rows: Rows, how: How = How()) -> NDArray[Any]:
    """Launch the kernels as a step does. What none of them writes stays NaN."""
    out = poisoned(rows.q.shape, shape.scalar)
    kinds = [tokens == 1 for tokens, keys in rows.sizes if keys]
    if any(kinds):
        decode(shape, rows, out, how)
    if not all(kinds):
        chunk(shape, rows, out, how)
    return out


def decode(shape: Shape, rows: Rows, out: NDArray[Any], how: How) -> dict[str, NDArray[np.float32]]:
    """Launch the kernels of rows of one token over all rows. Their partials."""
    max_ranges = -(-max(keys for _, keys in rows.sizes) // RANGE) + how.extra_ranges
    shape_of_partials = (len(rows.sizes), shape.num_heads, max_ranges)
    partials = {
        "partial_out": np.full((*shape_of_partials, shape.head_dim), np.nan, np.float32),
        "partial_weights": np.full((*shape_of_partials, 2), np.nan, np.float32),
    }
    shape.kernel("paged_decode", how.mode).launch(
        (max_ranges, shape.num_kv_heads, len(rows.sizes)),
        128,
        _arguments(shape, rows, out) | partials,
        shared_bytes=shape.shared_bytes("paged_decode"),
        order=how.order,
        guard=how.guard,
    )
    shape.kernel("paged_merge", how.mode).launch(
        (shape.num_heads, len(rows.sizes)),
        shape.head_dim,
        {
            "out": out,
            **partials,
            "query_indptr": rows.query_indptr,
            "seq_lens": rows.seq_lens,
            "max_ranges": max_ranges,
            "window": shape.window,
        },
        order=how.order,
        guard=how.guard,
    )
    return partials


def chunk(shape: Shape, rows: Rows, out: NDArray[Any], how: How) -> None:
    """Launch the kernel of rows of several tokens over all rows."""
    most = max(tokens for tokens, _ in rows.sizes)
    shape.kernel("paged_chunk", how.mode).launch(
        (-(-most // (shape.tile_rows // shape.group)), shape.num_kv_heads, len(rows.sizes)),
        2 * shape.tile_rows * (2 if shape.head_dim > 128 else 1),
        _arguments(shape, rows, out),
        shared_bytes=shape.shared_bytes("paged_chunk"),
        order=how.order,
        guard=how.guard,
    )


def _arguments(shape: Shape, rows: Rows, out: NDArray[Any]) -> dict[str, Any]:
    """What both kernels of attention take. Inputs are read-only."""
    inputs: dict[str, Any] = {
        "q": rows.q,
        "k_cache": rows.k_cache,
        "v_cache": rows.v_cache,
        "block_tables": rows.block_tables,
        "row_slots": rows.row_slots,
        "query_indptr": rows.query_indptr,
        "seq_lens": rows.seq_lens,
    }
    for array in inputs.values():
        array.flags.writeable = False
    return {
        "out": out,
        **inputs,
        "max_blocks": rows.block_tables.shape[1],
        "group": shape.group,
        "window": shape.window,
        "scale": shape.scale,
        "soft_cap": shape.soft_cap,
    }


def reference(shape: Shape, rows: Rows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The formula in float64, over keys and values as they are stored. NaN for padding rows.

    Also the same sum of the values' magnitudes, which says how far rounded weights may lead.
    """
    q = loaded(rows.q, shape.scalar)
    out, magnitude = np.full(q.shape, np.nan), np.full(q.shape, np.nan)
    first = 0
    for (tokens, keys), slot in zip(rows.sizes, rows.row_slots, strict=True):
        if keys:
            positions = keys - tokens + np.arange(tokens)[:, None]
            is_visible = np.arange(keys)[None] <= positions
            if shape.window:
                is_visible &= np.arange(keys)[None] > positions - shape.window
            k, v = _keys_and_values(shape, rows, slot, is_visible.any(0))
            for head in range(shape.num_heads):
                of = head // shape.group
                scores = q[first : first + tokens, head] @ k[of].T * shape.scale
                if shape.soft_cap:
                    scores = shape.soft_cap * np.tanh(scores / shape.soft_cap)
                scores = np.where(is_visible, scores, -np.inf)
                weights = np.exp(scores - scores.max(1, keepdims=True))
                weights /= weights.sum(1, keepdims=True)
                out[first : first + tokens, head] = weights @ v[of]
                magnitude[first : first + tokens, head] = weights @ abs(v[of])
        first += tokens
    return out, magnitude


def _keys_and_values(
    shape: Shape, rows: Rows, slot: int, is_seen: NDArray[np.bool_]
) -> list[NDArray[np.float64]]:
    """Of a row, ``[KV heads, keys, head_dim]`` each; zeros where nobody sees them."""
    blocks = rows.block_tables[slot, : -(-len(is_seen) // shape.block_size)]
    return [
        np.where(
            is_seen[:, None],
            loaded(plane[blocks], shape.scalar)
            .transpose(1, 0, 2, 3)
            .reshape(shape.num_kv_heads, -1, shape.head_dim)[:, : len(is_seen)],
            0.0,
        )
        for plane in (rows.k_cache, rows.v_cache)
    ]
