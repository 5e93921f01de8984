"""The threads that the CPU's kernels run on."""

from __future__ import annotations

import os
from typing import Final

from fastserve import host
from fastserve._core import cpu
from fastserve.errors import ConfigError

__all__ = ["ISA_VARIABLE", "make_pool", "multiplies_bfloat16"]

ISA_VARIABLE: Final = "FASTSERVE_CPU_ISA"
"""Environment variable that overrides the instruction set that is found."""


def make_pool(num_threads: int | None = None, isa: str | None = None) -> cpu.Pool:
    """A pool of threads. Idle ones sleep; results do not depend on how many there are.

    Args:
        num_threads: Threads that compute, the caller's own included. ``None``: one for each core
            that may be used.
        isa: Instruction set: one of ``cpu.available_isas()``. ``None``: what
            ``FASTSERVE_CPU_ISA`` says, otherwise the best of this machine.

    Raises:
        ConfigError: ``FASTSERVE_CPU_ISA`` names an instruction set that this machine lacks.
        ValueError: `isa` does, or there are more than 1024 threads.
    """
    if isa is None and (isa := os.environ.get(ISA_VARIABLE) or None) is not None:
        known = cpu.available_isas()
        if isa not in known:
            has = f"this machine has {', '.join(known)}; choose one of them or unset it"
            raise ConfigError("the environment", [f"{ISA_VARIABLE} is {isa!r}: {has}"])
    return cpu.Pool(num_threads or host.cpus().num_usable, isa)


def multiplies_bfloat16(pool: cpu.Pool) -> bool:
    """Whether its instruction set has products of bfloat16."""
    return pool.isa.endswith("bf16")
