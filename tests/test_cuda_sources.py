"""CUDA sources compile with NVRTC, which needs neither a GPU nor a driver.

torch's CUDA build brings NVRTC and the headers. Where it is not installed (macOS, a CPU-only
torch) the compile tests are skipped and say so. What the headers of the files promise is always
checked.
"""

from __future__ import annotations

import itertools
import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch

from fastserve.errors import KernelError
from fastserve.kernels.instantiations import Instantiation, Instantiations, cover
from fastserve.kernels.nvrtc import Compiled, Compiler, CubinCache

CUDA = Path(__file__).resolve().parent.parent / "cuda"
SOURCES = sorted(CUDA.glob("*.cu"))
LISTED = Instantiations.read(CUDA / "instantiations.toml")
ATTENTION = ("paged_chunk", "paged_decode", "paged_merge")


@cache
def compiler() -> Compiler:
    try:
        return Compiler()
    except KernelError as error:
        if torch.version.cuda is not None:
            raise  # That build brings NVRTC and the headers.
        pytest.skip(str(error))


@pytest.mark.parametrize("arch", LISTED.cover_architectures)
@pytest.mark.parametrize("kernel", sorted({one.kernel for one in LISTED.all}))
def test_compiles_without_spills(kernel: str, arch: str) -> None:
    def compile_one(one: Instantiation) -> Compiled:
        return compiler().compile(CUDA / f"{kernel}.cu", dict(one.macros), arch)

    chosen = cover(one for one in LISTED.all if one.kernel == kernel)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(compile_one, chosen))
    for one, compiled in zip(chosen, results, strict=True):
        assert compiled.cubin.startswith(b"\x7fELF")
        assert list(compiled.kernels) == [kernel]
        takes = compiled.kernels[kernel]
        assert takes.num_registers > 0
        assert takes.spilled_bytes == 0, f"{arch} {one}: {takes}"


def test_resources_are_what_the_assembler_says(tmp_path: Path) -> None:
    source = tmp_path / "spills.cu"
    source.write_text(
        'extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* x) {\n'
        "  __shared__ float s[256];\n"
        "  float many[64];\n"
        "  for (int i = 0; i < 64; i++) many[i] = x[i * 1024 + threadIdx.x];\n"
        "  s[threadIdx.x % 256] = many[5]; __syncthreads();\n"
        "  for (int i = 0; i < 64; i++) x[i + threadIdx.x * 64] = many[i] * s[i];\n"
        "}\n"
    )
    takes = compiler().compile(source, {}, "sm_80").kernels["spills"]
    assert takes.num_registers <= 32
    assert takes.shared_bytes >= 1024
    assert takes.spilled_bytes > 0


def test_a_broken_kernel_is_noticed(tmp_path: Path) -> None:
    source = tmp_path / "broken.cu"
    source.write_text('extern "C" __global__ void broken(float* x) { x[0] = missing; }\n')
    with pytest.raises(KernelError, match=r"broken.cu for sm_80 with \{'N': '1'\}: [^§]*missing"):
        compiler().compile(source, {"N": "1"}, "sm_80")


def test_an_architecture_that_is_not_known_is_an_error() -> None:
    with pytest.raises(KernelError, match="sm_7"):
        compiler().compile(CUDA / "copy_blocks.cu", {}, "sm_7")


def test_a_cubin_is_kept_under_all_that_goes_into_it(tmp_path: Path) -> None:
    source, header = tmp_path / "one.cu", tmp_path / "shared.cuh"
    source.write_text(
        '#include "shared.cuh"\nextern "C" __global__ void one(int* x) { *x = N + M; }'
    )
    header.write_text("#define M 1\n")
    kept = CubinCache(compiler(), tmp_path / "kept")
    first = kept.path(source, {"N": "1"}, "sm_80")
    modified = first.stat().st_mtime_ns
    assert kept.path(source, {"N": "1"}, "sm_80") == first
    assert first.stat().st_mtime_ns == modified
    others = {kept.path(source, {"N": "2"}, "sm_80"), kept.path(source, {"N": "1"}, "sm_90a")}
    header.write_text("#define M 2\n")
    others.add(kept.path(source, {"N": "1"}, "sm_80"))
    source.write_text(source.read_text() + "\n")
    others.add(kept.path(source, {"N": "1"}, "sm_80"))
    assert len(others | {first}) == 5
    assert sorted((tmp_path / "kept").iterdir()) == sorted({first, *others})


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(KernelError, match="a cubin cannot be kept there"):
        CubinCache(compiler(), blocked).path(CUDA / "copy_blocks.cu", {}, "sm_80")


def test_the_list_has_every_file() -> None:
    assert {one.kernel for one in LISTED.all} == {path.stem for path in SOURCES}


def test_a_file_uses_the_macros_that_the_list_gives_it() -> None:
    for path in SOURCES:
        wanted = set(re.findall(r"defined\((\w+)\)|#ifndef (\w+)\n#error", path.read_text()))
        names = {first or second for first, second in wanted}
        for one in LISTED.all:
            if one.kernel == path.stem:
                assert {name for name, _ in one.macros} == names, path.name


def test_attention_takes_every_head_and_block() -> None:
    for kernel in ATTENTION:
        heads = {dict(one.macros)["HEAD_DIM"] for one in LISTED.all if one.kernel == kernel}
        assert heads == {"64", "80", "96", "128", "256"}


def test_a_cover_has_every_pair() -> None:
    some = [
        Instantiation("k", (("A", a), ("B", b), ("C", c)))
        for a, b, c in itertools.product("123", "45", "6789")
    ]
    chosen = cover(some)
    assert set(chosen) <= set(some)
    for first, second in itertools.combinations(range(3), 2):
        pairs = {(one.macros[first], one.macros[second]) for one in some}
        assert {(one.macros[first], one.macros[second]) for one in chosen} == pairs
    assert len(chosen) < len(some) / 1.5


def test_an_instantiation_is_named_for_people() -> None:
    macros = (("SCALAR", "__nv_bfloat16"), ("HEAD_DIM", "128"), ("BLOCK_SIZE", "16"))
    assert str(Instantiation("paged_decode", macros)) == "paged_decode hd128 bs16 bf16"
    assert str(Instantiation("copy_blocks", ())) == "copy_blocks"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_header_states_the_contract(source: Path) -> None:
    header = source.read_text().split("#include", maxsplit=1)[0]
    for part in ("Launch contract:", "grid ", "block ", "smem ", "macros ", "arch ", "Numerics:"):
        assert part in header, f"{source.name} does not state {part!r}"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_header_lists_the_arguments_in_order(source: Path) -> None:
    text = source.read_text()
    signature = re.search(r'extern "C" __global__.*?\w+\(([^()]*)\)\s*{', text, re.DOTALL)
    assert signature is not None
    parameters = [part.split()[-1].lstrip("*") for part in signature[1].split(",")]
    listed = re.search(r"// Arguments, in order:\n((?://   .*\n)+)", text)
    assert listed is not None, f"{source.name} lists no arguments"
    assert [line.split()[1] for line in listed[1].splitlines()] == parameters


def test_the_folder_is_described() -> None:
    readme = (CUDA / "README.md").read_text()
    assert [path.name for path in SOURCES if f"`{path.name}`" not in readme] == []
