"""The server as the official client sees it, over an engine that answers from a script."""

from __future__ import annotations

import json
import logging
import queue
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from fake_engine import FakeEngine
from fastserve.errors import FastserveError
from fastserve.server import create_app
from live_server import LiveServer, serving

TEXTS = {
    "ascii": "plain text",
    "cjk": "语言模型は言語모델",
    "emoji": "👩‍👩‍👧‍👦👨🏽‍🚀",
    "combining": "e\u0301\u0915\u094d\u0937",
    "line ends": "a\u2028b\u2029c\x85d\r\n\x1ce",
}


ENGINE = FakeEngine(TEXTS)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serving(create_app(ENGINE, served_model_name=["fake", "alias"])) as live:
        yield live


@pytest.fixture(autouse=True)
def engine() -> Iterator[FakeEngine]:
    ENGINE.reset()
    yield ENGINE
    ENGINE.wait_for(lambda: not ENGINE.running)


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


class LogWaiter(logging.Handler):
    """Lets a test wait for the first line of a log."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[str] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.put(record.getMessage())

    def wait(self) -> str:
        return self._lines.get(timeout=30)


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="abc", max_tokens=2)
    assert answer.object == "text_completion"
    assert answer.model == "fake"
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [(0, "cb", "length")]
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 2, 5)
    assert usage.prompt_tokens_details.cached_tokens == 1


def test_cached_tokens_are_there_when_there_are_none(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="a")
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="alias", messages=say("hi"))
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert choice.message.content == "[user]hi[answer]"[::-1]
    assert choice.finish_reason == "length"


@pytest.mark.parametrize("name", TEXTS)
def test_streamed_text_equals_unstreamed_text(client: openai.OpenAI, name: str) -> None:
    whole = client.completions.create(model="fake", prompt=name, max_tokens=100)
    pieces = list(client.completions.create(model="fake", prompt=name, max_tokens=100, stream=True))
    assert whole.choices[0].text == TEXTS[name]
    assert "".join(piece.choices[0].text for piece in pieces) == TEXTS[name]
    assert [piece.choices[0].finish_reason for piece in pieces][-2:] == [None, "length"]
    assert all(piece.usage is None for piece in pieces)


def test_chat_stream(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    pieces = list(
        client.chat.completions.create(
            model="fake", messages=say("hi"), stream=True, stream_options=options
        )
    )
    *body, last = pieces
    assert {piece.object for piece in pieces} == {"chat.completion.chunk"}
    assert len({piece.id for piece in pieces}) == 1
    assert body[0].choices[0].delta.role == "assistant"
    assert all(piece.choices[0].delta.role is None for piece in body[1:])
    text = "".join(piece.choices[0].delta.content or "" for piece in body)
    assert text == "[user]hi[answer]"[::-1]
    assert all(piece.usage is None for piece in body)
    assert last.choices == []
    assert last.usage.total_tokens == 32
    assert last.usage.prompt_tokens_details.cached_tokens == 8


def test_a_stream_is_events_and_ends_with_done(server: LiveServer) -> None:
    body = {"prompt": "line ends", "max_tokens": 100, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = list(response.iter_lines())
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events.pop() == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    assert text == TEXTS["line ends"]


def test_several_choices_of_several_prompts(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": "fake", "prompt": ["ab", "cde"], "n": 2, "max_tokens": 9}
    whole = client.completions.create(**arguments)
    expected = {0: "ba", 1: "ba", 2: "edc", 3: "edc"}
    assert {choice.index: choice.text for choice in whole.choices} == expected
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 10)

    streamed = dict.fromkeys(expected, "")
    for piece in client.completions.create(**arguments, stream=True):
        for choice in piece.choices:
            streamed[choice.index] += choice.text
    assert streamed == expected


def test_prompts_of_token_ids(client: openai.OpenAI) -> None:
    one = client.completions.create(model="fake", prompt=[97, 98])
    two = client.completions.create(model="fake", prompt=[[97, 98], [99]])
    assert [choice.text for choice in one.choices] == ["ba"]
    assert [choice.text for choice in two.choices] == ["ba", "c"]


def test_stop_strings_never_leak(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": "fake", "prompt": "xxDNEyyEzz", "stop": ["END"]}
    whole = client.completions.create(**arguments).choices[0]
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("zzEyy", "stop", "END")
    pieces = [piece.choices[0] for piece in client.completions.create(**arguments, stream=True)]
    assert "".join(piece.text for piece in pieces) == "zzEyy"
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", "END")


def test_completion_logprobs(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": "fake", "prompt": "é!", "logprobs": 2}
    whole = client.completions.create(**arguments).choices[0].logprobs
    assert whole.tokens == ["!", "bytes:\\xc3", "bytes:\\xa9"]
    assert whole.token_logprobs == [-0.5, -0.5, -0.5]
    assert whole.top_logprobs[0] == {"!": -0.5, "\x01": -0.125, "\x03": -0.375}
    streamed = [
        piece.choices[0].logprobs
        for piece in client.completions.create(**arguments, stream=True)
        if piece.choices[0].logprobs
    ]
    assert [token for part in streamed for token in part.tokens] == whole.tokens
    assert [offset for part in streamed for offset in part.text_offset] == whole.text_offset


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=say("é"), logprobs=True, top_logprobs=1, max_tokens=12
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 12
    assert entries[0].token == "]"
    assert entries[0].bytes == [93]
    assert [(top.token, top.logprob) for top in entries[0].top_logprobs] == [("\x01", -0.125)]
    bare = client.chat.completions.create(model="fake", messages=say("é"), logprobs=True)
    assert bare.choices[0].logprobs.content[0].top_logprobs == []


def test_models_and_health(client: openai.OpenAI, server: LiveServer, engine: FakeEngine) -> None:
    assert [model.id for model in client.models.list()] == ["fake", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client.models.retrieve("other")
    assert httpx.get(f"{server.url}/health").status_code == 200
    engine.is_running = False
    response = httpx.get(f"{server.url}/health")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_stopped"


def test_an_error_has_the_envelope_and_the_next_request_works(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake", prompt="x", echo=True)
    assert caught.value.body == {
        "message": "echo is not supported by this server; leave it out",
        "type": "invalid_request_error",
        "param": "echo",
        "code": "unsupported_parameter",
    }
    with pytest.raises(openai.BadRequestError, match="temperature=-1"):
        client.completions.create(model="fake", prompt="x", temperature=-1, stream=True)
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-9", prompt="x")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    assert client.completions.create(model="fake", prompt="ok").choices[0].text == "ko"


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_core_refuses_has_its_status(
    client: openai.OpenAI, engine: FakeEngine, stream: bool
) -> None:
    refusal = type("RequestError", (FastserveError,), {"code": "queue_full", "http_status": 429})
    engine.error = refusal("queue is full: 4 requests wait; retry in about 2.0 s")
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model="fake", prompt="x", stream=stream)
    assert caught.value.code == "queue_full"


def test_a_model_without_template_refuses_chats(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.tokenizer.has_chat_template = False
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=say("hi"))
    assert caught.value.param == "messages"


def test_a_failure_is_answered_without_details(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.fails_after = 1
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="fake", prompt="abc")
    assert "fire" not in str(caught.value)
    with pytest.raises(openai.APIError, match="its log says why"):
        list(client.completions.create(model="fake", prompt="abc", stream=True))
    engine.fails_after = None
    assert client.completions.create(model="fake", prompt="ok").choices[0].text == "ko"


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [("/v1/nothing", "GET", 404), ("/v1/completions", "GET", 405), ("/", "GET", 404)],
)
def test_wrong_routes_have_the_envelope(
    server: LiveServer, path: str, method: str, status: int
) -> None:
    response = httpx.request(method, server.url + path)
    assert response.status_code == status
    assert response.json()["error"]["code"] == "no_such_route"


def test_only_json_is_taken(server: LiveServer) -> None:
    body = json.dumps({"prompt": "x"})
    headers = {"content-type": "text/plain"}
    response = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers)
    assert response.status_code == 415
    assert "want application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_prompts", [1, 3])
def test_a_client_that_goes_away_aborts_its_requests(
    client: openai.OpenAI, server: LiveServer, engine: FakeEngine, stream: bool, num_prompts: int
) -> None:
    prompts = [f"going {number}" for number in range(num_prompts)]
    server.call(engine.gate.clear)
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        body = json.dumps({"prompt": prompts, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        raw.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        engine.wait_for(lambda: len(engine.running) == num_prompts)
    engine.wait_for(lambda: not engine.running)
    assert sorted(engine.aborted) == prompts
    server.call(engine.gate.set)
    assert client.completions.create(model="fake", prompt="ok").choices[0].text == "ko"


def test_a_client_that_leaves_in_its_body_is_one_line_in_the_log(
    client: openai.OpenAI, server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    logged = LogWaiter()
    logging.getLogger("fastserve.server").addHandler(logged)
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n"
        raw.sendall(head + b"content-type: application/json\r\n\r\n{")
    line = logged.wait()
    logging.getLogger("fastserve.server").removeHandler(logged)
    assert line == "/v1/completions 499: left in the middle of the body"
    assert client.completions.create(model="fake", prompt="ok").choices[0].text == "ko"
    assert [record for record in caplog.records if record.exc_info or record.levelno > 20] == []


@pytest.mark.parametrize(
    ("path", "fields", "line"),
    [
        ("completions", {"n": "secret"}, "invalid_type 'n'"),
        ("completions", {"prompt": 5, "n": 1}, "invalid_type 'prompt'"),
        ("completions", {"stop": ["secret"] * 65}, "invalid_parameter 'stop'"),
        ("completions", {"a\nb": 1}, "unknown_parameter 'a\\nb'"),
        ("chat/completions", {"messages": "secret"}, "invalid_type 'messages'"),
    ],
)
def test_the_log_says_why_and_not_what(
    server: LiveServer,
    caplog: pytest.LogCaptureFixture,
    path: str,
    fields: dict[str, Any],
    line: str,
) -> None:
    caplog.set_level(logging.INFO, "fastserve.server")
    body = {"prompt": "secret"} | fields if path == "completions" else fields
    assert httpx.post(f"{server.url}/v1/{path}", json=body).status_code == 400
    assert [record.getMessage() for record in caplog.records if "fastserve" in record.name] == [
        f"/v1/{path} 400: {line}"
    ]


def test_a_refusal_of_the_engine_is_logged_with_its_reason(
    server: LiveServer, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    refusal = type("RequestError", (FastserveError,), {"code": "queue_full", "http_status": 429})
    engine.error = refusal("queue is full")
    caplog.set_level(logging.INFO, "fastserve.server")
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}).status_code == 429
    assert "/v1/completions 429 queue_full: 1 prompt tokens" in caplog.text


def test_a_stream_that_is_left_in_the_middle_is_aborted(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    stream = client.completions.create(
        model="fake", prompt="x" * 4000, max_tokens=4000, stream=True
    )
    next(iter(stream))
    stream.close()
    engine.wait_for(lambda: not engine.running)
    assert engine.aborted == ["x" * 4000]
