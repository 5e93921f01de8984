"""The thread that steps without the GIL, over a small Llama on our own kernels.

What it gives is compared with the Python loop's, which ``test_engine.py`` looks at in detail.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import model_factory
from engines import assert_conserved, run_all
from fastserve import LLM, AsyncEngine, SamplingParams
from fastserve._core import StepLoop
from fastserve.active_request import ActiveRequest
from fastserve.config import EngineConfig
from fastserve.core import Core
from fastserve.engine import Engine
from fastserve.errors import EngineDeadError
from fastserve.models.resolve import resolve
from fastserve.runner import CpuRunner
from fastserve.steps import NativeSteps, PythonSteps

MakeEngine = Callable[..., Engine]

LIMITS: dict[str, Any] = {
    "num_blocks": 200,
    "block_size": 8,
    "max_num_batched_tokens": 64,
    "target_itl_ms": None,
    "skip_tokenizer_init": True,
}
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
PATIENCE_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_factory.make("llama", tmp_path_factory.mktemp("loop"))


@pytest.fixture(scope="module")
def runner_of(folder: Path) -> Callable[[], CpuRunner]:
    return lambda: CpuRunner.load(resolve(folder), dtype="float32", num_threads=1)


@pytest.fixture
def make_engine(runner_of: Callable[[], CpuRunner]) -> Iterator[MakeEngine]:
    """Makes engines over the model; at the end each is idle and has all its blocks."""
    made: list[Engine] = []

    def make(runner: CpuRunner | None = None, **limits: Any) -> Engine:
        made.append(Engine(runner or runner_of(), None, EngineConfig(**LIMITS | limits)))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()
        assert_conserved(engine)


def prompts(num: int, longest: int = 60) -> list[list[int]]:
    rng = np.random.default_rng(num)
    vocab = model_factory.VOCAB_SIZE
    return [rng.integers(3, vocab, rng.integers(1, longest + 1)).tolist() for _ in range(num)]


def params(number: int) -> SamplingParams:
    """Every kind of request, one after the other."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.9, "logprobs": 2},
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "min_tokens": 3},
        {"temperature": 1.1, "prompt_logprobs": 1, "logprobs": 0},
        {"temperature": 0.7, "n": 2, "logit_bias": {7: 2.0}},
    ]
    return SamplingParams(
        max_tokens=5 + number % 20, seed=number, ignore_eos=True, **kinds[number % len(kinds)]
    )


def said(request: ActiveRequest) -> list[Any]:
    """All that a request was told, floats as their bits."""
    output = request.output()

    def bits(entry: Any) -> Any:
        return entry and {token: (one.logprob.hex(), one.rank) for token, one in entry.items()}

    scores = output.prompt_logprobs and [bits(entry) for entry in output.prompt_logprobs]
    return [scores, output.error] + [
        (one.token_ids, one.logprobs and [bits(e) for e in one.logprobs], one.finish_reason)
        for one in output.outputs
    ]


def answers(engine: Engine) -> list[Any]:
    requests = [engine.submit(prompt, params(at)) for at, prompt in enumerate(prompts(30))]
    run_all(engine)
    return [said(request) for request in requests]


def wait_until(condition: Callable[[], bool]) -> None:
    """Look until it is so; the thread that steps needs nothing of ours."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"waited {PATIENCE_S} s in vain"


def num_steps(engine: Engine) -> int:
    return engine.stats()["num_steps"]


# What it gives


@pytest.mark.parametrize("in_flight", [1, 2, 4])
@pytest.mark.parametrize("limits", [{}, {"num_blocks": 24}, {"max_num_batched_tokens": 7}])
def test_answers_are_the_python_loops(
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    in_flight: int,
    limits: dict[str, int],
) -> None:
    native = make_engine(max_num_steps_in_flight=in_flight, **limits)
    assert isinstance(native._steps, NativeSteps)
    monkeypatch.setattr(CpuRunner, "native_parts", lambda self: None)
    plain = make_engine()
    assert isinstance(plain._steps, PythonSteps)
    assert answers(native) == answers(plain)


def test_news_come_in_the_order_of_the_steps(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_steps_in_flight=2)
    told = []
    deliver = engine._deliver_one
    engine._deliver_one = lambda news: told.append(news) or deliver(news)  # type: ignore[method-assign]
    engine.submit([5, 6, 7], LONG)
    run_all(engine)
    assert sum(len(news.outputs.tokens) for news in told) == LONG.max_tokens
    lengths = [news.outputs.num_output_tokens.tolist() for news in told if news.is_step]
    assert [length for (length,) in lengths if length] == list(range(1, LONG.max_tokens + 1))
    assert [news.at_ns for news in told] == sorted(news.at_ns for news in told)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("count", [*range(1, 12), 38, 39, 40, 41, 60])
def test_an_interrupt_while_news_is_delivered_loses_nothing(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, native: bool, count: int
) -> None:
    """As from a second Ctrl-C, or a handler of the caller's: at the count-th place of several."""
    if not native:
        monkeypatch.setattr(CpuRunner, "native_parts", lambda self: None)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    engine = make_engine()
    whole = [engine.submit(prompt, params) for prompt in prompts(3)]
    run_all(engine)
    again = [engine.submit(prompt, params) for prompt in prompts(3)]
    num_looks = itertools.count(1)

    def interrupt(call: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
        def interrupted(*arguments: Any) -> Any:
            if after:
                result = call(*arguments)
            if next(num_looks) == count:
                raise KeyboardInterrupt
            return result if after else call(*arguments)

        return interrupted

    for owner, name, after in (
        (engine._requests, "get", False),
        (engine._steps, "first", True),
        (engine, "_deliver_one", True),
        (engine._steps, "drop_first", False),
        (engine._steps, "drop_first", True),
    ):
        monkeypatch.setattr(owner, name, interrupt(getattr(owner, name), after=after))
    with pytest.raises(KeyboardInterrupt):
        run_all(engine)
    run_all(engine)
    assert [said(request) for request in again] == [said(request) for request in whole]
    assert engine.num_active == 0


def test_what_a_handler_raises_while_the_engine_waits_is_the_callers(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    request = engine.submit([5, 6, 7], LONG)

    class Interrupted:
        def poll(self) -> None:
            raise TimeoutError("mine")

    readable = engine._steps._readable
    monkeypatch.setattr(engine._steps, "_readable", Interrupted())
    with pytest.raises(TimeoutError, match="mine"):
        run_all(engine)  # News may be there already, and then nothing waits.
    monkeypatch.setattr(engine._steps, "_readable", readable)
    run_all(engine)
    assert len(request.output().outputs[0].token_ids) == LONG.max_tokens


def test_an_abort_and_a_finish_between_two_looks(make_engine: MakeEngine) -> None:
    engine = make_engine()
    requests = [engine.submit(prompt, LONG) for prompt in prompts(5, longest=9)]
    engine.step()
    engine.abort(requests[2])
    engine._inbox.finish(requests[3].number, 0, "stop", 1)
    run_all(engine)
    reasons = [request.sequences[0].finish_reason for request in requests]
    assert reasons == ["length", "length", "abort", "stop", "length"]
    assert engine.step() == []
    assert not engine.ran_step


def test_stop_strings_are_found_while_it_runs_ahead(folder: Path) -> None:
    with LLM(folder, dtype="float32", num_threads=1, num_blocks=200) as llm:
        (whole,) = llm.generate("the quick", LONG, progress=False)
        text = whole.outputs[0].text
        stop = text[len(text) // 2 : len(text) // 2 + 3]
        (cut,) = llm.generate(
            "the quick",
            SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, stop=stop),
            progress=False,
        )
        assert cut.outputs[0].text == text[: text.index(stop)]
        assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
        assert llm.stats()["held"] == 0


# Threads


def test_it_does_not_need_the_gil(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request = engine.submit([5, 6, 7], LONG)
    engine._steps._loop.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # So long nobody else gets it, for nothing below gives it up.
    try:
        wait_until(lambda: num_steps(engine) >= 30)
    finally:
        sys.setswitchinterval(interval)
    run_all(engine)
    assert request.num_generation_tokens == LONG.max_tokens


def test_a_slow_reader_stops_it(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request = engine.submit([5, 6, 7], LONG)
    engine._steps._loop.start()
    wait_until(lambda: num_steps(engine) == 64)
    pause = time.monotonic() + 0.2
    wait_until(lambda: time.monotonic() > pause)
    assert num_steps(engine) == 64
    assert engine.step() == [request]
    assert request.num_generation_tokens >= 64, "one look takes all that was said"
    run_all(engine)
    assert request.num_generation_tokens == LONG.max_tokens


def test_the_core_may_be_asked_while_it_steps(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_steps_in_flight=2)
    requests = [engine.submit(prompt, LONG) for prompt in prompts(6, longest=20)]
    while engine.has_work():
        engine.step()
        for _ in range(5):
            engine.check()
            engine.reset_prefix_cache()
            assert engine._core.stats()["capacity"] == 200
            assert engine._core.block_tables.shape == (64, 64)
    assert [request.num_generation_tokens for request in requests] == [LONG.max_tokens] * 6


def test_it_sleeps_when_idle_and_wakes(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert not engine.has_work()
    for _ in range(3):
        request = engine.submit([5, 6], SamplingParams(temperature=0, max_tokens=3))
        assert engine.has_work()
        run_all(engine)
        assert request.finished
    readable = select.poll()
    readable.register(engine._steps._loop.fileno(), select.POLLIN)
    assert readable.poll(0), "there is nothing to wait for"
    wait_until(lambda: not engine.has_work())
    before = time.process_time()
    pause = time.monotonic() + 0.3
    select.poll().poll(300)
    assert time.monotonic() >= pause - 0.1
    assert time.process_time() - before < 0.2, "it does not spin"


def test_ctrl_c_ends_a_batch_and_the_engine_is_usable(folder: Path) -> None:
    with LLM(folder, dtype="float32", num_threads=1, num_blocks=200) as llm:
        given = prompts(8, longest=20)

        def press() -> None:
            wait_until(lambda: llm.stats()["num_steps"] >= 5)
            os.kill(os.getpid(), signal.SIGINT)

        many = SamplingParams(temperature=0, max_tokens=490, ignore_eos=True)
        thread = threading.Thread(target=press)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(given * 20, many, progress=False)
        thread.join()
        stats = llm.stats()
        assert stats["num_finished_abort"] > 0
        assert stats["held"] == stats["num_running"] == stats["num_waiting"] == 0
        few = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        again = llm.generate(given, few, progress=False)
        assert all(len(output.outputs[0].token_ids) == 6 for output in again)


# What goes wrong


def test_a_step_that_fails_is_rolled_back(
    runner_of: Callable[[], CpuRunner], make_engine: MakeEngine
) -> None:
    """A token that the core takes and the model has not."""
    runner = runner_of()
    runner.vocab_size += 1
    engine = make_engine(runner, max_num_seqs=4)
    beyond = runner.vocab_size - 1
    bad = engine.submit([5, beyond], SamplingParams(temperature=0, max_tokens=4))
    run_all(engine)
    output = bad.output()
    assert output.outputs[0].finish_reason == "error"
    assert output.error.startswith(f"the step failed: rows: got {beyond}")
    stats = engine.stats()
    assert stats["num_failed_steps"] == 4
    good = engine.submit([5, 6], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    run_all(engine)
    assert good.num_generation_tokens == 4


def test_a_core_closed_under_it_ends_everything(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request = engine.submit([5, 6, 7], LONG)
    engine.step()
    engine._core.close()
    while engine.is_alive:
        engine.step()
    assert request.finished
    with pytest.raises(EngineDeadError, match="the engine stopped: the core is closed"):
        engine.step()


def test_shutdown_in_the_middle_ends_requests(make_engine: MakeEngine) -> None:
    for in_flight in (1, 2, 4):
        engine = make_engine(max_num_steps_in_flight=in_flight)
        requests = [engine.submit(prompt, LONG) for prompt in prompts(6, longest=9)]
        engine.step()
        ended = engine.shutdown()
        assert set(ended) == set(requests)
        assert {request.sequences[0].finish_reason for request in requests} == {"abort"}
        assert engine.shutdown() == []


def test_shutdown_before_the_first_step(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request = engine.submit([5], LONG)
    assert engine.shutdown() == [request]


def test_who_steps_a_core_is_settled(
    runner_of: Callable[[], CpuRunner], make_engine: MakeEngine
) -> None:
    engine = make_engine()
    core, loop = engine._core, engine._steps._loop
    arena = np.zeros(core.plan_words, dtype=np.int32)
    for call in (lambda: core.plan(0, arena), core.take_outputs, lambda: core.fail(1, 0)):
        with pytest.raises(RuntimeError, match="a StepLoop steps this Core"):
            call()
    runner = runner_of()
    runner.allocate_kv(20, 8, np.zeros((4, 8), np.int32))
    parts = runner.native_parts()
    arguments = (parts.decoder, parts.pool, parts.cache.kv, parts.cache.cos_sin)
    with pytest.raises(ValueError, match="core: it has had a StepLoop; want a new Core"):
        StepLoop(core, *arguments, now=0)
    ranked = Core(num_blocks=20, block_size=8, scheduling_policy=lambda candidate: 0)
    with pytest.raises(ValueError, match="its scheduling_policy is a Python object"):
        StepLoop(ranked, *arguments, now=0)
    engine.shutdown()
    loop.stop()
    with pytest.raises(RuntimeError, match="the step loop is stopped"):
        loop.check()


def test_a_forked_child_says_whose_it_is(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request = engine.submit([5, 6, 7], LONG)
    engine.step()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(PATIENCE_S)
        os._exit(0 if is_lost(engine) else 3)
    assert os.waitpid(child, 0)[1] == 0
    run_all(engine)
    assert request.num_generation_tokens == LONG.max_tokens


def is_lost(engine: Engine) -> bool:
    """Whether every call of a child's says that the engine is not its own, and none hangs."""
    calls = (engine.step, engine.stats, engine.check_alive, engine.check)
    for call in (*calls, lambda: engine.submit([1])):
        try:
            call()
        except EngineDeadError as error:
            if "forked from; make one in each process" not in str(error):
                return False
        else:
            return False
    engine.shutdown()
    engine._steps._loop = None  # What the parent's thread is in stays as it is.
    return True


@pytest.mark.parametrize("call", ["generate('x')", "reset_prefix_cache()", "shutdown()"])
def test_a_forked_child_waits_for_no_thread_of_its_parents(
    folder: Path, repository: Path, call: str
) -> None:
    """Another thread of the parent is generating, and has the lock that the call wants."""
    script = textwrap.dedent(
        f"""
        import os, signal, threading
        from fastserve import EngineDeadError, LLM, SamplingParams

        params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        llm = LLM({str(folder)!r}, dtype="float32", num_threads=1, num_blocks=200)
        thread = threading.Thread(
            target=llm.generate, args=(["the quick"] * 40, params), kwargs={{"progress": False}}
        )
        thread.start()
        while llm.stats()["num_steps"] < 2:
            pass
        child = os.fork()
        if child == 0:
            signal.alarm({PATIENCE_S})
            try:
                llm.{call}
            except EngineDeadError:
                pass
            os._exit(0)
        print(os.waitpid(child, 0)[1], thread.is_alive())
        thread.join()
        """
    )
    environment = os.environ | {"PYTHONPATH": f"{repository}/python"}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=300
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "0 True\n", "")


@pytest.mark.parametrize("front", ["engine", "async"])
def test_a_program_that_ends_with_a_step_running(
    folder: Path, repository: Path, front: str
) -> None:
    script = textwrap.dedent(
        f"""
        import sys
        from fastserve import AsyncEngine, LLM, SamplingParams

        how = dict(dtype="float32", num_threads=2, num_blocks=200)
        params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        if {front!r} == "engine":
            engine = LLM({str(folder)!r}, **how).engine
        else:
            front = AsyncEngine({str(folder)!r}, **how)
            engine = front._engine
        requests = [engine.submit("the quick brown", params) for _ in range(9)]
        if {front!r} == "engine":
            engine.step()
        else:
            front._stepper.wake()
            while engine.stats()["num_steps"] < 2:
                pass
        print("end")
        """
    )
    environment = os.environ | {"PYTHONPATH": f"{repository}/python"}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=300
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\n", "")


# The front end that streams


def test_streams_give_what_batches_give(tmp_path: Path) -> None:
    folder = model_factory.make("llama", tmp_path, max_position_embeddings=4096)
    longest = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
    how: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "num_blocks": 200}
    given = ["the quick", "brown fox", "in 1969"] * 3
    answer = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with LLM(folder, **how) as llm:
        whole = llm.generate(given, answer, progress=False)

    async def main() -> None:
        async with AsyncEngine(folder, **how) as engine:

            async def last(prompt: str) -> str:
                outputs = [output async for output in engine.generate(prompt, answer)]
                return outputs[-1].outputs[0].text

            texts = await asyncio.gather(*map(last, given))
            assert texts == [output.outputs[0].text for output in whole]
            async with aclosing(engine.generate("the", longest)) as outputs:
                await anext(outputs)
            await last("dog")
            assert engine.stats()["num_finished_abort"] == 1

    asyncio.run(main())
