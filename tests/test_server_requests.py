"""What the server takes and refuses, by name."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from fastserve.sampling_params import ParameterError
from fastserve.server.answers import encode_event
from fastserve.server.errors import ApiError, as_api_error
from fastserve.server.json_response import json_response
from fastserve.server.requests import ChatRequest, CompletionRequest, parse

HELLO = [{"role": "user", "content": "hello"}]


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"prompt": "x", **fields}).encode())


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"messages": HELLO, **fields}).encode())


def refusal(call: Any, **fields: Any) -> ApiError:
    with pytest.raises((ApiError, ParameterError)) as caught:
        call(**fields).sampling_params()
    return as_api_error(caught.value)


def test_parameters_reach_the_engine_under_their_names() -> None:
    params = completion(
        n=2,
        temperature=0,
        top_k=5,
        logit_bias={"7": -1},
        logprobs=3,
        stop="x",
        seed=1,
        min_tokens=2,
        max_tokens=9,
        ignore_eos=True,
    ).sampling_params()
    assert (params.n, params.temperature, params.top_k) == (2, 0.0, 5)
    assert (params.logit_bias, params.logprobs, params.stop) == ({7: -1.0}, 3, ("x",))
    assert (params.seed, params.min_tokens, params.max_tokens) == (1, 2, 9)
    assert params.ignore_eos


def test_a_completion_has_a_limit_by_default_and_a_chat_has_none() -> None:
    assert completion().sampling_params().max_tokens == 16
    assert chat().sampling_params().max_tokens is None
    assert chat(max_completion_tokens=5).sampling_params().max_tokens == 5
    assert chat(max_tokens=5).sampling_params().max_tokens == 5


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("x", ["x"]),
        (["x", "y"], ["x", "y"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ("", [""]),
    ],
)
def test_prompts_come_in_four_shapes(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts() == prompts


def test_what_asks_for_nothing_is_taken() -> None:
    chat(tools=[], tool_choice=None, response_format={"type": "text"}, store=False, user="me")
    completion(echo=False, best_of=1, suffix=None, temperature=None, stop=None)
    returned = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None}
    assert chat(messages=[*HELLO, returned]).messages[1].content == "hi"


def test_a_message_of_parts_is_its_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "developer", "content": parts}])
    assert request.conversation() == [{"role": "system", "content": "ab"}]


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
CALL = [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]


@pytest.mark.parametrize(
    ("call", "fields", "message", "param"),
    [
        (completion, {"echo": True}, "echo is not supported by this server; leave it out", "echo"),
        (completion, {"echo": 0}, "echo is not supported by this server; leave it out", "echo"),
        (completion, {"best_of": 3}, "best_of is not supported by this server; leave it out", None),
        (chat, {"tools": [{}]}, "tools is not supported by this server; leave it out", "tools"),
        (
            chat,
            {"response_format": {"type": "json_object"}},
            "response_format is not supported by this server; leave it out",
            "response_format",
        ),
        (
            completion,
            {"topk": 3},
            "topk is not a parameter of this server; did you mean top_k?",
            "topk",
        ),
        (chat, {"beam_width": 3}, "beam_width is not a parameter of this server", "beam_width"),
        (chat, {"": 3}, '"" is not a parameter of this server', '""'),
        (chat, {"str": 3}, "str is not a parameter of this server; did you mean stream?", "str"),
        (
            chat,
            {"stream_options": {"stop": 1}},
            "stream_options.stop is not a parameter of this server",
            "stream_options.stop",
        ),
        (
            chat,
            {"messages": [{"role": "user", "content": "x", "contents": "y"}]},
            "messages[0].contents is not a parameter of this server; did you mean content?",
            "messages[0].contents",
        ),
        (
            completion,
            {"max_tokens": 0},
            "max_tokens=0: want at least 1, or null for 16",
            "max_tokens",
        ),
        (
            chat,
            {"max_tokens": 0},
            "max_tokens=0: want at least 1, or null for up to the model's length",
            "max_tokens",
        ),
        (
            chat,
            {"allowed_token_ids": []},
            "allowed_token_ids=(): want at least one token, or null for all of them",
            "allowed_token_ids",
        ),
        (completion, {"temperature": "1"}, 'temperature="1": want a valid number', "temperature"),
        (completion, {"n": True}, "n=true: want a valid integer", "n"),
        (completion, {"n": 1.5}, "n=1.5: want a valid integer", "n"),
        (completion, {"stop": [1]}, "stop: want text or a list of texts", "stop"),
        (
            completion,
            {"prompt": [1, "a"]},
            "prompt: want text, token ids, a list of texts, or a list of lists of token ids",
            "prompt",
        ),
        (completion, {"prompt": None}, None, "prompt"),
        (completion, {"max_tokens": 0}, None, "max_tokens"),
        (completion, {"temperature": float("nan")}, None, "temperature"),
        (completion, {"stop": ["x"] * 65}, None, "stop"),
        (completion, {"logit_bias": {"7": 101}}, None, "logit_bias"),
        (chat, {"messages": []}, "messages is empty; give at least one", "messages"),
        (chat, {"messages": [{"role": "user"}]}, None, "messages[0].content"),
        (chat, {"messages": [{"role": "user", "content": None}]}, None, "messages[0].content"),
        (chat, {"messages": [{"role": "assistant"}]}, None, "messages[0].content"),
        (chat, {"messages": IMAGE}, None, "messages[0].content"),
        (chat, {"messages": CALL}, None, "messages[0].tool_calls"),
        (chat, {"messages": [{"role": "tool", "content": ""}]}, None, "messages[0].role"),
        (chat, {"top_logprobs": 2}, None, "top_logprobs"),
        (chat, {"max_tokens": 1, "max_completion_tokens": 2}, None, "max_tokens"),
        (chat, {"stream_options": {}}, None, "stream_options"),
        (
            chat,
            {"stream": True, "stream_options": {"x": 1}},
            "stream_options.x is not a parameter of this server",
            "stream_options.x",
        ),
    ],
)
def test_refusals_name_the_parameter(
    call: Any, fields: dict[str, Any], message: str | None, param: str | None
) -> None:
    error = refusal(call, **fields)
    assert error.status == 400
    assert error.param == (param or next(iter(fields)))
    assert message is None or error.message == message


HALF = "\ud800"


@pytest.mark.parametrize(
    ("call", "fields", "param"),
    [
        (completion, {"prompt": f"a{HALF}"}, "prompt"),
        (completion, {"prompt": ["a", "\udfff"]}, "prompt[1]"),
        (completion, {"n": HALF}, "n"),
        (completion, {"stop": ["a", HALF]}, "stop[1]"),
        (completion, {"model": HALF}, "model"),
        (completion, {"user": HALF}, "user"),
        (completion, {"logit_bias": {HALF: 1}}, "logit_bias.\\ud800"),
        (completion, {HALF: 1}, "\\ud800"),
        (completion, {"tools": [{"x": HALF}]}, "tools[0].x"),
        (chat, {"messages": [{"role": "user", "content": HALF}]}, "messages[0].content"),
        (chat, {"messages": [{"role": HALF, "content": "x"}]}, "messages[0].role"),
        (chat, {"messages": [{HALF: 1}]}, "messages[0].\\ud800"),
        (
            chat,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]},
            "messages[0].content[0].text",
        ),
    ],
)
def test_half_a_surrogate_pair_is_refused_wherever_it_is(
    call: Any, fields: dict[str, Any], param: str
) -> None:
    error = refusal(call, **fields)
    assert (error.status, error.code, error.param) == (400, "invalid_text", param)
    assert error.message == (
        f"{param} has half of a surrogate pair; want both halves, or U+FFFD in its place"
    )
    assert json_response(error.envelope()).body


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_completion_tokens": 0}, "max_completion_tokens=0: want at least 1, or null"),
        ({"max_tokens": 0}, "max_tokens=0: want at least 1, or null"),
        (
            {"min_tokens": 9, "max_completion_tokens": 5},
            "min_tokens=9: want at most max_completion",
        ),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens=9: want at most max_tokens=5"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs=21: want 0 to 20"),
    ],
)
def test_a_refusal_has_the_name_that_the_client_used(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(message)):
        chat(**fields).sampling_params()


def test_whole_surrogate_pairs_are_characters() -> None:
    prompt = "\U0001f600 \\ud800"  # Escaped by JSON as a pair, and as a backslash.
    assert completion(prompt=prompt).prompt == prompt
    assert parse(CompletionRequest, b'\xef\xbb\xbf{"prompt":"x"}').prompt == "x"


def test_an_answer_can_be_encoded_whatever_is_in_it() -> None:
    fields = {"a": HALF, "b": "\xe9"}
    assert json.loads(json_response(fields).body) == fields
    assert json.loads(encode_event(fields).removeprefix(b"data: ")) == fields


@pytest.mark.parametrize(
    "fields",
    [
        {"x" * 5000: 1},
        {"logit_bias": {"9" * 5000: 1}},
        {"logit_bias": {"9" * 5000: "x"}},
        {"logit_bias": {str(-number): 1 for number in range(5000)}},
        {"user": ["x" * 5000]},
        {"temperature": 10**400},
        {"logit_bias": {"1": 10**400}},
        {"seed": 10**400},
    ],
)
def test_what_a_client_wrote_is_repeated_shortly(fields: dict[str, Any]) -> None:
    error = refusal(completion, **fields)
    assert error.status == 400
    assert error.param
    assert len(error.message) < 300


def test_an_assistant_may_have_said_nothing() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": None}
    taken = chat(messages=[*HELLO, message]).conversation()
    assert taken[-1] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"\xff",
        b"[" * 100_000,
        b'{"prompt": "\xc3\x28"}',
        b'{"n": ' + b"9" * 5000 + b"}",
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(CompletionRequest, body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_a_missing_prompt_is_named() -> None:
    with pytest.raises(ApiError, match="prompt is missing"):
        parse(CompletionRequest, b"{}")
    with pytest.raises(ApiError, match="messages is missing"):
        parse(ChatRequest, b"{}")
