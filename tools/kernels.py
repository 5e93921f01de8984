"""Compile the CUDA kernels as a device would load them, and say what each takes.

    make kernels            a cover of the pairs of macros, for sm_80 and sm_90a; two minutes or so
    make kernels ALL=1      everything in cuda/instantiations.toml, for every architecture in it

A line each, and how many there will be on stderr. A kernel that keeps registers in memory makes the
command fail.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from fastserve.errors import KernelError
from fastserve.kernels.instantiations import Instantiation, Instantiations, cover
from fastserve.kernels.nvrtc import Compiler

CUDA = Path(__file__).resolve().parent.parent / "cuda"


@cache
def compiler() -> Compiler:
    """One for all threads."""
    return Compiler()


def compile_one(one: Instantiation, arch: str) -> tuple[str, bool]:
    """A line about it, and whether all is well."""
    try:
        compiled = compiler().compile(CUDA / f"{one.kernel}.cu", dict(one.macros), arch)
    except KernelError as error:
        return f"{arch} {one} does not compile: {error}", False
    takes = compiled.kernels[one.kernel]
    line = (
        f"{arch} {one} regs={takes.num_registers} smem={takes.shared_bytes} "
        f"spill={takes.spilled_bytes}"
    )
    return line, takes.spilled_bytes == 0


def main() -> None:
    """Compile, print, and say how many were wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="all kernels and architectures")
    given = parser.parse_args()
    listed = Instantiations.read(CUDA / "instantiations.toml")
    chosen = list(listed.all) if given.all else cover(listed.all)
    try:
        known = compiler().architectures()
    except KernelError as error:
        raise SystemExit(str(error)) from None
    wanted = listed.architectures if given.all else listed.cover_architectures
    architectures = [arch for arch in wanted if arch.rstrip("a") in known]
    for arch in sorted(set(wanted) - set(architectures)):
        print(f"{arch}: NVRTC {compiler().version} does not know it", file=sys.stderr)
    jobs = [(one, arch) for arch in architectures for one in chosen]
    print(f"{len(jobs)} kernels to compile", file=sys.stderr)
    wrong = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for line, is_well in pool.map(compile_one, *zip(*jobs, strict=True)):
            print(line, flush=True)
            wrong += not is_well
    print(f"{len(jobs)} kernels for {', '.join(architectures)}: {wrong} wrong")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
