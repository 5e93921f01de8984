"""The decoder of the extension through its binding: what it refuses, threads, and a fork."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import model_factory
from fastserve._core import cpu
from fastserve.models import config
from fastserve.models.resolve import resolve
from fastserve.runner import CpuRunner
from plans import PlanBuilder, Row

LAST_SAMPLES = np.zeros(8, dtype=np.int32)
TOKENS = [5, 9, 200, 31, 7, 8, 100]


@pytest.fixture
def runner(tmp_path: Path) -> CpuRunner:
    folder = model_factory.make("llama", tmp_path)
    return CpuRunner.load(resolve(folder), dtype="float32", num_threads=2)


def plan_of(runner: CpuRunner) -> Any:
    builder = PlanBuilder()
    builder.give_kv_to(runner)
    return builder.plan([Row(slot=0, tokens=TOKENS)])


def words_in(memory: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """int32 of that shape in the first bytes of `memory`, all of them zero."""
    words = memory.reshape(-1)[: int(np.prod(shape))].view(np.int32).reshape(shape)
    words[:] = 0
    return words


@pytest.mark.parametrize(
    "name",
    [
        "token_ids",
        "positions",
        "slot_mapping",
        "row_slots",
        "query_indptr",
        "seq_lens",
        "num_shared_blocks",
        "out_rows",
        "copies",
    ],
)
def test_a_plan_in_memory_that_is_written_is_refused(runner: CpuRunner, name: str) -> None:
    plan = plan_of(runner)
    want = runner.forward(plan, LAST_SAMPLES).copy()
    good = getattr(plan, name)
    shape = (3, 2) if name == "copies" else good.shape
    assert runner._cache is not None
    setattr(plan, name, words_in(runner._cache.kv, shape))
    with pytest.raises(ValueError, match=f"kv and {name}: want memory of their own"):
        runner.forward(plan, LAST_SAMPLES)
    setattr(plan, name, good)
    assert np.array_equal(runner.forward(plan, LAST_SAMPLES), want)


def test_threads_take_turns(runner: CpuRunner) -> None:
    plan = plan_of(runner)
    want = runner.forward(plan, LAST_SAMPLES).copy()
    wrong = []
    decoder, cache = runner._decoder.decoder, runner._cache

    def work() -> None:
        logits = np.empty_like(want)
        for _ in range(100):
            decoder.forward(runner.pool, cache.kv, logits, **arguments(plan, cache))
            if not np.array_equal(logits, want):
                wrong.append(logits)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def arguments(plan: Any, cache: Any) -> dict[str, np.ndarray]:
    """Of ``Decoder.forward``, beside the pool, the cache and the logits."""
    names = ("token_ids", "positions", "slot_mapping", "row_slots", "query_indptr", "seq_lens")
    found = {name: getattr(plan, name) for name in (*names, "num_shared_blocks", "out_rows")}
    found |= {"copies": plan.copies, "last_samples": LAST_SAMPLES}
    return found | {"block_tables": cache.block_tables, "cos_sin": cache.cos_sin}


def test_a_fork_in_the_middle_of_a_step_computes(runner: CpuRunner) -> None:
    """The child has no thread that could finish the parent's step, and none of the pool's."""
    plan = plan_of(runner)
    want = runner.forward(plan, LAST_SAMPLES).copy()
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            runner.forward(plan, LAST_SAMPLES)

    busy = threading.Thread(target=work)
    busy.start()
    try:
        ends = [end_of_child(lambda: runner.forward(plan, LAST_SAMPLES), want) for _ in range(20)]
    finally:
        is_over.set()
        busy.join()
    assert ends == [0] * 20


def end_of_child(compute: Callable[[], np.ndarray], want: np.ndarray) -> int:
    """Exit status of a child that computes; it is killed if it hangs."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        os._exit(0 if np.array_equal(compute(), want) else 3)
    return os.waitpid(child, 0)[1]


def test_rows_that_make_no_weight_are_what_they_were() -> None:
    def rows(num_cols: int) -> cpu.Packed:
        packed = cpu.Packed("F32", 4, num_cols)
        packed.fill(0, np.ones(4 * num_cols, np.float32).view(np.uint8))
        return packed

    one, other = rows(8), rows(16)
    with pytest.raises(ValueError, match="parts: got 2 with 8, 16 columns"):
        cpu.Weight([one, other])
    with pytest.raises(ValueError, match="part of a Weight already"):
        cpu.Weight([one, one])
    one.fill(0, np.zeros(8, np.float32).view(np.uint8))
    assert cpu.Weight([one]).shape == (4, 8)
    assert cpu.Weight([other]).shape == (4, 16)


def test_more_rows_than_there_is_memory_for() -> None:
    with pytest.raises(MemoryError, match="num_rows: got 4294967296, which take"):
        cpu.Packed("F32", 1 << 32, 1 << 24)


def test_more_blocks_than_there_is_memory_for(runner: CpuRunner) -> None:
    tables = np.zeros((2, 4), np.int32)
    with pytest.raises(MemoryError, match=r"num_blocks=100000000000: their keys and values take"):
        runner.allocate_kv(100_000_000_000, 16, tables)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"temperature": [1.0]}, TypeError, "temperature: got <class 'list'>, want an array of"),
        (
            {"temperature": np.ones(1)},
            TypeError,
            "temperature: got <class 'numpy.ndarray'>, want an array of float32, one axis",
        ),
        ({"top_p": np.ones(4, np.float32)[::2]}, ValueError, "top_p: got an array with gaps"),
        (
            {"top_p": np.ones(2, np.float32)},
            ValueError,
            "top_p: got 2 values, want one for each of rows, 1",
        ),
        ({"rows": np.array([2], np.int32)}, ValueError, "rows: got 2 at 0, want 0 to 1"),
        (
            {"min_p": np.zeros(5, np.uint8)[1:].view(np.float32)},
            ValueError,
            "min_p: got an array with gaps or not aligned",
        ),
    ],
)
def test_wrong_arguments_of_a_draw_are_named(
    change: dict[str, Any], error: type[Exception], text: str
) -> None:
    good: dict[str, Any] = {
        "rows": np.zeros(1, np.int32),
        "temperature": np.ones(1, np.float32),
        "top_k": np.zeros(1, np.int32),
        "top_p": np.ones(1, np.float32),
        "min_p": np.zeros(1, np.float32),
        "bits": np.zeros(1, np.uint64),
    }

    def draw(**arguments: Any) -> np.ndarray:
        logits = np.zeros((2, 5), np.float32)
        return cpu.draw_tokens(cpu.Pool(1), logits, arguments.pop("rows"), **arguments)

    with pytest.raises(error) as caught:
        draw(**good | change)
    assert str(caught.value).startswith(text)
    assert draw(**good).tolist() == [0]


def test_every_vocabulary_that_loads_can_be_sampled() -> None:
    most = config._LIMITS["vocab_size"]
    assert cpu.best_tokens(cpu.Pool(1), np.empty((0, most), np.float32))[0].shape == (0,)
    with pytest.raises(ValueError, match="logits: got"):
        cpu.best_tokens(cpu.Pool(1), np.empty((0, most + 1), np.float32))
