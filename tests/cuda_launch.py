"""Kernels of ``cuda/`` in the emulator, with arguments by name that are held to their contracts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from cuda_emulator import EmulatedModule
from cuda_emulator.module import Dimensions
from fastserve.kernels.contract import Contract

CUDA = Path(__file__).resolve().parent.parent / "cuda"


class EmulatedKernel:
    """One kernel with one value for each of its macros."""

    def __init__(self, name: str, macros: dict[str, str], mode: str) -> None:
        source = CUDA / f"{name}.cu"
        self._macros = macros
        self._contract = Contract.read(source)
        self._module = EmulatedModule(source, macros, mode)

    def launch(
        self, grid: Dimensions, block: Dimensions, arguments: dict[str, Any], **how: Any
    ) -> None:
        """Check the arguments and run; ``how`` is :meth:`EmulatedModule.launch`'s."""
        bound = self._contract.bind(self._macros, arguments)
        self._module.launch(self._contract.kernel, grid, block, bound, **how)


@cache
def kernel(name: str, *, mode: str = "plain", **macros: Any) -> EmulatedKernel:
    """A kernel, compiled once."""
    return EmulatedKernel(name, {macro: str(value) for macro, value in macros.items()}, mode)
