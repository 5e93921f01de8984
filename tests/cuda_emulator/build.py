"""A ``.cu`` file becomes a shared library of the host's compiler.

The text is compiled as it is, but for declarations of shared memory, which C++ cannot say: each
becomes a pointer or a reference to memory that the runtime owns and fills with NaN.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

RUNTIME: Final = Path(__file__).resolve().parent / "runtime"
REPOSITORY: Final = Path(__file__).resolve().parents[2]
CUDA: Final = REPOSITORY / "cuda"
CACHE: Final = REPOSITORY / "target" / "cuda_emulator"

MODES: Final[Mapping[str, tuple[str, ...]]] = {
    "plain": ("-O2",),
    "ub": (
        "-O1",
        "-g",
        "-fsanitize=alignment,bounds,shift,signed-integer-overflow",
        "-fsanitize-undefined-trap-on-error",
    ),
    "asan": ("-O1", "-g", "-fsanitize=address", "-fno-omit-frame-pointer"),
    "tsan": ("-O1", "-g", "-fsanitize=thread"),
}
"""What a library is built for, and the compiler's options for it."""

_ALIGN = r"(?:(?:__align__|alignas)\s*\(\s*\d+\s*\)\s*)?"
_DYNAMIC: Final = re.compile(rf"extern\s+__shared__\s+{_ALIGN}([\w:\s]+?)\s*(\w+)\s*\[\s*\]\s*;")
_STATIC: Final = re.compile(
    rf"(?<!extern )__shared__\s+{_ALIGN}([\w:]+(?:\s*<[^;<>]*>)?)\s+(\w+)((?:\s*\[[^\]]+\])*)\s*;"
)
_KERNEL: Final = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+'
    r"(?:__launch_bounds__\(([^(),]+)(?:,[^()]*)?\)\s+)?(\w+)\s*\("
)
_MOST_THREADS: Final = "1024"


class BuildError(RuntimeError):
    """The host's compiler refuses a file, or there is none."""


def kernels_of(text: str) -> dict[str, str]:
    """The kernels in a file: name to the most threads of a block, as it is written."""
    return {name: bound or _MOST_THREADS for bound, name in _KERNEL.findall(text)}


def build(source: Path, macros: Mapping[str, str], mode: str = "plain") -> Path:
    """Compile ``source``, unless that was done before.

    Args:
        source: A ``.cu`` file.
        macros: Definitions, name to value.
        mode: One of :data:`MODES`.

    Raises:
        BuildError: It cannot be compiled.
    """
    compiler = _compiler()
    unit = _translate(source)
    options = (
        *("-std=c++20", "-x", "c++", "-shared", "-fPIC", "-fvisibility=hidden"),
        "-fno-gnu-unique",  # The runtime's state is each library's own.
        # A large frame meets the page below the stack, not what lies behind it.
        "-fstack-clash-protection",
        "-march=x86-64-v3",
        *("-fno-strict-aliasing", "-fno-math-errno", "-ffp-contract=off", "-Wno-unknown-pragmas"),
        *MODES[mode],
        *(f"-D{name}={value}" for name, value in macros.items()),
        f"-I{RUNTIME}",
        f"-I{CUDA}",
    )
    headers = sorted([*RUNTIME.glob("*.h"), *CUDA.glob("*.cuh")])
    parts = [unit, compiler, *options, *(header.read_text() for header in headers)]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    library = CACHE / f"{source.stem}-{mode}-{digest}.so"
    if not library.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            path, out = Path(folder) / "unit.cpp", Path(folder) / "unit.so"
            path.write_text(unit)
            command = [compiler, *options, str(path), "-o", str(out)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise BuildError(f"{source.name} with {dict(macros)}: {done.stderr[:4000]}")
            out.replace(library)
    return library


@functools.cache
def _compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        raise BuildError("no C++ compiler; `apt install g++` or set CXX")
    return found


def _translate(source: Path) -> str:
    text = source.read_text()
    kernels = kernels_of(text)
    if not kernels:
        raise BuildError(f'{source.name}: no `extern "C" __global__ void` in it')
    text = _DYNAMIC.sub(
        r"\1* const \2 = reinterpret_cast<\1*>(::emulator::dynamic_shared());", text
    )
    text = _STATIC.sub(r"static \1(&\2)\3 = ::emulator::shared_variable<\1\3>();", text)
    if "__shared__" in re.sub(r"//.*", "", text):
        raise BuildError(f"{source.name}: a declaration of shared memory is not understood")
    exports = "".join(f"EMULATOR_EXPORT({name}, {bound})\n" for name, bound in kernels.items())
    return (
        f'#include "emulator.h"\n#line 1 "{source.name}"\n{text}\n'
        f'#line 1 "exports"\nEMULATOR_EXPORT_ERROR\n{exports}'
    )
