"""Weights in the layout that the decoder computes with, and how they get there.

Projections that read the same input are stored as one matrix, so that each is one product::

    qkv      [(num_q_heads + 2 * num_kv_heads) * head_dim, hidden_size]    queries, keys, values
    gate_up  [2 * intermediate_size, hidden_size]                          gate, up

They are packed for our own products, in the number format of the file or another one
(:mod:`fastserve.models.packed`).

The matrices are allocated first. Then every tensor of the checkpoint is read, a buffer at a time,
into the rows that are its own, in the order of the file. Peak memory is the weights and a buffer a
thread.

A checkpoint must have exactly the tensors that the architecture record calls for: a missing one,
one of another shape and one that nothing would use (a bias that the record does not know) are
errors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from enum import Enum
from threading import Lock
from typing import Any, Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from fastserve.errors import ModelError
from fastserve.models.checkpoint import Checkpoint, TensorReader
from fastserve.models.config import DecoderConfig
from fastserve.models.packed import PackedMatrix, PackedRows, Quantized
from fastserve.models.tensors import Array, DType

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes read so far and all there are to read: from any thread, one at a time."""


class Packing(Enum):
    """What packed matrices keep their numbers as."""

    AS_STORED = "as stored"
    """The file's format, where the kernels know it."""
    AS_COMPUTED = "as computed"
    """The dtype that is computed in."""
    INT8 = "int8"
    """One int8 a number and one scale a row, whatever the file has."""
    INT4 = "int4"
    """Four bits a number in groups of 32 with a scale and a minimum (Q4_1), whatever the file has;
    eight bits in groups of 32 with a scale (Q8_0) for the embedding and ``lm_head``."""


_IGNORED: Final = ("rotary_emb.inv_freq",)
_ROPE_DIVISORS: Final = "rope_divisors.weight"
_OF_VOCABULARY: Final = ("embedding.weight", "lm_head.weight")


@dataclass(slots=True, kw_only=True)
class LayerWeights:
    """One layer. Biases and head norms are ``None`` where the architecture has none."""

    attention_norm: Array
    qkv: PackedMatrix
    qkv_bias: Array | None
    q_norm: Array | None
    k_norm: Array | None
    output: PackedMatrix
    output_bias: Array | None
    mlp_norm: Array
    gate_up: PackedMatrix
    gate_up_bias: Array | None
    down: PackedMatrix
    down_bias: Array | None


@dataclass(slots=True, kw_only=True)
class DecoderWeights:
    """A whole model.

    Attributes:
        dtype: What is computed in.
        embedding: ``[vocab_size, hidden_size]``.
        layers: One a layer.
        norm: Scale of the last norm.
        lm_head: ``[vocab_size, hidden_size]``; the embedding's own object where they are tied.
        rope_divisors: ``[head_dim / 2]`` float32 by which the rotary frequencies are divided, where
            a GGUF file has them.
    """

    dtype: DType
    embedding: PackedMatrix
    layers: list[LayerWeights]
    norm: Array
    lm_head: PackedMatrix
    rope_divisors: NDArray[np.float32] | None

    def num_bytes(self) -> int:
        """Memory that the weights take."""
        return sum(weight.nbytes for weight in self._weights())

    def formats(self) -> list[str]:
        """Names of the formats that the matrices are in, each once."""
        found: dict[str, None] = {}
        for matrix in self._matrices():
            found |= dict.fromkeys(matrix.weight.formats)
        return list(found)

    def close(self) -> None:
        """Everything was read: put the matrices together."""
        for matrix in self._matrices():
            matrix.close()

    def _matrices(self) -> Iterator[PackedMatrix]:
        return (weight for weight in self._weights() if isinstance(weight, PackedMatrix))

    def _weights(self) -> Iterator[Array | PackedMatrix]:
        """Each once."""
        yield from (self.embedding, self.norm)
        if self.lm_head is not self.embedding:
            yield self.lm_head
        for layer in self.layers:
            for name in LayerWeights.__slots__:
                weight = getattr(layer, name)
                if weight is not None:
                    yield weight


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor of the checkpoint and the rows it belongs in.

    ``num_heads`` is set for queries and keys, whose rows a checkpoint may keep in another order.
    """

    name: str
    into: Array | PackedRows
    num_heads: int = 0


def load_weights(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    dtype: DType,
    *,
    packing: Packing,
    num_threads: int = 1,
    progress: Progress | None = None,
) -> DecoderWeights:
    """Allocate the weights and fill them from ``checkpoint``.

    Args:
        checkpoint: The tensors.
        config: The architecture.
        dtype: What is computed in, and what tensors are converted to.
        packing: What matrices keep their numbers as.
        num_threads: Threads that read.
        progress: Called as the numbers come in.

    Raises:
        ModelError: A tensor is missing, superfluous, of the wrong shape or cut short, or has
            numbers that cannot be quantized.
    """
    has_divisors = _ROPE_DIVISORS in checkpoint
    # Shapes first, without memory: a broken record may ask for any amount.
    shapes = _Allocation(config, dtype, packing, has_divisors, _shape_only)
    _check(checkpoint, config, shapes.parts)
    allocation = _Allocation(config, dtype, packing, has_divisors, np.empty)
    parts = allocation.parts
    parts.sort(key=lambda part: (checkpoint[part.name].path, checkpoint[part.name].offset))
    total = sum(checkpoint[part.name].num_bytes for part in parts)
    done = 0
    lock = Lock()
    pending = deque(parts)

    def advance(num_bytes: int) -> None:
        nonlocal done
        with lock:
            done += num_bytes
            if progress is not None:
                progress(done, total)

    def work() -> None:
        with TensorReader(advance) as reader:
            while True:
                try:
                    part = pending.popleft()
                except IndexError:
                    return
                _read(part, checkpoint, config, reader)

    _run_in_threads(work, num_threads, pending.clear)
    _check_divisors(checkpoint, allocation.weights.rope_divisors)
    allocation.weights.close()
    return allocation.weights


def _check_divisors(checkpoint: Checkpoint, divisors: NDArray[np.float32] | None) -> None:
    if divisors is not None and not (np.isfinite(divisors) & (divisors > 0)).all():
        raise ModelError(
            f"{checkpoint.origin}: tensor {checkpoint.spelled(_ROPE_DIVISORS)} has "
            f"{divisors.min()} to {divisors.max()}: want finite numbers above 0"
        )


def _read(part: _Part, checkpoint: Checkpoint, config: DecoderConfig, reader: TensorReader) -> None:
    """Read a tensor to where it belongs."""
    info, into = checkpoint[part.name], part.into
    num_paired_heads = part.num_heads if checkpoint.interleaved else 0
    if isinstance(into, PackedRows):
        into.read(reader, info, num_paired_heads)
        return
    if num_paired_heads:
        # Rows 2i and 2i + 1 of a head in the file are rows i and i + head_dim / 2 here.
        halves = (num_paired_heads, 2, config.head_dim // 2)
        into = into.reshape(*halves, *into.shape[1:]).swapaxes(1, 2)
    reader.read(info, into)


def _run_in_threads(work: Callable[[], None], num_threads: int, stop: Callable[[], None]) -> None:
    """Run ``work`` in several threads, each of which computes alone."""
    with ThreadPoolExecutor(num_threads, thread_name_prefix="fastserve-load") as pool:
        try:
            for done in as_completed([pool.submit(work) for _ in range(num_threads)]):
                done.result()
        finally:
            stop()  # After an error or Ctrl-C the others end with their current tensor.


def _shape_only(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """One number that stands for all: an array of that shape and of no size."""
    return np.broadcast_to(np.empty((), dtype), shape)


class _Allocation:
    """Empty weights, and for each tensor of a checkpoint where it goes.

    ``empty`` makes an array of a shape and a dtype, as ``np.empty`` does.
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: DType,
        packing: Packing,
        has_divisors: bool,
        empty: Callable[[tuple[int, ...], np.dtype[Any]], Array],
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.packing = packing
        self._empty = empty
        self.parts: list[_Part] = []
        hidden, vocab = config.hidden_size, config.vocab_size
        embedding = self._matrix("embedding.weight", vocab, hidden)
        tied = config.tied_embeddings
        self.weights = DecoderWeights(
            dtype=dtype,
            embedding=embedding,
            layers=[self._layer(f"layers.{index}.") for index in range(config.num_layers)],
            norm=self._whole("norm.weight", hidden),
            lm_head=embedding if tied else self._matrix("lm_head.weight", vocab, hidden),
            rope_divisors=None,
        )
        if has_divisors:
            divisors = cast(
                "NDArray[np.float32]", empty((config.head_dim // 2,), np.dtype(np.float32))
            )
            self.parts.append(_Part(_ROPE_DIVISORS, divisors))
            self.weights.rope_divisors = divisors

    def _layer(self, at: str) -> LayerWeights:
        config = self.config
        hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
        heads = {"q": config.q_size, "k": config.kv_size, "v": config.kv_size}
        halves = {"gate": inner, "up": inner}
        whole, matrix = self._whole, self._matrix
        fused, stacked = self._fused, self._stacked
        return LayerWeights(
            attention_norm=whole(f"{at}attention_norm.weight", hidden),
            qkv=stacked(at, heads, hidden),
            qkv_bias=fused(at, heads) if config.qkv_bias else None,
            q_norm=whole(f"{at}q_norm.weight", head) if config.qk_norm else None,
            k_norm=whole(f"{at}k_norm.weight", head) if config.qk_norm else None,
            output=matrix(f"{at}output.weight", hidden, config.q_size),
            output_bias=whole(f"{at}output.bias", hidden) if config.output_bias else None,
            mlp_norm=whole(f"{at}mlp_norm.weight", hidden),
            gate_up=stacked(at, halves, hidden),
            gate_up_bias=fused(at, halves) if config.mlp_bias else None,
            down=matrix(f"{at}down.weight", hidden, inner),
            down_bias=whole(f"{at}down.bias", hidden) if config.mlp_bias else None,
        )

    def _whole(self, name: str, *shape: int) -> Array:
        array = self._empty(shape, self.dtype.numpy)
        self.parts.append(_Part(name, array))
        return array

    def _matrix(self, name: str, num_rows: int, num_cols: int) -> PackedMatrix:
        return PackedMatrix([self._packed(name, num_rows, num_cols)])

    def _packed(self, name: str, num_rows: int, num_cols: int, num_heads: int = 0) -> PackedRows:
        dtype = None if self.packing is Packing.AS_STORED else self.dtype
        quantized = None
        if self.packing is Packing.INT8:
            quantized = Quantized("int8", "I8")
        elif self.packing is Packing.INT4:
            quantized = Quantized("int4", "Q8_0" if name in _OF_VOCABULARY else "Q4_1")
        rows = PackedRows((num_rows, num_cols), dtype, quantized)
        self.parts.append(_Part(name, rows, num_heads))
        return rows

    def _stacked(self, at: str, sizes: dict[str, int], num_cols: int) -> PackedMatrix:
        num_heads = {"q": self.config.num_q_heads, "k": self.config.num_kv_heads}
        return PackedMatrix(
            [
                self._packed(f"{at}{kind}.weight", rows, num_cols, num_heads.get(kind, 0))
                for kind, rows in sizes.items()
            ]
        )

    def _fused(self, at: str, sizes: dict[str, int]) -> Array:
        """Biases of a fused projection."""
        array = self._empty((sum(sizes.values()),), self.dtype.numpy)
        num_heads = {"q": self.config.num_q_heads, "k": self.config.num_kv_heads}
        first = 0
        for kind, count in sizes.items():
            rows = array[first : first + count]
            self.parts.append(_Part(f"{at}{kind}.bias", rows, num_heads.get(kind, 0)))
            first += count
        return array


def _check(checkpoint: Checkpoint, config: DecoderConfig, parts: list[_Part]) -> None:
    missing = [checkpoint.spelled(part.name) for part in parts if part.name not in checkpoint]
    if missing:
        raise ModelError(
            f"{checkpoint.origin}: {len(missing)} tensors are missing: {_some(missing)}; the file "
            "is incomplete or belongs to another architecture"
        )
    for part in parts:
        found, want = checkpoint[part.name].shape, tuple(part.into.shape)
        if found != want:
            raise ModelError(
                f"{checkpoint[part.name].path}: tensor {checkpoint.spelled(part.name)} has shape "
                f"{list(found)}, the architecture wants {list(want)}"
            )
    used = [part.name for part in parts]
    if config.tied_embeddings:
        used.append("lm_head.weight")
    unused = [name for name in checkpoint.others(used) if not name.endswith(_IGNORED)]
    if unused:
        raise ModelError(
            f"{checkpoint.origin}: {len(unused)} tensors have no place in a {config.family} model: "
            f"{_some(unused)}; running without them would give wrong results"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown}, …"
