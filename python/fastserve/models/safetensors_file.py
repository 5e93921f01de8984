"""The headers of safetensors files, single or sharded.

A file is the header's length (8 bytes), a JSON object name → dtype, shape, byte range, and data.
Only the header is read here. The data then goes straight from the file into the fused weights, as
it does for GGUF, so that memory is the weights and a buffer; the ``safetensors`` library would map
the whole file, and every page of it that was touched counts as this process's memory. Pickled
checkpoints are not read at all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from fastserve.errors import ModelError
from fastserve.models.hf_config import read_json
from fastserve.models.tensors import Format, TensorInfo, check_extent, find_format

_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
_MOST_HEADER_BYTES: Final = 100_000_000
_ITEM_BYTES: Final = {"F64": 8, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def tensors_in_folder(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of the checkpoint in ``folder``.

    Raises:
        ModelError: There is no safetensors checkpoint, or a file is missing, truncated or corrupt.
    """
    index = folder / _INDEX
    if not index.exists():
        return _tensors_in_file(_single_file(folder))
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ModelError(f"{index}: weight_map is missing or empty")
    tensors: dict[str, TensorInfo] = {}
    for shard in sorted({str(name) for name in places.values()}):
        path = folder / shard
        if not path.exists():
            raise ModelError(f"{path}: missing, and {_INDEX} names it; download the folder again")
        tensors |= _tensors_in_file(path)
    lost = sorted(places.keys() - tensors.keys())
    if lost:
        raise ModelError(
            f"{folder}: {_INDEX} names {len(lost)} tensors that no file has, {lost[0]} among them"
        )
    return tensors


def _single_file(folder: Path) -> Path:
    if (folder / _SINGLE).exists():
        return folder / _SINGLE
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelError(f"{folder}: {len(found)} safetensors files and no {_INDEX}")
    pickled = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*"))
    if pickled:
        raise ModelError(
            f"{folder}: {pickled[0].name} is a pickle, which can run any code and is not read; "
            "convert the model to safetensors"
        )
    raise ModelError(f"{folder}: no {_SINGLE} and no {_INDEX}")


def _tensors_in_file(path: Path) -> dict[str, TensorInfo]:
    header, data_start, num_file_bytes = _read_header(path)
    header.pop("__metadata__", None)
    tensors: dict[str, TensorInfo] = {}
    for name, entry in header.items():
        try:
            shape = tuple(int(size) for size in entry["shape"])
            begin, end = (int(offset) for offset in entry["data_offsets"])
            info = TensorInfo(name, shape, _format(entry["dtype"]), path, data_start + begin)
        except (KeyError, TypeError, ValueError):
            raise ModelError(f"{path}: corrupt: the header says of {name}: {entry!r:.80}") from None
        if end - begin != info.num_bytes or begin < 0 or any(size < 0 for size in shape):
            raise ModelError(
                f"{path}: corrupt: tensor {name} of shape {list(shape)} in {info.format.name} "
                f"takes {info.num_bytes} bytes, the header gives it {end - begin}"
            )
        check_extent(info, num_file_bytes)
        tensors[name] = info
    return tensors


def _format(dtype: str) -> Format:
    if dtype in ("F32", "F16", "BF16"):
        common = find_format(dtype)
        assert common is not None
        return common
    return Format(dtype, 1, _ITEM_BYTES.get(dtype, 1))  # Refused where it is to be read.


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    try:
        with path.open("rb") as file:
            num_file_bytes = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > _MOST_HEADER_BYTES:
                raise ModelError(f"{path}: not a safetensors file, or a corrupt one")
            if 8 + length > num_file_bytes:
                raise ModelError(
                    f"{path}: truncated: the header ends at byte {8 + length}, the file has "
                    f"{num_file_bytes}; download or copy it again"
                )
            header = json.loads(file.read(length))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path}: corrupt: the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path}: corrupt: the header is not a JSON object")
    return header, 8 + length, num_file_bytes
