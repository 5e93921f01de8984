"""What a CUDA kernel takes, read from the head of its file, and checked before it is launched.

A ``.cu`` file lists its arguments in order, each with its type and shape::

    // Arguments, in order:
    //   out   SCALAR [num_tokens, size]
    //   x     SCALAR [num_tokens, 2 * size]    gate, then up
    //   size  i32                              a multiple of 16 / sizeof(SCALAR)

That list is the contract: :meth:`Contract.bind` holds arguments to it. A name in a shape is a
macro, a number among the arguments, or a size that has to be the same wherever it stands. What is
said of an argument may begin with its limits: ``null:``, ``at least N``, ``N to M``, ``a multiple
of N``, the last also behind another and a comma. What else is said is for people.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from fastserve.errors import KernelError

__all__ = ["Contract", "Parameter"]

_LIST: Final = re.compile(r"// Arguments, in order:\n((?://   .*\n)+)")
_LINE: Final = re.compile(
    r"//   (\w+)\s+(SCALAR|f32|i32|i64|i32x4)(?:\s+\[([^\]]*)\])?(?:\s+(.*))?$"
)
_ARRAYS: Final = {"f32": ("float32",), "i32": ("int32",), "i64": ("int64",)}
_SCALAR_ARRAYS: Final = {
    "float": ("float32",),
    "__half": ("float16",),
    "__nv_bfloat16": ("bfloat16", "uint16"),  # numpy has no bfloat16.
}
_OF_ARRAYS: Final = ("shape", "dtype", "nbytes")
_ALIGNMENT: Final = 16
_VECTOR_BYTES: Final = 16
_LOWEST: Final = re.compile(r"at least (\d+)\b")
_RANGE: Final = re.compile(r"(\d+) to (\w+)\b")
_MULTIPLE: Final = re.compile(r"(?:[^,:]*, )?a multiple of (?:(16) / sizeof\(SCALAR\)|(\d+))")
_SCALAR_BYTES: Final = {"float": 4, "__half": 2, "__nv_bfloat16": 2}
_NUMBERS: Final[dict[str, Any]] = {"f32": np.float32, "i32": np.int32, "i64": np.int64}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of a kernel.

    Attributes:
        name: In the signature.
        type: ``SCALAR``, ``f32``, ``i32``, ``i64``, or ``i32x4``: 16 bytes of any type.
        shape: Sizes as written; ``None`` for a number.
        about: What is said of it, limits first.
    """

    name: str
    type: str
    shape: tuple[str, ...] | None
    about: str

    @property
    def may_be_null(self) -> bool:
        """Whether there may be none."""
        return self.about.startswith("null:")


@dataclass(frozen=True, slots=True)
class Contract:
    """The arguments of a kernel.

    Attributes:
        kernel: Its name, which is its file's.
        parameters: In order.
    """

    kernel: str
    parameters: tuple[Parameter, ...]

    @classmethod
    def read(cls, source: Path) -> Contract:
        """Read the head of a file.

        Raises:
            ValueError: It lists no arguments, or a line is not understood.
        """
        listed = _LIST.search(source.read_text())
        if listed is None:
            raise ValueError(f"{source.name} lists no arguments")
        return cls(source.stem, tuple(_parameter(source, line) for line in listed[1].splitlines()))

    def bind(self, macros: Mapping[str, str], arguments: Mapping[str, Any]) -> list[Any]:
        """Arguments in order, each of them what the kernel takes; numbers become numpy's.

        Args:
            macros: What the kernel was compiled with.
            arguments: By name: arrays (of torch, numpy or CuPy), numbers, ``None`` for none.

        Raises:
            KernelError: One is missing or superfluous, or has another type, shape, layout or
                alignment; names it.
        """
        macros = {name: str(value) for name, value in macros.items()}
        self._check_macros(macros)
        names = [parameter.name for parameter in self.parameters]
        if wrong := [name for name in names if name not in arguments]:
            raise KernelError(f"{self.kernel}: {', '.join(wrong)} missing")
        if wrong := [name for name in arguments if name not in names]:
            raise KernelError(f"{self.kernel}: {', '.join(wrong)}: no argument of it")
        sizes = {name: int(value) for name, value in macros.items() if value.isdigit()}
        for parameter in self.parameters:
            if parameter.shape is None:
                self._check_number(parameter, arguments[parameter.name])
                self._check_limits(parameter, arguments[parameter.name], macros)
                if parameter.type != "f32":
                    sizes[parameter.name] = int(arguments[parameter.name])
        arrays = [
            (parameter, arguments[parameter.name])
            for parameter in self.parameters
            if parameter.shape is not None
        ]
        for parameter, array in arrays:
            self._check_array(parameter, array, macros)
        # Plain names first, then what is reckoned with them.
        for is_plain in (True, False):
            for parameter, array in arrays:
                if array is not None and parameter.type != "i32x4":
                    self._check_shape(parameter, tuple(array.shape), sizes, is_plain)
        for parameter, array in arrays:
            if parameter.type == "i32x4":
                self._check_bytes(parameter, array, sizes)
        return [
            arguments[parameter.name]
            if parameter.shape is not None
            else _NUMBERS[parameter.type](arguments[parameter.name])
            for parameter in self.parameters
        ]

    def _check_macros(self, macros: Mapping[str, str]) -> None:
        written = [size for parameter in self.parameters for size in parameter.shape or ()]
        wanted = {name for size in written for name in _names(size) if name.isupper()}
        if any(parameter.type == "SCALAR" for parameter in self.parameters):
            wanted.add("SCALAR")
        if lacking := sorted(wanted - macros.keys()):
            raise KernelError(f"{self.kernel}: compiled without {', '.join(lacking)}")
        if "SCALAR" in wanted and macros["SCALAR"] not in _SCALAR_ARRAYS:
            known = ", ".join(_SCALAR_ARRAYS)
            raise KernelError(f"{self.kernel}: SCALAR is {macros['SCALAR']}: want one of {known}")

    def _check_limits(self, parameter: Parameter, value: Any, macros: Mapping[str, str]) -> None:
        about = parameter.about
        lowest, limits, multiple = (
            pattern.match(about) for pattern in (_LOWEST, _RANGE, _MULTIPLE)
        )
        is_within, wanted = True, about.partition(":")[0]
        if lowest:
            is_within = value >= int(lowest[1])
        elif limits:
            is_within = int(limits[1]) <= value <= int(macros.get(limits[2], limits[2]))
        if multiple:
            step = 16 // _SCALAR_BYTES[macros["SCALAR"]] if multiple[1] else int(multiple[2])
            is_within &= value % step == 0
        if not is_within:
            raise KernelError(f"{self.kernel}: {parameter.name}={value!r}: want {wanted}")

    def _check_number(self, parameter: Parameter, value: Any) -> None:
        where = f"{self.kernel}: {parameter.name}={value!r}"
        if not isinstance(value, int | float | np.integer | np.floating):
            raise KernelError(f"{where}: want a number")
        if not abs(float(value)) <= float(np.finfo(np.float32).max):
            raise KernelError(f"{where}: want a finite number")
        if parameter.type == "f32":
            return
        limits = np.iinfo(_NUMBERS[parameter.type])
        if int(value) != value or not limits.min <= int(value) <= limits.max:
            raise KernelError(f"{where}: want an integer of {limits.bits} bits")

    def _check_array(self, parameter: Parameter, array: Any, macros: Mapping[str, str]) -> None:
        where = f"{self.kernel}: {parameter.name}"
        if array is None:
            if not parameter.may_be_null:
                raise KernelError(f"{where} is None: want an array")
            return
        if isinstance(array, np.generic) or not all(map(partial(hasattr, array), _OF_ARRAYS)):
            raise KernelError(f"{where} is a {type(array).__name__}: want an array")
        if parameter.type != "i32x4":
            wanted = (
                _SCALAR_ARRAYS[macros["SCALAR"]]
                if parameter.type == "SCALAR"
                else _ARRAYS[parameter.type]
            )
            dtype = str(array.dtype).removeprefix("torch.")
            if dtype not in wanted:
                raise KernelError(f"{where} is of {dtype}: want {' or '.join(wanted)}")
        if not _is_contiguous(array):
            raise KernelError(f"{where} is not contiguous; call .contiguous() where it is made")
        if address := _address(array) % _ALIGNMENT:
            raise KernelError(
                f"{where} starts {address} bytes past a multiple of {_ALIGNMENT}: want none"
            )

    def _check_shape(
        self, parameter: Parameter, shape: tuple[int, ...], sizes: dict[str, int], is_plain: bool
    ) -> None:
        assert parameter.shape is not None
        where = f"{self.kernel}: {parameter.name} has shape {list(shape)}"
        if len(shape) != len(parameter.shape):
            raise KernelError(f"{where}: want [{', '.join(parameter.shape)}]")
        for size, written in zip(shape, parameter.shape, strict=True):
            if written.isidentifier() != is_plain:
                continue
            unknown = [name for name in _names(written) if name not in sizes]
            if len(unknown) == 1:
                sizes[unknown[0]] = _solve(written, unknown[0], size, sizes)
            if unknown[1:] or _value(written, sizes) != size:
                known = {name: sizes[name] for name in _names(written) if name in sizes}
                raise KernelError(f"{where}: want [{', '.join(parameter.shape)}] with {known}")

    def _check_bytes(self, parameter: Parameter, array: Any, sizes: Mapping[str, int]) -> None:
        """Vectors of any type: as many as all known sizes multiply to, or a multiple of that."""
        assert parameter.shape is not None
        known = {name: sizes[name] for name in parameter.shape if name in sizes}
        num_bytes = math.prod(known.values()) * _VECTOR_BYTES
        is_whole = num_bytes > 0 and array.nbytes % num_bytes == 0
        if not is_whole or (len(known) == len(parameter.shape) and array.nbytes != num_bytes):
            raise KernelError(
                f"{self.kernel}: {parameter.name} has {array.nbytes} bytes: want "
                f"[{', '.join(parameter.shape)}] of {_VECTOR_BYTES} bytes with {known}"
            )


def _parameter(source: Path, line: str) -> Parameter:
    found = _LINE.match(line)
    if found is None:
        raise ValueError(f"{source.name}: {line!r} is no argument")
    name, kind, shape, about = found.groups()
    sizes = None if shape is None else tuple(size.strip() for size in shape.split(","))
    return Parameter(name, kind, sizes, about or "")


def _names(written: str) -> list[str]:
    return [node.id for node in ast.walk(ast.parse(written)) if isinstance(node, ast.Name)]


def _value(written: str, sizes: Mapping[str, int]) -> int:
    """A sum of products of sizes."""

    def of(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            left, right = of(node.left), of(node.right)
            return left * right if isinstance(node.op, ast.Mult) else left + right
        if isinstance(node, ast.Name):
            return sizes[node.id]
        assert isinstance(node, ast.Constant)
        return int(node.value)  # type: ignore[arg-type]  # a digit, by the list's grammar

    return of(ast.parse(written, mode="eval").body)


def _solve(written: str, name: str, size: int, sizes: Mapping[str, int]) -> int:
    """The one unknown size of a linear term, rounded down."""
    zero = _value(written, {**sizes, name: 0})
    slope = _value(written, {**sizes, name: 1}) - zero
    return (size - zero) // slope


def _is_contiguous(array: Any) -> bool:
    if hasattr(array, "is_contiguous"):
        return bool(array.is_contiguous())
    return bool(array.flags.c_contiguous)


def _address(array: Any) -> int:
    if hasattr(array, "data_ptr"):
        return int(array.data_ptr())
    if hasattr(array, "ctypes"):
        return int(array.ctypes.data)
    return int(array.data.ptr)
