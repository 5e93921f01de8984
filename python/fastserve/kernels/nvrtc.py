"""Compiles CUDA sources with NVRTC, which needs neither a GPU nor a driver.

What a device will load is compiled by this one call, whether on that device's machine, in CI or by
``make kernels``. Cubins are kept on disk under a key of everything that goes into them.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from fastserve.errors import KernelError

__all__ = ["Compiled", "Compiler", "CubinCache", "Resources"]

_STANDARD: Final = "c++17"
_INSTALL: Final = "pip install cuda-bindings nvidia-cuda-nvrtc nvidia-cuda-runtime"
_ENTRY: Final = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS: Final = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED: Final = re.compile(r"Used (\d+) registers")
_SHARED: Final = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True, slots=True)
class Resources:
    """What a kernel takes, as the assembler says.

    Attributes:
        num_registers: Of a thread.
        shared_bytes: Static shared memory of a block.
        spilled_bytes: Registers that went to memory: stores and loads.
    """

    num_registers: int
    shared_bytes: int
    spilled_bytes: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """A cubin and its kernels.

    Attributes:
        cubin: An ELF file for one architecture.
        kernels: By name.
    """

    cubin: bytes
    kernels: dict[str, Resources]


class Compiler:
    """NVRTC with CUDA's headers.

    Raises:
        KernelError: One of them is not installed; says what to install.
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import nvrtc
            from cuda.pathfinder import find_nvidia_header_directory
        except ImportError as error:
            raise KernelError(
                "CUDA kernels are compiled by NVRTC, which needs no GPU; its packages are not "
                f"installed ({error.name} is missing); install them with: {_INSTALL}"
            ) from None
        self._nvrtc: ModuleType = nvrtc
        try:
            headers = find_nvidia_header_directory("cudart")
            major, minor = self._check(nvrtc.nvrtcVersion())
        except RuntimeError as error:
            raise KernelError(f"NVRTC cannot be loaded: {error}; install it: {_INSTALL}") from None
        if headers is None:
            raise KernelError(f"CUDA's headers are not installed; install them with: {_INSTALL}")
        self._headers = Path(headers)
        self._version = f"{major}.{minor}"

    @property
    def version(self) -> str:
        """NVRTC's."""
        return self._version

    @cached_property
    def identity(self) -> str:
        """Changes with NVRTC and with the headers of CUDA that kernels include."""
        digest = hashlib.sha256(self.version.encode())
        for name in ("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp"):
            digest.update((self._headers / name).read_bytes())
        return digest.hexdigest()

    def architectures(self) -> list[str]:
        """What it compiles for: ``sm_80``, …; variants with a letter are not listed by NVRTC."""
        return [f"sm_{number}" for number in self._check(self._nvrtc.nvrtcGetSupportedArchs())[0]]

    def options(self, source: Path, macros: Mapping[str, str], arch: str) -> list[str]:
        """What NVRTC is told, without where its own headers are."""
        return [
            f"-arch={arch}",
            f"-std={_STANDARD}",
            "--ptxas-options=-v",
            "-lineinfo",
            *(f"-D{name}={value}" for name, value in macros.items()),
        ]

    def compile(self, source: Path, macros: Mapping[str, str], arch: str) -> Compiled:
        """Compile one file.

        Args:
            source: A ``.cu`` file. Its own headers are beside it.
            macros: Definitions, name to value.
            arch: ``sm_80``, ``sm_90a``, …

        Raises:
            KernelError: The compiler refuses it; has its messages.
        """
        nvrtc = self._nvrtc
        folders = (source.parent, self._headers, self._headers / "cccl")
        options = self.options(source, macros, arch) + [f"-I{folder}" for folder in folders]
        encoded = [option.encode() for option in options]
        (program,) = self._check(
            nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), 0, None, None)
        )
        try:
            (code,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
            log = self._text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
                raise KernelError(f"{source.name} for {arch} with {dict(macros)}: {log or code}")
            (size,) = self._check(nvrtc.nvrtcGetCUBINSize(program))
            cubin = bytearray(size)
            self._check(nvrtc.nvrtcGetCUBIN(program, cubin))
            return Compiled(bytes(cubin), _resources(log))
        finally:
            nvrtc.nvrtcDestroyProgram(program)

    def _text(self, measure: Callable[..., Any], read: Callable[..., Any], program: Any) -> str:
        (size,) = self._check(measure(program))
        text = bytearray(size)
        self._check(read(program, text))
        return text.rstrip(b"\0").decode(errors="replace")

    def _check(self, results: tuple[Any, ...]) -> tuple[Any, ...]:
        code, *values = results
        if code != self._nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"NVRTC: {code}")
        return tuple(values)


class CubinCache:
    """Cubins on disk. Several processes may share the folder.

    Args:
        compiler: Compiles what is not there.
        folder: Made when it is first needed.
    """

    def __init__(self, compiler: Compiler, folder: Path) -> None:
        self._compiler = compiler
        self._folder = folder

    def path(self, source: Path, macros: Mapping[str, str], arch: str) -> Path:
        """The cubin of a file, compiled if it is not there.

        Raises:
            KernelError: It cannot be compiled, or not be written.
        """
        path = self._folder / f"{source.stem}-{arch}-{self._key(source, macros, arch)}.cubin"
        if not path.exists():
            self._keep(self._compiler.compile(source, macros, arch).cubin, path)
        return path

    def _keep(self, cubin: bytes, path: Path) -> None:
        """Write beside `path` and rename that: all or nothing."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._folder) as folder:
                partial = Path(folder) / path.name
                partial.write_bytes(cubin)
                os.replace(partial, path)
        except OSError as error:
            raise KernelError(
                f"{self._folder}: a cubin cannot be kept there: {error.strerror}"
            ) from None

    def _key(self, source: Path, macros: Mapping[str, str], arch: str) -> str:
        digest = hashlib.sha256(self._compiler.identity.encode())
        for option in self._compiler.options(source, macros, arch):
            digest.update(option.encode() + b"\0")
        for file in (source, *sorted(source.parent.glob("*.cuh"))):
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
        return digest.hexdigest()[:24]


def _resources(log: str) -> dict[str, Resources]:
    """Kernels by name, from what the assembler printed."""
    found: dict[str, Resources] = {}
    name, spilled = "", 0
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            name = entry[1]
        elif spills := _SPILLS.search(line):
            spilled = int(spills[1]) + int(spills[2])
        elif (used := _USED.search(line)) and name:
            shared = _SHARED.search(line)
            found[name] = Resources(int(used[1]), int(shared[1]) if shared else 0, spilled)
    return found
