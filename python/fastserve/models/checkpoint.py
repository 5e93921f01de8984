"""A checkpoint under one set of names, and the numbers of its tensors.

The decoder calls a layer's query projection ``layers.3.q.weight``. A Hugging Face folder calls it
``model.layers.3.self_attn.q_proj.weight`` and a GGUF file ``blk.3.attn_q.weight``. A
:class:`Checkpoint` translates, so that the loader knows one spelling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastserve.errors import ModelError
from fastserve.models.dequant import decode, is_known
from fastserve.models.gguf_file import GgufFile
from fastserve.models.safetensors_file import tensors_in_folder
from fastserve.models.tensors import Array, DType, TensorInfo

Advance: TypeAlias = Callable[[int], None]

_CHUNK_ELEMENTS: Final = 1 << 20

_HF_TOP: Final = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "lm_head": "lm_head",
    "rope_divisors": "rope_divisors",
}
_HF_LAYER: Final = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_GGUF_TOP: Final = {
    "embedding": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "rope_divisors": "rope_freqs",
}
_GGUF_LAYER: Final = {
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "output": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


class Checkpoint:
    """The tensors of a model by the decoder's names.

    Attributes:
        origin: The folder or file, for messages.
        interleaved: Whether the rows of queries and keys pair neighbours, not halves of a head.
    """

    def __init__(
        self,
        origin: Path,
        tensors: Mapping[str, TensorInfo],
        spell: Callable[[str], str],
        *,
        interleaved: bool,
    ) -> None:
        self.origin = origin
        self.interleaved = interleaved
        self._tensors = tensors
        self._spell = spell

    @classmethod
    def from_folder(cls, folder: Path) -> Checkpoint:
        """A Hugging Face folder with safetensors."""
        return cls(folder, tensors_in_folder(folder), _spell_hf, interleaved=False)

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Checkpoint:
        """A GGUF file."""
        # llama.cpp pairs neighbours where Hugging Face pairs halves; its converter reorders the
        # rows of queries and keys, for this architecture only.
        interleaved = file.metadata.get("general.architecture") in ("llama", "mistral")
        return cls(file.path, file.tensors, _spell_gguf, interleaved=interleaved)

    def __contains__(self, name: str) -> bool:
        return self._spell(name) in self._tensors

    def __getitem__(self, name: str) -> TensorInfo:
        return self._tensors[self._spell(name)]

    def spelled(self, name: str) -> str:
        """The checkpoint's own name for the tensor."""
        return self._spell(name)

    def main_format(self) -> str:
        """Name of the format that most of the bytes are in."""
        num_bytes: dict[str, int] = {}
        for info in self._tensors.values():
            num_bytes[info.format.name] = num_bytes.get(info.format.name, 0) + info.num_bytes
        return max(num_bytes, key=num_bytes.__getitem__, default="none")

    def others(self, names: Iterable[str]) -> list[str]:
        """The checkpoint's own names of all tensors but these."""
        return sorted(self._tensors.keys() - {self._spell(name) for name in names})


def _spell_hf(name: str) -> str:
    *layer, kind, role = name.split(".")
    if layer:
        return f"model.layers.{layer[1]}.{_HF_LAYER[kind]}.{role}"
    return f"{_HF_TOP[kind]}.{role}"


def _spell_gguf(name: str) -> str:
    *layer, kind, role = name.split(".")
    if layer:
        return f"blk.{layer[1]}.{_GGUF_LAYER[kind]}.{role}"
    return f"{_GGUF_TOP[kind]}.{role}"


class TensorReader:
    """Reads tensors one after the other through the same two buffers. A context manager."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._files: dict[Path, FileIO] = {}
        self._stored = _Buffer()
        self._decoded = _Buffer()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def read(self, info: TensorInfo, into: Array) -> None:
        """Fill ``into``, whose elements in their logical order are the tensor's in the file's.

        Raises:
            ModelError: The file ends early or its number format is not known.
        """
        layout, dtype = info.format, DType.of(into)
        if not is_known(layout):
            raise ModelError(
                f"{info.path}: tensor {info.name} has number format {layout.name}, which is not "
                "supported"
            )
        file = self._open(info)
        step = max(1, _CHUNK_ELEMENTS // math.prod(into.shape[1:]))
        for first in range(0, into.shape[0], step):
            target = into[first : first + step]
            num_bytes = target.size // layout.block_elements * layout.block_bytes
            is_contiguous = target.flags.c_contiguous
            if is_contiguous and layout.name == dtype.format_name:
                self._fill(file, info, target.reshape(-1).view(np.uint8))
            else:
                raw = self._stored.bytes(num_bytes)
                self._fill(file, info, raw)
                if is_contiguous:
                    decode(layout, raw, target)
                else:
                    numbers = self._decoded.numbers(target.shape, dtype)
                    decode(layout, raw, numbers)
                    target[...] = numbers
            self._advance(num_bytes)

    def rows(
        self, info: TensorInfo, dtype: DType | None, *, whole: bool = False
    ) -> Iterator[NDArray[np.uint8]]:
        """The rows of a matrix as bytes: uint8 ``[rows, bytes of a row]``, valid until the next.

        Args:
            info: The tensor.
            dtype: What the numbers become; ``None`` leaves them in the file's format.
            whole: All rows at once.

        Raises:
            ModelError: The file ends early or its number format is not known.
        """
        num_rows, num_cols = info.shape
        if dtype is not None and info.format.name != dtype.format_name:
            for first, count in _steps(num_rows, num_cols, whole=whole):
                target = self._decoded.numbers((count, num_cols), dtype)
                self.read(_slice(info, first, count), target)
                yield target.view(np.uint8)
            return
        row_bytes = num_cols // info.format.block_elements * info.format.block_bytes
        file = self._open(info)
        for _, count in _steps(num_rows, num_cols, whole=whole):
            raw = self._stored.bytes(count * row_bytes)
            self._fill(file, info, raw)
            self._advance(raw.size)
            yield raw.reshape(count, row_bytes)

    def _open(self, info: TensorInfo) -> FileIO:
        file = self._files.get(info.path)
        if file is None:
            try:
                file = self._files[info.path] = FileIO(info.path)
            except OSError as error:
                raise ModelError(f"{info.path}: cannot be read: {error.strerror}") from None
        file.seek(info.offset)
        return file

    def _fill(self, file: FileIO, info: TensorInfo, raw: NDArray[np.uint8]) -> None:
        left = raw.data
        while left:
            count = file.readinto(left)
            if not count:
                raise ModelError(
                    f"{info.path}: ends {len(left)} bytes early in tensor {info.name}; it was cut "
                    "while it was read"
                )
            left = left[count:]


def _steps(num_rows: int, num_cols: int, *, whole: bool) -> Iterator[tuple[int, int]]:
    """``(first row, rows)``, each step about as large as a buffer."""
    step = num_rows if whole else max(1, _CHUNK_ELEMENTS // num_cols)
    for first in range(0, num_rows, step):
        yield first, min(step, num_rows - first)


def _slice(info: TensorInfo, first: int, count: int) -> TensorInfo:
    """Rows of a matrix as a tensor of their own."""
    row_bytes = info.num_bytes // info.shape[0]
    shape = (count, *info.shape[1:])
    return replace(info, shape=shape, offset=info.offset + first * row_bytes)


class _Buffer:
    """Memory that is kept from use to use; what it gives is valid until the next."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def bytes(self, size: int) -> NDArray[np.uint8]:
        if self._memory.size < size:
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size]

    def numbers(self, shape: tuple[int, ...], dtype: DType) -> Array:
        return self.bytes(math.prod(shape) * dtype.itemsize).view(dtype.numpy).reshape(shape)
