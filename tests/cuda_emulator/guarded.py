"""Copies of arrays that touch a page which nobody may touch, at their end or at their start."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

Side = Literal["end", "start"]

_PAGE: Final = mmap.PAGESIZE
_VECTOR: Final = 16
_CANARY: Final = 0xA5
_NO_ACCESS: Final = 0  # PROT_NONE, which the mmap module has no name for.

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Guarded:
    """A copy of an array for the time of a launch.

    Args:
        array: Contiguous. One that is not writeable may not be written by the kernel either.
        side: Which end touches the page: rounded up to 16 bytes at the end, exactly at the start.

    Attributes:
        address: Of the first element.
    """

    def __init__(self, array: NDArray[Any], side: Side) -> None:
        self._array = array
        self._num_bytes = array.nbytes
        self._room = -(-max(array.nbytes, 1) // _VECTOR) * _VECTOR
        pages = -(-self._room // _PAGE) * _PAGE
        self._length = pages + 2 * _PAGE
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        base = _libc.mmap(None, self._length, protection, kind, -1, 0)
        if base in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(f"no address space for an argument of {array.nbytes} bytes")
        self._base: int = base
        first = base + _PAGE
        self.address = first if side == "start" else first + pages - self._room
        ctypes.memset(first, _CANARY, pages)
        ctypes.memmove(self.address, array.ctypes.data, array.nbytes)
        _libc.mprotect(base, _PAGE, _NO_ACCESS)
        _libc.mprotect(first + pages, _PAGE, _NO_ACCESS)
        if not array.flags.writeable:
            _libc.mprotect(first, pages, mmap.PROT_READ)
        self._slack = (first, first + pages)

    def finish(self) -> int:
        """Copy the contents back. How many bytes beside them were written."""
        first, end = self._slack
        before = self.address - first
        behind = end - self.address - self._num_bytes
        beside = ctypes.string_at(first, before) + ctypes.string_at(
            self.address + self._num_bytes, behind
        )
        if self._array.flags.writeable:
            ctypes.memmove(self._array.ctypes.data, self.address, self._num_bytes)
        return int(np.count_nonzero(np.frombuffer(beside, np.uint8) != _CANARY))

    def free(self) -> None:
        """Give the memory back."""
        _libc.munmap(self._base, self._length)
