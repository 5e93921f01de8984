"""Every ``.cu`` file compiles with NVRTC, which needs neither a GPU nor a driver.

torch's CUDA build brings NVRTC and the headers. Where it is not installed (macOS, a CPU-only
torch) the compile tests are skipped and say so. What the headers of the files promise is always
checked.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
from pathlib import Path

import pytest

CUDA = Path(__file__).resolve().parent.parent / "cuda"
SOURCES = sorted(CUDA.glob("*.cu"))
SCALARS = ["float", "__half", "__nv_bfloat16"]


@functools.cache
def toolkit() -> tuple[ctypes.CDLL, Path] | None:
    """NVRTC and the folder of CUDA's headers, from the packages that torch depends on."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec and spec.submodule_search_locations) or []:
        for library in sorted(Path(root).glob("*/lib/libnvrtc.so.*")):
            headers = next(Path(root).glob("*/include/cuda_fp16.h"), None)
            if headers is None:
                continue
            for builtins in library.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(library)), headers.parent
    return None


def compile_for(source: Path, arch: str, scalar: str) -> tuple[int, str]:
    """NVRTC's return code (0: compiled) and its log."""
    found = toolkit()
    if found is None:
        pytest.skip("NVRTC is not installed; torch's CUDA build brings it")
    nvrtc, headers = found
    program = ctypes.c_void_p()
    name = source.name.encode()
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.read_bytes(), name, 0, None, None
    )
    assert created == 0
    try:
        options = [
            f"-arch={arch}",
            "-std=c++17",
            "--ptxas-options=-v",
            f"-I{source.parent}",
            f"-I{headers}",
            f"-DSCALAR={scalar}",
        ]
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        code = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        return code, log.value.decode()
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@pytest.mark.parametrize("scalar", SCALARS)
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_compiles_without_spills(source: Path, scalar: str) -> None:
    code, log = compile_for(source, "sm_80", scalar)
    assert code == 0, log
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert spills, f"no kernel in {source.name}?\n{log}"
    assert all(pair == ("0", "0") for pair in spills), log


def test_a_broken_kernel_is_noticed(tmp_path: Path) -> None:
    source = tmp_path / "broken.cu"
    source.write_text('extern "C" __global__ void broken(float* x) { x[0] = missing; }\n')
    code, log = compile_for(source, "sm_80", "float")
    assert code != 0
    assert "missing" in log


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_header_states_the_contract(source: Path) -> None:
    header = source.read_text().split("#include", maxsplit=1)[0]
    for part in ("Launch contract:", "grid ", "block ", "smem ", "macros ", "arch ", "Numerics:"):
        assert part in header, f"{source.name} does not state {part!r}"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_header_lists_the_arguments_in_order(source: Path) -> None:
    text = source.read_text()
    signature = re.search(r"__global__.*?\w+\(([^)]*)\)\s*{", text, re.DOTALL)
    assert signature is not None
    parameters = [part.split()[-1].lstrip("*") for part in signature[1].split(",")]
    listed = re.search(r"// Arguments, in order:\n((?://   .*\n)+)", text)
    assert listed is not None, f"{source.name} lists no arguments"
    assert [line.split()[1] for line in listed[1].splitlines()] == parameters


def test_the_folder_is_described() -> None:
    readme = (CUDA / "README.md").read_text()
    assert [path.name for path in SOURCES if f"`{path.name}`" not in readme] == []
