"""The header of a GGUF file: metadata and where the tensors are.

The ``gguf`` package can read this too, but makes several numpy arrays for each of the hundred
thousand strings of a vocabulary: three seconds for a file of 98 MB, where the rest of a command's
start takes two. Reading it straight through takes 50 milliseconds. Tests compare the two.

::

    magic "GGUF", version, number of tensors, number of keys
    key, type, value                  once a key; arrays nest
    name, dimensions, type, offset    once a tensor; dimensions innermost first
    padding to general.alignment, then the data that offsets count from
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from fastserve.errors import ModelError
from fastserve.models.tensors import TensorInfo, check_extent, find_ggml_format

_SCALARS: Final = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    10: "Q",
    11: "q",
    12: "d",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MOST_NESTED: Final = 8
"""Arrays in arrays. Real files have one in another at most."""
_VERSIONS = (2, 3)
_MOST_KEYS = 1 << 16
_MOST_TENSORS = 1 << 20


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed header.

    Attributes:
        path: The file.
        metadata: Key → number, bool, str, list of str, or numpy array.
        tensors: Name → where it is.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """A metadata value of a known type.

        Raises:
            ModelError: The key is missing and has no default, or holds another type.
        """
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelError(f"{self.path}: metadata has no {key}; the file cannot be used without")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelError(
                f"{self.path}: metadata {key} is {_show(value)}, want a value of type "
                f"{kind.__name__}"
            )
        return value


def read_gguf(path: Path) -> GgufFile:
    """Read the header of ``path``.

    Raises:
        ModelError: It is no GGUF file, is truncated or corrupt, or of a kind that is not read.
    """
    try:
        with path.open("rb") as file:
            num_bytes = file.seek(0, 2)
            if num_bytes < 24:
                raise ModelError(f"{path}: {num_bytes} bytes are too few for a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, data)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None


def _parse(path: Path, data: mmap.mmap) -> GgufFile:
    if data[:4] != b"GGUF":
        raise ModelError(f"{path}: not a GGUF file (it starts with {data[:4]!r}, want b'GGUF')")
    cursor = _Cursor(path, data)
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        raise ModelError(f"{path}: GGUF version {version}; little-endian 2 and 3 are read")
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    if num_keys > _MOST_KEYS or num_tensors > _MOST_TENSORS:
        raise ModelError(
            f"{path}: corrupt: the header counts {num_tensors} tensors and {num_keys} keys"
        )
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"), key)
    num_parts = metadata.get("split.count", 0)
    if not isinstance(num_parts, int):
        raise ModelError(f"{path}: corrupt: split.count is {_show(num_parts)}")
    if num_parts > 1:
        raise ModelError(
            f"{path}: one of {num_parts} parts; join them with llama-gguf-split --merge"
        )
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
        raise ModelError(f"{path}: corrupt: general.alignment is {_show(alignment)}")
    places = [cursor.tensor() for _ in range(num_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, type_id, offset in places:
        layout = find_ggml_format(type_id)
        if layout is None:
            raise ModelError(f"{path}: tensor {name} has GGUF type {type_id}, which is not read")
        info = TensorInfo(name, shape, layout, path, data_start + offset)
        check_extent(info, len(data))
        tensors[name] = info
    return GgufFile(path, metadata, tensors)


class _Cursor:
    """Reads little-endian values one after the other and notices the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 4

    def _advance(self, num_bytes: int) -> int:
        start = self.position
        self.position = start + num_bytes
        if self.position > len(self.data):
            raise ModelError(
                f"{self.path}: truncated: the header reaches beyond byte {start}, the file has "
                f"{len(self.data)}; download or copy it again"
            )
        return start

    def scalar(self, code: str) -> Any:
        return struct.unpack_from(
            "<" + code, self.data, self._advance(struct.calcsize("<" + code))
        )[0]

    def string(self) -> str:
        num_bytes = self.scalar("Q")
        start = self._advance(num_bytes)
        return self._text(self.data[start : start + num_bytes])

    def value(self, kind: int, key: str, depth: int = 1) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _BOOL:
            return self.scalar("B") != 0
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.scalar("I"), self.scalar("Q"), key, depth)
        raise ModelError(f"{self.path}: corrupt: metadata {key} has type {kind}")

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        num_dimensions = self.scalar("I")
        if num_dimensions > 4:
            raise ModelError(f"{self.path}: corrupt: tensor {name} has {num_dimensions} dimensions")
        innermost_first = [self.scalar("Q") for _ in range(num_dimensions)]
        return name, tuple(reversed(innermost_first)), self.scalar("I"), self.scalar("Q")

    def _array(self, kind: int, count: int, key: str, depth: int) -> Any:
        if kind == _STRING:
            return self._strings(count)
        if kind in _SCALARS or kind == _BOOL:
            layout = np.dtype("?" if kind == _BOOL else "<" + _SCALARS[kind])
            start = self._advance(count * layout.itemsize)
            return np.frombuffer(self.data, layout, count, start).copy()
        if depth > _MOST_NESTED:
            raise ModelError(
                f"{self.path}: corrupt: metadata {key} has arrays nested more than "
                f"{_MOST_NESTED} deep"
            )
        return [self.value(kind, key, depth + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        # The hot loop of start-up: a vocabulary and its merges.
        data, position = self.data, self.position
        length_at = struct.Struct("<Q").unpack_from
        texts: list[bytes] = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + length_at(data, position)[0]
                texts.append(data[start:position])
        except (struct.error, OverflowError, IndexError):
            position = len(data) + 1
        self._advance(position - self.position)
        return [self._text(text) for text in texts]

    def _text(self, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise ModelError(
                f"{self.path}: corrupt: {raw[:40]!r} in the metadata is not UTF-8"
            ) from None


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
