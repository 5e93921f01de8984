"""LLM: batches in order, text, interrupts, life cycle; over a model too simple to be wrong."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from engines import ToyEngines, assert_conserved, toy_engine
from fastserve.config import EngineConfig, EngineOptions
from fastserve.errors import ConfigError, EngineDeadError, KernelError, ModelError, RequestError
from fastserve.llm import LLM
from fastserve.progress import loading
from fastserve.sampling_params import ParameterError, SamplingParams
from fastserve.text.chat_template import ChatTemplateError
from toy_runner import EOS, ToyRunner, ToyTokenizer, toy_answer

__all__ = ["toy_engine"]

GREEDY = SamplingParams(temperature=0, max_tokens=10)
TEXTS = ["one", "two words", "a somewhat longer prompt", "x"]
TOKENIZER = ToyTokenizer()

MakeLLM = Callable[..., LLM]


@pytest.fixture
def make_llm(toy_engine: ToyEngines) -> Iterator[MakeLLM]:
    def make(runner: ToyRunner | None = None, **limits: object) -> LLM:
        return LLM.from_engine(toy_engine(runner, tokenizer=ToyTokenizer(), **limits))

    return make


def answer_text(prompt: str, num_tokens: int = 10) -> str:
    return TOKENIZER.decode(toy_answer(TOKENIZER.encode(prompt), num_tokens))


def num_tokens_until(tokens: list[int], stop: str) -> int:
    """How many of `tokens` it takes until their text has `stop`. (The end token has no text.)"""
    return next(n for n in range(len(tokens)) if stop in TOKENIZER.decode(tokens[:n]))


# Prompts and results


def test_results_are_in_order_whatever_finishes_first(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_seqs=2)
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (9, 1, 5, 2)]
    outputs = llm.generate(TEXTS, params)
    assert [output.prompt for output in outputs] == TEXTS
    assert [output.outputs[0].text for output in outputs] == [
        answer_text(text, n) for text, n in zip(TEXTS, (9, 1, 5, 2), strict=True)
    ]
    assert all(output.finished for output in outputs)
    assert len({output.request_id for output in outputs}) == 4


@pytest.mark.parametrize(
    "prompts",
    [
        "two words",
        TOKENIZER.encode("two words"),
        {"prompt": "two words"},
        {"prompt_token_ids": TOKENIZER.encode("two words")},
        ["two words"],
        [{"prompt": "two words", "cache_salt": "mine"}],
        [TOKENIZER.encode("two words")],
    ],
    ids=str,
)
def test_every_shape_of_a_prompt(make_llm: MakeLLM, prompts: object) -> None:
    (output,) = make_llm().generate(prompts, GREEDY)
    assert output.prompt_token_ids == TOKENIZER.encode("two words")
    assert output.outputs[0].text == answer_text("two words")


def test_no_prompts_no_answers(make_llm: MakeLLM) -> None:
    assert make_llm().generate([]) == []


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (7, "prompts is a int; want text, token ids, a dict with"),
        (b"x", "prompts is a bytes; want text"),
        ([["a"]], "prompt is a list of str; want one prompt: make one request for each"),
        ([[1, "a"]], "prompt has 'a' among its token ids; want integers"),
        ([[1, 2.5]], r"prompt has 2\.5 among its token ids; want integers"),
        ([None], "prompt is a NoneType; want text, token ids"),
        ({}, "a prompt's dict has neither; want one of 'prompt' and 'prompt_token_ids'"),
        (
            {"prompt": "x", "prompt_token_ids": [1]},
            "a prompt's dict has prompt and prompt_token_ids; want one",
        ),
        ({"promt": "x"}, "a prompt has no keyword 'promt'; did you mean 'prompt'?"),
        ({"prompt": "x", "cache_salt": 5}, "cache_salt is 5; want text that is not empty"),
    ],
)
def test_what_no_prompt_can_be(make_llm: MakeLLM, prompts: object, message: str) -> None:
    llm = make_llm()
    with pytest.raises(TypeError, match=message):
        llm.generate(prompts)
    assert llm.generate("x", GREEDY)[0].outputs[0].text == answer_text("x")


def test_half_a_surrogate_pair_is_no_salt(make_llm: MakeLLM) -> None:
    llm = make_llm()
    with pytest.raises(ParameterError, match=r"cache_salt has '\\ud800' at character 1: want both"):
        llm.generate({"prompt": "x", "cache_salt": "a\ud800"})
    assert llm.generate("x", GREEDY)[0].outputs[0].text == answer_text("x")


def test_one_parameter_set_for_all_or_one_for_each(make_llm: MakeLLM) -> None:
    with pytest.raises(ValueError, match="1 sampling_params for 2 prompts; want one for each"):
        make_llm().generate(["a", "b"], [GREEDY])
    with pytest.raises(ValueError, match="3 priority for 2 prompts; want one for each"):
        make_llm().generate(["a", "b"], GREEDY, priority=[1, 2, 3])


def test_more_prompts_than_the_queue_takes(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_queued_requests=3, max_num_seqs=2)
    prompts = [f"prompt {number}" for number in range(20)]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.outputs[0].text for output in outputs] == list(map(answer_text, prompts))


def test_a_refused_prompt_ends_the_batch(make_llm: MakeLLM) -> None:
    llm = make_llm()
    with pytest.raises(RequestError, match="prompt is empty"):
        llm.generate(["one", "", "two"], GREEDY)
    assert_conserved(llm.engine)
    assert llm.stats()["num_finished_abort"] == 1
    assert llm.generate("one", GREEDY)[0].outputs[0].text == answer_text("one")


def test_chat(make_llm: MakeLLM) -> None:
    llm = make_llm()
    messages = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(messages, GREEDY)
    both = llm.chat([messages, [{"role": "user", "content": "bye"}]], GREEDY)
    assert one.outputs[0].text == answer_text("user:hi;assistant:")
    assert [output.outputs[0].text for output in both] == [
        answer_text("user:hi;assistant:"),
        answer_text("user:bye;assistant:"),
    ]
    (bare,) = llm.chat(messages, GREEDY, add_generation_prompt=False)
    assert bare.outputs[0].text == answer_text("user:hi;")


def test_chat_takes_text_parts(make_llm: MakeLLM) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    (output,) = make_llm().chat([{"role": "user", "content": parts}], GREEDY)
    assert output.outputs[0].text == answer_text("user:hi;assistant:")


def test_chat_takes_openais_other_words(make_llm: MakeLLM) -> None:
    """``developer`` for ``system``, and ``None`` of an assistant that only called tools."""
    messages = [
        {"role": "developer", "content": "be"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": "hi"},
    ]
    (output,) = make_llm().chat(messages, GREEDY)
    assert output.outputs[0].text == answer_text("system:be;assistant:;user:hi;assistant:")


@pytest.mark.parametrize(
    ("messages", "kind", "message"),
    [
        (
            "hello",
            TypeError,
            'messages is a str; want a list: [{"role": "user", "content": "..."}]',
        ),
        ({"role": "user", "content": "x"}, TypeError, "messages is a dict; want a list: "),
        (["hello"], TypeError, 'messages[0] is a str; want {"role": "user", "content": "..."}'),
        ([["hello"]], TypeError, "messages[0][0] is a str; want"),
        ([{"content": "x"}], ChatTemplateError, "messages[0] has no role; want"),
        ([{"role": "user"}], ChatTemplateError, "messages[0] has no content; want"),
        ([[], [{"role": "user"}]], ChatTemplateError, "messages[1][0] has no content; want"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            ChatTemplateError,
            'messages[0].content[0] is \'image_url\'; want {"type": "text",',
        ),
        (
            [{"role": "user", "content": ["x"]}],
            ChatTemplateError,
            "messages[0].content[0] is 'str'; want",
        ),
    ],
)
def test_what_no_conversation_can_be(
    make_llm: MakeLLM, messages: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        make_llm().chat(messages)


def test_sampling_params_have_their_own_type(make_llm: MakeLLM) -> None:
    llm = make_llm()
    for given in ({"max_tokens": 2}, [{"max_tokens": 2}]):
        with pytest.raises(
            TypeError, match=r"sampling_params is a dict; want SamplingParams\(\*\*"
        ):
            llm.generate("hi", given)
    with pytest.raises(TypeError, match=r"sampling_params is a int; want SamplingParams\(\.\.\.\)"):
        list(llm.stream("hi", 5))


def test_vllm_names(make_llm: MakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm = make_llm()
    assert llm.get_tokenizer() is llm.tokenizer
    llm.generate("hi", GREEDY, use_tqdm=False)
    llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=True)
    assert "Generating" in capsys.readouterr().err


def test_chat_needs_a_tokenizer(toy_engine: ToyEngines) -> None:
    llm = LLM.from_engine(toy_engine())
    with pytest.raises(ModelError, match="the engine has no tokenizer"):
        llm.chat([{"role": "user", "content": "hi"}])


# Text


def test_stop_strings_across_tokens(make_llm: MakeLLM) -> None:
    llm = make_llm(ToyRunner(eos_token_ids=[]))
    tokens = toy_answer(TOKENIZER.encode("stop here"), 40, stop_token_ids=())
    whole = TOKENIZER.decode(tokens)
    stop = whole[11:14]
    end = whole.index(stop)
    for included in (False, True):
        params = SamplingParams(
            temperature=0,
            max_tokens=40,
            stop=["never there", stop],
            include_stop_str_in_output=included,
            logprobs=0,
        )
        (output,) = llm.generate("stop here", params)
        (answer,) = output.outputs
        assert answer.text == whole[: end + 3 * included]
        assert answer.token_ids == tokens[: num_tokens_until(tokens, stop)]
        assert len(answer.logprobs) == len(answer.token_ids)
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert_conserved(llm.engine)
    assert llm.stats()["num_finished_stop"] == 2


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_stop_strings_with_steps_in_flight(make_llm: MakeLLM, in_flight: int) -> None:
    llm = make_llm(ToyRunner(eos_token_ids=[]), max_num_steps_in_flight=in_flight)
    prompts = [f"prompt {number}" for number in range(10)]
    answers = [toy_answer(TOKENIZER.encode(prompt), 30, ()) for prompt in prompts]
    wholes = list(map(TOKENIZER.decode, answers))
    params = [
        SamplingParams(temperature=0, max_tokens=30, stop=whole[number : number + 2])
        for number, whole in enumerate(wholes)
    ]
    outputs = llm.generate(prompts, params)
    for output, param, tokens, whole in zip(outputs, params, answers, wholes, strict=True):
        (stop,) = param.stop_strings
        assert output.outputs[0].text == whole[: whole.index(stop)]
        assert output.outputs[0].token_ids == tokens[: num_tokens_until(tokens, stop)]


def test_a_stop_token_has_no_text_unless_it_is_included(make_llm: MakeLLM) -> None:
    llm = make_llm(ToyRunner(eos_token_ids=[]))
    tokens = toy_answer(TOKENIZER.encode("go"), 10, stop_token_ids=())
    stop = tokens[4]
    kept = tokens[: tokens.index(stop) + 1]
    for included in (False, True):
        params = SamplingParams(
            temperature=0, stop_token_ids=[stop], include_stop_str_in_output=included
        )
        (answer,) = llm.generate("go", params)[0].outputs
        assert answer.token_ids == kept
        assert answer.text == TOKENIZER.decode(kept if included else kept[:-1])
        assert answer.stop_reason == stop


def test_special_tokens_stay_out_of_the_text(make_llm: MakeLLM) -> None:
    llm = make_llm()
    params = {"temperature": 0, "max_tokens": 20, "logit_bias": {EOS: 100.0}}
    (hidden,) = llm.generate("x", SamplingParams(**params))[0].outputs
    assert (hidden.text, hidden.token_ids, hidden.stop_reason) == ("", [EOS], None)
    shown = SamplingParams(**params, skip_special_tokens=False, include_stop_str_in_output=True)
    assert llm.generate("x", shown)[0].outputs[0].text == "<end>"


def test_decoded_tokens_of_logprobs(make_llm: MakeLLM) -> None:
    (output,) = make_llm().generate("x", SamplingParams(temperature=0, max_tokens=2, logprobs=3))
    for token, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
        assert entry[token].decoded_token == TOKENIZER.decode([token])


def test_streamed_text_is_the_text(make_llm: MakeLLM) -> None:
    llm = make_llm(ToyRunner(eos_token_ids=[]))
    params = SamplingParams(temperature=0, max_tokens=30, stop="never there")
    outputs = list(llm.stream("stream", params))
    texts = [output.outputs[0].text for output in outputs]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, 31))
    assert [output.finished for output in outputs] == [False] * 29 + [True]
    assert texts[-1] == llm.generate("stream", params)[0].outputs[0].text


def test_closing_a_stream_aborts_it(make_llm: MakeLLM) -> None:
    llm = make_llm()
    stream = llm.stream("stream", SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    assert llm.generate("one", GREEDY)[0].outputs[0].text == answer_text("one")  # Meanwhile.
    stream.close()
    assert llm.stats()["num_finished_abort"] == 1
    assert_conserved(llm.engine)


def test_a_stream_that_ended_meanwhile(make_llm: MakeLLM) -> None:
    llm = make_llm()
    stream = llm.stream("stream", SamplingParams(temperature=0, max_tokens=3))
    next(stream)
    llm.generate("one", GREEDY)
    (last,) = list(stream)
    assert last.outputs[0].text == answer_text("stream", 3)


InNewThread = Callable[[Callable[[], Any]], Any]


@pytest.fixture
def in_new_thread() -> Iterator[InNewThread]:
    """Calls something in a thread of its own. All stay: a new thread may get an ended one's id."""
    with ExitStack() as threads:

        def call(work: Callable[[], Any]) -> Any:
            thread = threads.enter_context(ThreadPoolExecutor(max_workers=1))
            return thread.submit(work).result(timeout=60)

        yield call


def test_a_stream_goes_from_thread_to_thread(make_llm: MakeLLM, in_new_thread: InNewThread) -> None:
    """As web frameworks drive an iterator: every step on whichever worker is free."""
    llm = make_llm()
    stream = llm.stream("stream", GREEDY)
    outputs = [in_new_thread(lambda: next(stream)) for _ in range(3)]
    assert in_new_thread(lambda: llm.generate("one", GREEDY))[0].outputs[0].text == answer_text(
        "one"
    )
    outputs += in_new_thread(lambda: list(stream))
    assert outputs[-1].outputs[0].text == answer_text("stream")


def test_a_stream_may_be_closed_in_another_thread(
    make_llm: MakeLLM, in_new_thread: InNewThread
) -> None:
    llm = make_llm()
    stream = llm.stream("stream", SamplingParams(max_tokens=200, ignore_eos=True))
    in_new_thread(lambda: next(stream))
    stream.close()
    assert llm.stats()["num_finished_abort"] == 1
    assert_conserved(llm.engine)
    assert in_new_thread(lambda: llm.generate("one", GREEDY))[0].outputs[0].text == answer_text(
        "one"
    )
    in_new_thread(llm.shutdown)


def test_streams_in_several_threads_at_once(make_llm: MakeLLM) -> None:
    llm = make_llm()
    with ThreadPoolExecutor(max_workers=len(TEXTS)) as threads:
        last = threads.map(lambda text: list(llm.stream(text, GREEDY))[-1], TEXTS)
        assert [output.outputs[0].text for output in last] == list(map(answer_text, TEXTS))


# Ctrl-C


def test_an_interrupt_ends_a_batch_within_a_step(make_llm: MakeLLM) -> None:
    runner = ToyRunner()
    llm = make_llm(runner)

    def press(plan: object) -> None:
        if runner.num_forwards == 3:
            os.kill(os.getpid(), signal.SIGINT)

    runner.on_forward = press
    with pytest.raises(KeyboardInterrupt):
        llm.generate(TEXTS, SamplingParams(max_tokens=100, ignore_eos=True))
    assert runner.num_forwards == 3
    assert llm.stats()["num_finished_abort"] == len(TEXTS)
    assert llm.stats()["num_failed_steps"] == 0
    assert_conserved(llm.engine)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.generate("one", GREEDY)[0].outputs[0].text == answer_text("one")


def test_a_second_interrupt_does_not_wait_for_the_step(make_llm: MakeLLM) -> None:
    runner = ToyRunner()
    llm = make_llm(runner)
    reached: list[str] = []

    def press(plan: object) -> None:
        if runner.num_forwards == 2:
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("after the first")
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("after the second")

    runner.on_forward = press
    with pytest.raises(KeyboardInterrupt):
        llm.generate(TEXTS, SamplingParams(max_tokens=100, ignore_eos=True))
    assert reached == ["after the first"]
    assert_conserved(llm.engine)
    assert llm.generate("one", GREEDY)[0].outputs[0].text == answer_text("one")


def test_an_error_of_the_caller_in_a_stream_aborts(make_llm: MakeLLM) -> None:
    llm = make_llm()
    stream = llm.stream("stream", SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    with pytest.raises(ZeroDivisionError):
        stream.throw(ZeroDivisionError())
    assert_conserved(llm.engine)


# Life cycle


def test_shutdown_is_idempotent_and_final(make_llm: MakeLLM) -> None:
    with make_llm() as llm:
        llm.generate("one", GREEDY)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="the engine is shut down; make a new one"):
        llm.generate("one")


def test_several_live_in_one_process(make_llm: MakeLLM) -> None:
    first, second = make_llm(), make_llm(block_size=16)
    wanted = answer_text("one")
    assert first.generate("one", GREEDY)[0].outputs[0].text == wanted
    assert second.generate("one", GREEDY)[0].outputs[0].text == wanted
    first.shutdown()
    assert second.generate("one", GREEDY)[0].outputs[0].text == wanted


def test_threads_take_turns(make_llm: MakeLLM) -> None:
    llm = make_llm()
    results: dict[str, str] = {}

    def work(text: str) -> None:
        results[text] = llm.generate(text, GREEDY)[0].outputs[0].text

    threads = [threading.Thread(target=work, args=(text,)) for text in TEXTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {text: answer_text(text) for text in TEXTS}


def test_a_dead_device_is_an_error_that_says_so(make_llm: MakeLLM) -> None:
    runner = ToyRunner()
    llm = make_llm(runner)

    def die(plan: object) -> None:
        raise KernelError("the device is lost")

    runner.on_forward = die
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="the engine stopped: the device is lost"):
            llm.generate(TEXTS, GREEDY)


def test_progress_goes_to_stderr(make_llm: MakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm = make_llm()
    llm.generate(TEXTS, GREEDY)
    assert capsys.readouterr() == ("", "")  # No terminal, no bar.
    llm.generate(TEXTS, GREEDY, progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Generating" in shown.err
    assert "4/4" in shown.err


# Options


def test_options_are_the_configurations_fields() -> None:
    assert EngineOptions.__annotations__.keys() == EngineConfig.__annotations__.keys()


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(TypeError) as refusal:
        LLM("smollm2", max_num_sequences=4)
    assert str(refusal.value) == (
        "LLM has no keyword 'max_num_sequences'; did you mean 'max_num_seqs'?"
    )
    with pytest.raises(TypeError, match="LLM has no keyword 'gpu'; known: block_size, dtype"):
        LLM("smollm2", gpu=True)


def test_vllms_options_that_are_not_here_are_explained() -> None:
    for name, reason in (
        ("gpu_memory_utilization", "it runs on the CPU; num_blocks sizes the KV cache"),
        ("best_of", "not supported yet"),
    ):
        with pytest.raises(TypeError, match=f"LLM has no keyword '{name}': {reason}"):
            LLM("smollm2", **{name: None})
    with pytest.raises(TypeError, match="no keyword 'best_of': not supported yet"):
        SamplingParams(best_of=2)


def test_all_bad_options_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        LLM("smollm2", block_size=7, max_num_seqs=0, max_chunk_tokens=-1, dtype="int3", seed=-1)
    assert str(refusal.value) == (
        "EngineConfig: dtype='int3': want 'auto', 'float32', 'bfloat16'; "
        "block_size=7: want 8, 16, 32; max_num_seqs=0: want 1 to 1048576; "
        "max_chunk_tokens=-1: want 1 to 1073741824, or None for the default; "
        "seed=-1: want 0 to 18446744073709551615"
    )
    with pytest.raises(ConfigError) as refusal:
        LLM("smollm2", dtype="int8", kv_cache_dtype="int4")
    assert str(refusal.value) == (
        "EngineConfig: dtype='int8': want 'auto', 'float32', 'bfloat16'; "
        "kv_cache_dtype='int4': want 'auto', 'float32', 'bfloat16', 'int8'"
    )
    with pytest.raises(ConfigError, match="max_wait_s='x': want 0 to 1e9 seconds, or None"):
        EngineConfig(max_wait_s="x")


def test_a_model_runs_where_torch_cannot_be_imported(repository: object) -> None:
    """In a process of its own. Both front ends, with sampling and log probabilities."""
    script = textwrap.dedent(
        """
        import asyncio, sys

        sys.modules["torch"] = None
        from fastserve import AsyncEngine, LLM, SamplingParams

        params = SamplingParams(temperature=0.7, top_p=0.9, seed=5, max_tokens=8, logprobs=2)
        with LLM("smollm2") as llm:
            one = llm.generate("The capital of France is", params)[0].outputs[0]
        assert len(one.token_ids) == len(one.logprobs) == 8

        async def other():
            async with AsyncEngine("smollm2") as engine:
                async for request in engine.generate("The capital of France is", params):
                    pass
                return request.outputs[0]

        assert asyncio.run(other()).token_ids == one.token_ids
        """
    )
    environment = os.environ | {"PYTHONPATH": f"{repository}/python"}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr


def test_the_loading_bar_is_the_callers_or_ours(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[tuple[int, int]] = []
    with loading("model", lambda *numbers: calls.append(numbers)) as advance:
        advance(1, 2)
    assert calls == [(1, 2)]
    with loading("model") as advance:
        advance(1, 2)
    assert capsys.readouterr() == ("", "")
    with loading("model", True) as advance:
        advance(2, 2)
    assert "Loading model" in capsys.readouterr().err
