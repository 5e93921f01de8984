"""Which kernels there are with which macros: ``cuda/instantiations.toml``."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Instantiation", "Instantiations", "cover"]

_SHORT = {"float": "f32", "__half": "f16", "__nv_bfloat16": "bf16"}
_PREFIX = {"HEAD_DIM": "hd", "BLOCK_SIZE": "bs"}


@dataclass(frozen=True, slots=True)
class Instantiation:
    """One kernel with one value for each of its macros.

    Attributes:
        kernel: Its name, which is its file's.
        macros: Name and value, in the order of the list.
    """

    kernel: str
    macros: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        values = (
            f"{_PREFIX.get(name, '')}{_SHORT.get(value, value.lower())}"
            for name, value in sorted(self.macros, key=lambda macro: macro[0] == "SCALAR")
        )
        return " ".join((self.kernel, *values))


@dataclass(frozen=True, slots=True)
class Instantiations:
    """The list.

    Attributes:
        architectures: What all are compiled for.
        cover_architectures: What a cover is compiled for.
        all: Every instantiation.
    """

    architectures: tuple[str, ...]
    cover_architectures: tuple[str, ...]
    all: tuple[Instantiation, ...]

    @classmethod
    def read(cls, path: Path) -> Instantiations:
        """Read the list from its file."""
        listed = tomllib.loads(path.read_text())
        architectures = tuple(listed.pop("architectures"))
        cover_architectures = tuple(listed.pop("cover"))
        every = [
            Instantiation(kernel, tuple(zip(macros, map(str, values), strict=True)))
            for kernel, macros in listed.items()
            for values in itertools.product(*macros.values())
        ]
        return cls(architectures, cover_architectures, tuple(every))


def cover(instantiations: Iterable[Instantiation]) -> list[Instantiation]:
    """Some of them, among which each kernel has every pair of values of two of its macros.

    The first that has most pairs not yet seen is taken, until none has one: a greedy cover.
    """
    chosen: list[Instantiation] = []
    by_kernel: dict[str, list[Instantiation]] = {}
    for one in instantiations:
        by_kernel.setdefault(one.kernel, []).append(one)
    for candidates in by_kernel.values():
        missing = set().union(*map(_pairs, candidates))
        while missing:
            best = max(candidates, key=lambda one: len(_pairs(one) & missing))
            chosen.append(best)
            missing -= _pairs(best)
    return chosen


def _pairs(one: Instantiation) -> set[frozenset[tuple[str, str]]]:
    """Pairs of its macros; of fewer than two macros, what there is."""
    if len(one.macros) < 2:
        return {frozenset(one.macros)}
    return {frozenset(pair) for pair in itertools.combinations(one.macros, 2)}
