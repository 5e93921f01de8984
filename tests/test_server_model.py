"""The server over a real engine and a tiny random model, through the official client."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fastserve import LLM, AsyncEngine, SamplingParams
from fastserve.server import create_app
from live_server import LiveServer, serving
from model_factory import make

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_blocks": 96,
    "block_size": 8,
    "max_num_batched_tokens": 64,
    "num_threads": 1,
}
PROMPTS = ["the quick brown", "これは テスト", "naïve 👩‍👩‍👧‍👦", "def f(x):\n    return"]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[AsyncEngine]:
    with AsyncEngine(folder, **OPTIONS) as running:
        yield running


@pytest.fixture(scope="module")
def server(engine: AsyncEngine) -> Iterator[LiveServer]:
    with serving(create_app(engine, served_model_name=["tiny"])) as live:
        yield live


@pytest.fixture
def client(server: LiveServer, engine: AsyncEngine) -> Iterator[openai.OpenAI]:
    """A client; afterwards the engine is idle and no block is lost."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
        client.completions.create(**GREEDY, prompt="the next request is served", max_tokens=1)
    stats = engine.stats()
    assert stats["num_running"] == stats["num_waiting"] == stats["held"] == 0
    assert stats["free"] + stats["cached"] == stats["capacity"]


def test_greedy_answers_are_those_of_the_library(client: openai.OpenAI, folder: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    with LLM(folder, progress=False, **OPTIONS) as llm:
        expected = [o.outputs[0] for o in llm.generate(PROMPTS, params, progress=False)]
        chat = llm.chat([{"role": "user", "content": "hi"}], params, progress=False)[0].outputs[0]
    answer = client.completions.create(**GREEDY, prompt=PROMPTS, max_tokens=24)
    got = sorted(answer.choices, key=lambda choice: choice.index)
    assert [choice.text for choice in got] == [output.text for output in expected]
    assert [choice.finish_reason for choice in got] == [o.finish_reason for o in expected]
    messages = [{"role": "user", "content": "hi"}]
    one = client.chat.completions.create(**GREEDY, messages=messages, max_completion_tokens=24)
    assert one.choices[0].message.content == chat.text


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("stop", [None, [" ", "e"]])
def test_streams_add_up(client: openai.OpenAI, prompt: str, stop: Any) -> None:
    arguments = {**GREEDY, "prompt": prompt, "max_tokens": 40, "stop": stop, "seed": 3, "n": 2}
    arguments["temperature"] = 1.5
    options = {"include_usage": True}
    whole = client.completions.create(**arguments)
    streamed = {choice.index: "" for choice in whole.choices}
    reasons = {}
    stream = client.completions.create(**arguments, stream=True, stream_options=options)
    *pieces, last = list(stream)
    for piece in pieces:
        for choice in piece.choices:
            streamed[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert streamed == {choice.index: choice.text for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    if stop:
        assert not any(string in text for text in streamed.values() for string in stop)


def test_token_ids_are_prompts_as_good_as_text(client: openai.OpenAI, engine: AsyncEngine) -> None:
    ids = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
    texts = client.completions.create(**GREEDY, prompt=PROMPTS, max_tokens=5)
    tokens = client.completions.create(**GREEDY, prompt=ids, max_tokens=5)
    assert [c.text for c in texts.choices] == [c.text for c in tokens.choices]
    assert texts.usage.prompt_tokens == sum(map(len, ids))


def test_a_repeated_prompt_is_cached(client: openai.OpenAI) -> None:
    arguments = {**GREEDY, "prompt": list(range(100, 133)), "max_tokens": 1}
    cold = client.completions.create(**arguments).usage
    warm = client.completions.create(**arguments).usage
    assert cold.prompt_tokens_details.cached_tokens == 0
    assert warm.prompt_tokens_details.cached_tokens == 32


def test_logprobs_belong_to_the_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        **GREEDY,
        messages=[{"role": "user", "content": "naïve"}],
        max_tokens=8,
        logprobs=True,
        top_logprobs=3,
        extra_body={"ignore_eos": True},
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens == 8
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        # Greedy: the token is the best one.
        assert (entry.token, entry.logprob) == (
            entry.top_logprobs[0].token,
            entry.top_logprobs[0].logprob,
        )
    raw = b"".join(bytes(entry.bytes) for entry in entries)
    assert raw.decode(errors="replace") == answer.choices[0].message.content


REFUSALS: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({"prompt": ""}, 400, "prompt is empty; a request needs at least one token", "prompt"),
    ({"prompt": []}, 400, "prompt is an empty list; give at least one prompt", "prompt"),
    (
        {"prompt": [5, 320]},
        400,
        "token id 320 at position 1 is outside the vocabulary of 320 (0 to 319)",
        "prompt",
    ),
    (
        {"prompt": [5] * 512},
        400,
        "prompt has 512 tokens; with one to generate that is more than max_model_len=512; "
        "shorten the prompt",
        "prompt",
    ),
    (
        {"prompt": "x", "max_tokens": 0},
        400,
        "max_tokens=0: want at least 1, or null for 16",
        "max_tokens",
    ),
    (
        {"prompt": "x", "max_tokens": -3},
        400,
        "max_tokens=-3: want at least 1, or null for 16",
        "max_tokens",
    ),
    (
        {"prompt": "x", "stop": ["a"] * 65},
        400,
        "stop=65 strings: want at most 64; leave some out",
        "stop",
    ),
    (
        {"prompt": "x", "temprature": 1},
        400,
        "temprature is not a parameter of this server; did you mean temperature?",
        "temprature",
    ),
    (
        {"prompt": "x", "stop_token_ids": [320]},
        400,
        "stop_token_ids has token 320: want 0 to 319",
        "stop_token_ids",
    ),
    (
        {"prompt": "x", "logit_bias": {"320": 1}},
        400,
        "logit_bias has token 320: want 0 to 319",
        "logit_bias",
    ),
    ({"prompt": "x", "logprobs": 21}, 400, "logprobs=21: want 0 to 20", "logprobs"),
    (
        {"prompt": "x", "model": "big"},
        404,
        "model 'big' is not served here; served: tiny",
        "model",
    ),
]


@pytest.mark.parametrize(("fields", "status", "message", "param"), REFUSALS)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_is_refused_and_the_next_request_served(
    client: openai.OpenAI,
    server: LiveServer,
    fields: dict[str, Any],
    status: int,
    message: str,
    param: str | None,
    stream: bool,
) -> None:
    response = httpx.post(f"{server.url}/v1/completions", json={**fields, "stream": stream})
    error = response.json()["error"]
    assert (response.status_code, error["message"], error["param"]) == (status, message, param)


def test_nan_is_refused(client: openai.OpenAI, server: LiveServer) -> None:
    response = httpx.post(
        f"{server.url}/v1/completions",
        content=b'{"prompt": "x", "temperature": NaN}',
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 400
    assert response.json()["error"]["message"] == (
        "temperature=nan: want a finite number, 0 or more"
    )


def test_beyond_the_window_an_answer_ends_with_length(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        **GREEDY, prompt=[5] * 500, max_tokens=10_000, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12


def test_more_requests_than_the_pool_holds_all_end(client: openai.OpenAI) -> None:
    prompts = [[number] * 40 for number in range(10, 42)]
    answer = client.completions.create(**GREEDY, prompt=prompts, max_tokens=30)
    assert len(answer.choices) == 32


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_gives_its_blocks_back(
    client: openai.OpenAI, server: LiveServer, engine: AsyncEngine, stream: bool
) -> None:
    aborted = engine.stats()["num_finished_abort"]
    body = json.dumps(
        {"prompt": [7] * 9, "max_tokens": 500, "ignore_eos": True, "n": 3, "stream": stream}
    ).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        raw.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        if stream:
            assert raw.recv(100).startswith(b"HTTP/1.1 200")
        else:
            asyncio.run(_until(lambda: engine.stats()["num_running"] > 0))
    asyncio.run(_until(lambda: engine.stats()["num_finished_abort"] == aborted + 3))
    asyncio.run(_until(lambda: engine.stats()["held"] == 0))


async def _until(condition: Any) -> None:
    """Until another thread has made `condition` true."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


def test_a_shutdown_ends_open_streams_with_an_error(folder: Path) -> None:
    engine = AsyncEngine(folder, **OPTIONS)
    with serving(create_app(engine)) as live:
        body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            engine.shutdown()
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "aborted"
        refused = httpx.post(f"{live.url}/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_stopped"
        assert httpx.get(f"{live.url}/health").status_code == 503
