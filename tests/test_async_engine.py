"""AsyncEngine: streams, cancelling, life cycle; over a model too simple to be wrong.

Nothing sleeps: where a test has to wait until the engine's thread has got somewhere, it waits for
that to happen.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import aclosing

import pytest

from engines import ToyEngines, assert_conserved, toy_engine
from fastserve.async_engine import AsyncEngine
from fastserve.errors import EngineDeadError, KernelError, RequestError
from fastserve.outputs import RequestOutput
from fastserve.sampling_params import ParameterError, SamplingParams
from toy_runner import ToyRunner, ToyTokenizer, toy_answer

__all__ = ["toy_engine"]

GREEDY = SamplingParams(temperature=0, max_tokens=10)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
TOKENIZER = ToyTokenizer()

MakeEngine = Callable[..., AsyncEngine]


@pytest.fixture
def make_engine(toy_engine: ToyEngines) -> Iterator[MakeEngine]:
    made: list[AsyncEngine] = []

    def make(runner: ToyRunner | None = None, **limits: object) -> AsyncEngine:
        engine = toy_engine(runner, tokenizer=ToyTokenizer(), **limits)
        made.append(AsyncEngine.from_engine(engine))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()


class Gate:
    """Holds a runner's steps until the test lets them go."""

    def __init__(self, runner: ToyRunner) -> None:
        self.entered = threading.Semaphore(0)
        self._allowed = threading.Semaphore(0)
        self._is_open = False
        runner.on_forward = self._wait

    def _wait(self, plan: object) -> None:
        self.entered.release()
        if not self._is_open:
            assert self._allowed.acquire(timeout=60)

    def let(self, num_steps: int = 1) -> None:
        self._allowed.release(num_steps)

    def open(self) -> None:
        self._is_open = True
        self._allowed.release(1000)


async def collect(
    engine: AsyncEngine, prompt: str, params: SamplingParams = GREEDY, **options: object
) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, **options)]


def answer_text(prompt: str, num_tokens: int = 10) -> str:
    return TOKENIZER.decode(toy_answer(TOKENIZER.encode(prompt), num_tokens))


# Streams


def test_outputs_are_cumulative_and_end_finished(make_engine: MakeEngine) -> None:
    async def main() -> list[RequestOutput]:
        async with make_engine() as engine:
            return await collect(engine, "hello")

    outputs = asyncio.run(main())
    texts = [output.outputs[0].text for output in outputs]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert texts[-1] == answer_text("hello")
    assert outputs[0].prompt == "hello"


def test_chat_answers_a_conversation(make_engine: MakeEngine) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]

    async def main() -> list[RequestOutput]:
        async with make_engine() as engine:
            messages = [{"role": "user", "content": parts}]
            return [output async for output in engine.chat(messages, GREEDY, "mine")]

    outputs = asyncio.run(main())
    assert outputs[-1].outputs[0].text == answer_text("user:hi;assistant:")
    assert outputs[-1].request_id == "mine"


def test_leaving_a_chat_aborts_it(make_engine: MakeEngine) -> None:
    async def main() -> None:
        async with make_engine() as engine:
            async with aclosing(engine.chat([{"role": "user", "content": "hi"}], LONG)) as outputs:
                await anext(outputs)
            await collect(engine, "hello")
            assert engine.stats()["num_finished_abort"] == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        (["hi", "ho"], GREEDY, "prompt is a list of str; want one prompt: make one request"),
        ("hi", {"max_tokens": 2}, r"sampling_params is a dict; want SamplingParams\(\*\*it\)"),
    ],
)
def test_plausible_mistakes(
    make_engine: MakeEngine, prompt: object, params: object, message: str
) -> None:
    async def main() -> None:
        async with make_engine() as engine:
            with pytest.raises(TypeError, match=message):
                await anext(engine.generate(prompt, params))

    asyncio.run(main())


def test_many_at_once(make_engine: MakeEngine) -> None:
    prompts = [f"prompt {number}" for number in range(30)]

    async def main() -> list[list[RequestOutput]]:
        async with make_engine(max_num_seqs=5, max_num_steps_in_flight=2) as engine:
            return await asyncio.gather(*(collect(engine, prompt) for prompt in prompts))

    results = asyncio.run(main())
    assert [outputs[-1].outputs[0].text for outputs in results] == list(map(answer_text, prompts))


def test_an_output_that_was_given_does_not_change(make_engine: MakeEngine) -> None:
    async def main() -> None:
        params = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
        async with make_engine() as engine:
            outputs = await collect(engine, "hello", params)
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths == sorted(set(lengths))
        assert [len(output.outputs[0].logprobs) for output in outputs] == lengths

    asyncio.run(main())


def test_a_slow_reader_gets_everything_in_fewer_outputs(make_engine: MakeEngine) -> None:
    runner = ToyRunner()
    gate = Gate(runner)

    async def main() -> None:
        engine = make_engine(runner)
        async with aclosing(engine.generate("hello", GREEDY)) as outputs:
            gate.let()
            first = await anext(outputs)
            gate.open()
            await collect(engine, "another")  # The whole other answer, while the first is unread.
            rest = [output async for output in outputs]
        assert len(first.outputs[0].token_ids) == 1
        assert len(rest) == 1
        assert rest[0].finished
        assert rest[0].outputs[0].text == answer_text("hello")

    asyncio.run(main())


def test_long_text_is_tokenised_off_the_loop(make_engine: MakeEngine) -> None:
    threads: list[threading.Thread] = []

    class Tokenizer(ToyTokenizer):
        def encode(self, text: str) -> list[int]:
            threads.append(threading.current_thread())
            return super().encode(text)

    async def main() -> None:
        engine = make_engine(ToyRunner(max_positions=4096), num_blocks=1000)
        engine._engine.tokenizer = Tokenizer()
        (*_, last) = await collect(engine, "ab " * 1000)
        assert last.prompt == "ab " * 1000
        await collect(engine, "short")
        assert [thread is threading.main_thread() for thread in threads] == [False, True]

    asyncio.run(main())


# Ending early


@pytest.mark.parametrize("way", ["break", "aclose", "cancel", "abort", "forget"])
def test_ways_to_end_a_request_early(make_engine: MakeEngine, way: str) -> None:
    runner = ToyRunner()
    gate = Gate(runner)

    async def main() -> None:
        engine = make_engine(runner)
        outputs = engine.generate("hello", LONG, request_id="mine")
        gate.let()
        await anext(outputs)
        if way == "break":
            gate.let()
            async for _ in outputs:
                break
            await outputs.aclose()
        elif way == "aclose":
            await outputs.aclose()
        elif way == "cancel":
            reading = asyncio.create_task(_exhaust(outputs))
            await asyncio.sleep(0)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        elif way == "abort":
            assert await engine.abort("mine")
            gate.open()
            (*_, last) = [output async for output in outputs]
            assert last.outputs[0].finish_reason == "abort"
            assert not await engine.abort("mine")
        else:
            del outputs
            gc.collect()
            await asyncio.sleep(0)  # The loop makes a task that closes what nobody can read.
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0)
        gate.open()
        (*_, other) = await collect(engine, "other")
        assert other.outputs[0].text == answer_text("other")
        assert engine.stats()["num_finished_abort"] == 1

    asyncio.run(main())


async def _exhaust(outputs: object) -> None:
    async for _ in outputs:
        pass


def test_duplicate_ids_are_refused(make_engine: MakeEngine) -> None:
    runner = ToyRunner()
    gate = Gate(runner)

    async def main() -> None:
        engine = make_engine(runner)
        async with aclosing(engine.generate("hello", LONG, request_id="mine")) as outputs:
            gate.let()
            await anext(outputs)
            with pytest.raises(RequestError, match="request id 'mine' is in use"):
                await anext(engine.generate("other", GREEDY, request_id="mine"))
        gate.open()
        await collect(engine, "hello", GREEDY, request_id="mine")

    asyncio.run(main())


def test_refusals_come_with_the_first_output(make_engine: MakeEngine) -> None:
    async def main() -> None:
        async with make_engine() as engine:
            with pytest.raises(RequestError, match="prompt is empty"):
                await anext(engine.generate("", GREEDY))
            with pytest.raises(ParameterError, match="logit_bias has token 5000"):
                await anext(engine.generate("x", SamplingParams(logit_bias={5000: 1})))
            (*_, last) = await collect(engine, "fine")
            assert last.outputs[0].text == answer_text("fine")

    asyncio.run(main())


# Life cycle


def test_made_before_the_loop_and_used_from_several(make_engine: MakeEngine) -> None:
    with make_engine() as engine:
        first = asyncio.run(collect(engine, "one"))
        second = asyncio.run(collect(engine, "two"))
    assert first[-1].outputs[0].text == answer_text("one")
    assert second[-1].outputs[0].text == answer_text("two")


def test_loops_in_several_threads(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompts = [f"prompt {number}" for number in range(6)]
    results: dict[str, str] = {}

    def work(prompt: str) -> None:
        results[prompt] = asyncio.run(collect(engine, prompt))[-1].outputs[0].text

    threads = [threading.Thread(target=work, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {prompt: answer_text(prompt) for prompt in prompts}


def test_a_loop_that_closed_with_a_request_running(make_engine: MakeEngine) -> None:
    runner = ToyRunner()
    gate = Gate(runner)
    engine = make_engine(runner)

    async def leave() -> object:
        outputs = engine.generate("hello", SamplingParams(temperature=0, max_tokens=4))
        gate.let()
        await anext(outputs)
        return outputs

    loop = asyncio.new_event_loop()
    kept = loop.run_until_complete(leave())
    loop.close()
    gate.open()
    (*_, last) = asyncio.run(collect(engine, "other"))
    assert last.outputs[0].text == answer_text("other")
    del kept


def test_shutdown_ends_streams_and_may_be_repeated(make_engine: MakeEngine) -> None:
    runner = ToyRunner()
    gate = Gate(runner)

    async def main() -> None:
        engine = make_engine(runner)
        await engine.health()
        assert engine.is_running
        streams = [asyncio.create_task(collect(engine, f"p{n}", LONG)) for n in range(4)]
        await asyncio.to_thread(gate.entered.acquire)
        stopping = asyncio.create_task(asyncio.to_thread(engine.shutdown))
        gate.open()
        for outputs in await asyncio.gather(*streams):
            assert outputs[-1].finished
            assert outputs[-1].outputs[0].finish_reason in {"abort", "length"}
        await stopping
        engine.shutdown()
        assert not engine.is_running
        with pytest.raises(EngineDeadError, match="the engine is shut down; make a new one"):
            await engine.health()
        with pytest.raises(EngineDeadError):
            await anext(engine.generate("late", GREEDY))
        assert not await engine.abort("late")

    asyncio.run(main())


def test_it_sleeps_when_idle_and_wakes(make_engine: MakeEngine) -> None:
    runner = ToyRunner()

    async def main() -> None:
        engine = make_engine(runner)
        for _ in range(3):
            await collect(engine, "hello", SamplingParams(temperature=0, max_tokens=3))
        plans = engine._engine.stats()["num_steps"]
        assert plans == runner.num_forwards

    asyncio.run(main())


def test_a_forgotten_engine_ends_its_thread(toy_engine: ToyEngines) -> None:
    inner = toy_engine()
    engine = AsyncEngine.from_engine(inner)
    thread = engine._stepper._thread
    assert thread.is_alive()
    del engine
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    assert not inner.is_alive


def test_a_program_that_forgets_to_shut_down_ends(repository: object) -> None:
    script = textwrap.dedent(
        """
        import asyncio
        from test_async_engine import GREEDY, collect
        from toy_runner import ToyRunner, ToyTokenizer
        from fastserve.async_engine import AsyncEngine
        from fastserve.engine import Engine

        engine = AsyncEngine.from_engine(Engine(ToyRunner(), ToyTokenizer()))
        print(asyncio.run(collect(engine, "hello"))[-1].finished)
        """
    )
    environment = os.environ | {"PYTHONPATH": f"{repository}/python:{repository}/tests"}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120
    )
    assert (result.returncode, result.stdout) == (0, "True\n"), result.stderr


# Failures


def test_a_dead_device_ends_every_stream_with_an_error(make_engine: MakeEngine) -> None:
    runner = ToyRunner()

    def die(plan: object) -> None:
        if runner.num_forwards == 3:
            raise KernelError("the device is lost")

    runner.on_forward = die

    async def main() -> None:
        engine = make_engine(runner)
        results = await asyncio.gather(*(collect(engine, f"p{n}", LONG) for n in range(4)))
        for outputs in results:
            assert outputs[-1].outputs[0].finish_reason == "error"
            assert outputs[-1].error == "the engine stopped: the device is lost"
        with pytest.raises(EngineDeadError, match="the engine stopped: the device is lost"):
            await engine.health()
        with pytest.raises(EngineDeadError, match="the device is lost"):
            await anext(engine.generate("late", GREEDY))

    asyncio.run(main())


def test_a_request_that_fails_leaves_the_others(make_engine: MakeEngine) -> None:
    runner = ToyRunner()
    runner.poison = lambda tokens: tokens[:3] == TOKENIZER.encode("bad") and len(tokens) > 5

    async def main() -> None:
        engine = make_engine(runner)
        bad, good = await asyncio.gather(collect(engine, "bad", LONG), collect(engine, "good"))
        assert bad[-1].error == "the model's logits are not finite"
        assert bad[-1].outputs[0].finish_reason == "error"
        assert good[-1].outputs[0].text == answer_text("good")
        await asyncio.to_thread(engine.shutdown)
        assert_conserved(engine._engine)

    asyncio.run(main())
