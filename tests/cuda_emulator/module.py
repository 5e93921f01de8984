"""Launches of kernels that :mod:`cuda_emulator.build` compiled."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cuda_emulator.build import build
from cuda_emulator.guarded import Guarded, Side

Argument = NDArray[Any] | np.generic | None
Dimensions = int | tuple[int, ...]

MAX_SHARED_BYTES: Final = 227 << 10
"""Dynamic shared memory of a block on sm_90."""

_MOST_PARAMETERS: Final = 64


class KernelError(RuntimeError):
    """A kernel did what no kernel may do. The message says which thread and what."""


class EmulatedModule:
    """The kernels of one ``.cu`` file with one set of macros.

    Args:
        source: The file.
        macros: Definitions, name to value.
        mode: One of :data:`cuda_emulator.build.MODES`.
    """

    def __init__(self, source: Path, macros: Mapping[str, str], mode: str = "plain") -> None:
        self._library = ctypes.CDLL(str(build(source, macros, mode)))
        self._library.emulator_error.restype = ctypes.c_char_p
        # The address sanitizer knows the bounds itself.
        self._is_guarded = mode != "asan"

    def launch(
        self,
        name: str,
        grid: Dimensions,
        block: Dimensions,
        arguments: Sequence[Argument],
        *,
        shared_bytes: int = 0,
        order: int = 0,
        guard: Side = "end",
    ) -> None:
        """Run a kernel to its end.

        Args:
            name: The kernel.
            grid: Blocks.
            block: Threads of a block.
            arguments: Arrays (passed by address; one that is not writeable is read-only memory),
                numpy scalars of the parameter's own type, and ``None`` for a null pointer.
            shared_bytes: Dynamic shared memory.
            order: Which of the threads that are ready goes on: 0 the first, 1 the last, above that
                a seed.
            guard: Which end of every array touches forbidden memory.

        Raises:
            KernelError: The kernel is wrong.
            TypeError: The arguments are not those of the kernel.
        """
        dimensions = [_three(grid), _three(block)]
        if 0 in dimensions[0]:
            raise KernelError(f"{name}: grid {dimensions[0]} has no blocks; do not launch it")
        if shared_bytes > MAX_SHARED_BYTES:
            raise KernelError(
                f"{name}: {shared_bytes} bytes of shared memory, {MAX_SHARED_BYTES} at most"
            )
        sizes = (ctypes.c_int * _MOST_PARAMETERS)()
        count = getattr(self._library, f"emulator_parameters_{name}")(sizes)
        if count != len(arguments):
            raise TypeError(f"{name} takes {count} arguments, not {len(arguments)}")
        guards: list[Guarded] = []
        try:
            cells = [self._cell(argument, guard, guards) for argument in arguments]
            for index, cell in enumerate(cells):
                if ctypes.sizeof(cell) != sizes[index]:
                    raise TypeError(
                        f"argument {index} of {name} has {ctypes.sizeof(cell)} bytes, its "
                        f"parameter {sizes[index]}"
                    )
            pointers = (ctypes.c_void_p * count)(*(ctypes.addressof(cell) for cell in cells))
            grid_words, block_words = ((ctypes.c_uint * 3)(*three) for three in dimensions)
            failed = getattr(self._library, f"emulator_launch_{name}")(
                grid_words, block_words, ctypes.c_size_t(shared_bytes), pointers, order
            )
            if failed:
                raise KernelError(f"{name}: {self._library.emulator_error().decode()}")
            written = sum(guarded.finish() for guarded in guards)
            if written:
                raise KernelError(f"{name}: {written} bytes beside an array were written")
        finally:
            for guarded in guards:
                guarded.free()

    def _cell(self, argument: Argument, side: Side, guards: list[Guarded]) -> Any:
        if argument is None:
            return ctypes.c_uint64(0)
        if isinstance(argument, np.ndarray):
            if not argument.flags.c_contiguous:
                raise TypeError("an array argument is not contiguous")
            if not self._is_guarded:
                return ctypes.c_uint64(argument.ctypes.data)
            guards.append(Guarded(argument, side))
            return ctypes.c_uint64(guards[-1].address)
        if not isinstance(argument, np.generic):
            raise TypeError(f"{argument!r}: want an array, a numpy scalar or None")
        return (ctypes.c_char * argument.nbytes).from_buffer_copy(argument.tobytes())


def _three(dimensions: Dimensions) -> tuple[int, int, int]:
    given = (dimensions,) if isinstance(dimensions, int) else tuple(dimensions)
    x, y, z = (*given, 1, 1, 1)[:3]
    return x, y, z
