"""The emulator notices what it says: each planted mistake, and nothing in its twin without it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuda_emulator import EmulatedModule, KernelError
from cuda_emulator.build import RUNTIME, kernels_of
from cuda_emulator.guarded import Side
from cuda_launch import CUDA

FOLDER = Path(__file__).resolve().parent / "cuda_emulator"
NUM_THREADS = 64


@cache
def planted(mode: str = "plain", file: str = "planted.cu") -> EmulatedModule:
    # planted_copies.cu includes the kernels' own wrappers.
    source = FOLDER / file
    return EmulatedModule(source, {}, mode)


def run(
    name: str,
    *extra: Any,
    mode: str = "plain",
    order: int = 0,
    grid: int = 1,
    guard: Side = "end",
    shared: int = 0,
) -> np.ndarray:
    x = np.arange(NUM_THREADS, dtype=np.float32)
    planted(mode).launch(
        name, grid, NUM_THREADS, [x, *extra], shared_bytes=shared, order=order, guard=guard
    )
    return x


@pytest.mark.parametrize(
    ("name", "extra", "shared", "says"),
    [
        ("divergent_barrier", (), 0, "divergent __syncthreads: planted.cu:"),
        ("deadlock", (), 0, "deadlock: thread"),
        ("shuffle_from_absent_lane", (), 0, "reads lane 20, which takes no part"),
        ("mask_of_exited_lanes", (), 0, "lanes that have exited|deadlock"),
        ("outside_its_own_mask", (), 0, "not in its own mask"),
        ("write_at", (np.int32(1),), 0, "thread .63,0,0.: invalid memory access"),
        ("read_at", (np.int32(1),), 0, "thread .63,0,0.: invalid memory access"),
        ("past_dynamic_shared", (np.int32(1),), 256, "past the 256 bytes of dynamic shared"),
        ("deep_stack", (np.int32(0),), 0, "invalid memory access"),
    ],
)
def test_is_reported(name: str, extra: tuple[Any, ...], shared: int, says: str) -> None:
    with pytest.raises(KernelError, match=says):
        run(name, *extra, shared=shared)


@pytest.mark.parametrize("name", ["write_at", "read_at"])
def test_accesses_before_the_start_are_reported(name: str) -> None:
    with pytest.raises(KernelError, match=r"thread \(0,0,0\): invalid memory access"):
        run(name, np.int32(-1), guard="start")


def test_a_write_into_the_rest_of_a_page_is_reported() -> None:
    x = np.zeros(63, np.float32)
    with pytest.raises(KernelError, match="beside an array were written"):
        planted().launch("write_at", 1, NUM_THREADS, [x, np.int32(0)])


def test_a_write_to_what_is_only_read_is_reported() -> None:
    x, y = np.zeros(64, np.float32), np.zeros(64, np.float32)
    y.flags.writeable = False
    with pytest.raises(KernelError, match="invalid memory access"):
        planted().launch("write_constant", 1, NUM_THREADS, [x, y])


def test_an_error_leaves_the_next_launch_whole() -> None:
    with pytest.raises(KernelError):
        run("deadlock")
    assert (run("with_barrier") == np.arange(64)[::-1]).all()


def test_a_block_larger_than_the_kernel_allows_is_refused() -> None:
    with pytest.raises(KernelError, match="few_threads: 64 threads a block: want 1 to 32"):
        run("few_threads")


@pytest.mark.parametrize(
    ("bug", "twin"),
    [
        ("missing_barrier", "with_barrier"),
        ("missing_second_barrier", "with_second_barrier"),
        ("missing_syncwarp", "with_syncwarp"),
    ],
)
def test_orders_of_threads_disagree_where_a_barrier_is_missing(bug: str, twin: str) -> None:
    right = [run(twin, order=order).tobytes() for order in range(6)]
    assert len(set(right)) == 1
    wrong = [run(bug, order=order).tobytes() for order in range(6)]
    assert any(result != right[0] for result in wrong)


def test_shared_memory_is_nan_when_a_block_starts() -> None:
    x = run("unset_dynamic_shared", shared=256)
    assert np.isnan(x[0])
    assert (x[1:] == 1).all()
    x = run("unset_static_shared", grid=2)  # The second block writes last.
    assert np.isnan(x[:2]).all()
    assert (x[2:] == 1).all()


@pytest.mark.parametrize(
    ("name", "extra"), [("misaligned", ()), ("past_static_shared", (np.int32(1),))]
)
def test_undefined_behaviour_is_trapped(name: str, extra: tuple[Any, ...]) -> None:
    with pytest.raises(KernelError, match="undefined behaviour"):
        run(name, *extra, mode="ub")


def run_copies(name: str, *extra: Any) -> np.ndarray:
    x = np.arange(256, dtype=np.float32)
    planted(file="planted_copies.cu").launch(name, 1, 32, [x, *extra], shared_bytes=1024)
    return x


def test_a_copy_is_nan_until_the_wait_that_covers_it() -> None:
    assert (run_copies("wait_for", np.int32(0)) == np.arange(256) + 1).all()
    weak = run_copies("wait_for", np.int32(1))
    assert (weak[:128] == np.arange(128) + 1).all()
    assert np.isnan(weak[128:]).all()


@pytest.mark.parametrize(
    ("name", "says"), [("never_waits", "not waited for"), ("misaligned_copy", "multiple of 16")]
)
def test_wrong_copies_are_reported(name: str, says: str) -> None:
    with pytest.raises(KernelError, match=says):
        run_copies(name)


def test_arguments_are_those_of_the_kernel() -> None:
    x = np.zeros(64, np.float32)
    for arguments, says in [
        ([x], "takes 2 arguments, not 1"),
        ([x, np.int64(0)], "has 8 bytes, its parameter 4"),
        ([x, 0], "want an array, a numpy scalar or None"),
        ([x[::2], np.int32(0)], "not contiguous"),
    ]:
        with pytest.raises(TypeError, match=says):
            planted().launch("write_at", 1, 64, arguments)
    with pytest.raises(KernelError, match="has no blocks"):
        planted().launch("write_at", 0, 64, [x, np.int32(0)])
    with pytest.raises(KernelError, match="shared memory, 232448 at most"):
        planted().launch("write_at", 1, 64, [x, np.int32(0)], shared_bytes=1 << 20)
    with pytest.raises(KernelError, match="2048 threads a block"):
        planted().launch("write_at", 1, 2048, [x, np.int32(0)])


@cache
def fixed_addresses() -> tuple[str, ...]:
    """What runs a command in a fixed layout of addresses, where that is allowed.

    The thread sanitizer of GCC 12 cannot do with a layout that is very random.
    """
    prefix = ("setarch", "-R")
    try:
        subprocess.run([*prefix, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return ()
    return prefix


def sanitized(mode: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A launch in a process that has a sanitizer's library from its start."""
    name = {"asan": "libasan.so", "tsan": "libtsan.so"}[mode]
    asked = ["g++", f"-print-file-name={name}"]
    library = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    assert os.path.isabs(library), f"{name} is missing; it comes with g++"
    environment = {
        **os.environ,
        "LD_PRELOAD": library,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": "exitcode=66 ignore_noninstrumented_modules=1",
    }
    command = [sys.executable, "-m", "cuda_emulator.sanitized", mode, *map(str, arguments)]
    return subprocess.run(
        [*fixed_addresses(), *command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "name", ["missing_barrier", "missing_second_barrier", "missing_syncwarp", "race_in_global"]
)
def test_the_thread_sanitizer_finds_races(name: str) -> None:
    done = sanitized("tsan", name)
    assert done.returncode == 66, done.stderr[-2000:]
    assert "data race" in done.stderr
    assert "planted.cu" in done.stderr


@pytest.mark.parametrize(
    ("name", "offset"),
    [("write_at", 1), ("write_at", -65), ("read_at", 1), ("past_static_shared", 1)],
)
def test_the_address_sanitizer_finds_both_ends(name: str, offset: int) -> None:
    done = sanitized("asan", name, offset)
    assert done.returncode != 0
    assert "AddressSanitizer" in done.stderr
    assert "planted.cu" in done.stderr


@pytest.mark.parametrize("mode", ["asan", "tsan"])
def test_sanitizers_find_nothing_in_what_is_right(mode: str) -> None:
    for name in ("with_barrier", "with_second_barrier", "with_syncwarp", "add_in_global"):
        done = sanitized(mode, name)
        assert done.returncode == 0, (name, done.stderr[-2000:])


@pytest.mark.parametrize("mode", ["asan", "tsan"])
def test_sanitizers_find_nothing_in_attention(mode: str) -> None:
    done = sanitized(mode, "attention")
    assert done.returncode == 0, done.stderr[-3000:]


def test_instructions_without_a_name_are_in_one_file() -> None:
    for path in [*CUDA.glob("*.cu"), *CUDA.glob("*.cuh")]:
        code = re.sub(r"//.*", "", path.read_text())
        assert (path.name == "ptx.cuh") == bool(re.search(r"\basm\b", code)), path.name


def test_every_wrapper_has_a_body_in_the_emulator() -> None:
    pattern = r"__forceinline__ void (\w+)\("
    wrapped = set(re.findall(pattern, (CUDA / "ptx.cuh").read_text()))
    emulated = set(re.findall(r"inline void (\w+)\(", (RUNTIME / "ptx_emulated.h").read_text()))
    assert wrapped
    assert wrapped <= emulated


def test_kernels_are_found_in_a_file() -> None:
    for path in CUDA.glob("*.cu"):
        assert list(kernels_of(path.read_text())) == [path.stem]
