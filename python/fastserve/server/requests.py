"""What clients may ask, as OpenAI's schemas and the field's common extras name it.

Types are checked here and ranges in :class:`~fastserve.sampling_params.SamplingParams`, which every
front end shares. A parameter is either honoured or refused by name, never ignored. One of OpenAI's
that is not supported is taken in its neutral value (``tools: []``), because clients send those;
``user``, ``safety_identifier`` and ``prompt_cache_key`` are labels that change no answer, and are
taken as such.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from fastserve.keywords import nearest
from fastserve.sampling_params import ParameterError, SamplingParams
from fastserve.server.errors import ApiError
from fastserve.surrogates import half_pair
from fastserve.text.chat_template import as_conversation

__all__ = ["ChatRequest", "CompletionRequest", "GenerationRequest", "parse", "shortened"]

# OpenAI's parameters that are not supported, with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "metadata": (None, {}),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "parallel_tool_calls": (None,),
    "prediction": (None,),
    "prompt_cache_retention": (None,),
    "reasoning_effort": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "verbosity": (None,),
    "web_search_options": (None,),
}
# The same for a message, which clients send back as they got it.
_NEUTRAL_IN_MESSAGE: dict[str, tuple[Any, ...]] = {
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "name": (None,),
    "refusal": (None,),
    "tool_calls": (None, []),
}

# Where several types are taken, pydantic complains about each of them.
_UNIONS = {
    "prompt": "text, token ids, a list of texts, or a list of lists of token ids",
    "stop": "text or a list of texts",
    "content": 'text, or a list of {"type": "text", "text": ...}; nothing else is supported',
}

# How half of a surrogate pair is written in JSON. The halves of a whole pair look like it too.
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")

_MAX_LENGTH = 80
"""Characters of a client's name or value that an error repeats."""

Request = TypeVar("Request", bound="GenerationRequest")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Strict):
    """How a stream is sent."""

    include_usage: bool | None = None


class GenerationRequest(_Strict, ABC):
    """What completions and chat completions have in common."""

    PROMPT: ClassVar[str]
    WITHOUT_MAX_TOKENS: ClassVar[str]

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    priority: int | None = None

    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None

    # Not OpenAI's.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None

    @property
    def streams(self) -> bool:
        """Whether the answer is sent in pieces."""
        return bool(self.stream)

    @property
    def usage_in_stream(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        """Refuse what is wrong in combination only."""
        if self.stream_options is not None and not self.streams:
            raise ApiError(
                400,
                "stream_options is only taken together with stream=true",
                param="stream_options",
                code="invalid_parameter",
            )

    def sampling_params(self) -> SamplingParams:
        """The parameters that the engine takes.

        Raises:
            ParameterError: A value is out of range.
        """
        given = {name: getattr(self, name) for name in _SAMPLING}
        given = {name: value for name, value in given.items() if value is not None}
        try:
            return SamplingParams(**given | self._own_sampling())
        except ParameterError as error:
            raise ParameterError([self._in_json_words(each) for each in error.problems]) from None

    def _in_json_words(self, problem: str) -> str:
        without = f"null for {self.WITHOUT_MAX_TOKENS}"
        problem = problem.replace("None for up to the model's length", without)
        return problem.replace("or None", "or null")

    @abstractmethod
    def _own_sampling(self) -> dict[str, Any]:
        """What this endpoint calls by names of its own."""


_SAMPLING = (
    *("n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("min_tokens", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
    *("allowed_token_ids", "skip_special_tokens"),
)


class CompletionRequest(GenerationRequest):
    """The body of ``POST /v1/completions``."""

    PROMPT: ClassVar[str] = "prompt"
    WITHOUT_MAX_TOKENS: ClassVar[str] = "16"

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one entry each.

        Raises:
            ApiError: The list is empty.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ApiError(
                400,
                "prompt is an empty list; give at least one prompt",
                param="prompt",
                code="empty_prompt",
            )
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def _own_sampling(self) -> dict[str, Any]:
        return {"logprobs": self.logprobs}


class TextPart(_Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None


class ChatRequest(GenerationRequest):
    """The body of ``POST /v1/chat/completions``."""

    PROMPT: ClassVar[str] = "messages"
    WITHOUT_MAX_TOKENS: ClassVar[str] = "up to the model's length"

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them."""
        return as_conversation([message.model_dump() for message in self.messages])

    def check(self) -> None:
        """Refuse what is wrong in combination only."""
        super().check()
        if not self.messages:
            raise ApiError(
                400, "messages is empty; give at least one", param="messages", code="empty_prompt"
            )
        for index, message in enumerate(self.messages):
            if message.content is None and message.role != "assistant":
                param = f"messages[{index}].content"
                raise ApiError(
                    400, f"{param}: want {_UNIONS['content']}", param=param, code="invalid_type"
                )
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise ApiError(
                400,
                f"max_tokens={self.max_tokens} and max_completion_tokens="
                f"{self.max_completion_tokens} mean the same; give one of them",
                param="max_tokens",
                code="invalid_parameter",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(
                400,
                "top_logprobs is only taken together with logprobs=true",
                param="top_logprobs",
                code="invalid_parameter",
            )

    def _in_json_words(self, problem: str) -> str:
        problem = re.sub(r"\blogprobs=", "top_logprobs=", super()._in_json_words(problem))
        if self.max_tokens is not None:
            return problem
        return re.sub(r"\bmax_tokens=", "max_completion_tokens=", problem)

    def _own_sampling(self) -> dict[str, Any]:
        """Without a limit of its own, a chat's answer goes on to its end."""
        limit = self.max_tokens if self.max_tokens is not None else self.max_completion_tokens
        return {
            "max_tokens": limit,
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }


_PARTS: dict[str, type[_Strict]] = {"messages": Message, "stream_options": StreamOptions}
"""What has parameters of its own below the body's."""


def parse(kind: type[Request], body: bytes) -> Request:
    """Read a request's body.

    Raises:
        ApiError: It is no JSON, or a parameter is unknown, unsupported or of the wrong type.
    """
    fields = _without(_loaded(body), _NEUTRAL)
    messages = fields.get("messages")
    if isinstance(messages, list):
        fields["messages"] = [
            _without(message, _NEUTRAL_IN_MESSAGE, f"messages[{index}].")
            if isinstance(message, dict)
            else message
            for index, message in enumerate(messages)
        ]
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        _refuse(kind, error)
    request.check()
    return request


def _loaded(body: bytes) -> dict[str, Any]:
    """The body's object. Its text has whole characters only, so all of it can be encoded again."""
    try:
        text = body.decode("utf-8-sig")  # RFC 8259: nothing but UTF-8 between programs.
        fields = json.loads(text)
        place = _place_of_half_pair(fields) if _HALF_PAIR.search(text) else None
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(";")[0]  # After it Python's advice to programmers.
        raise ApiError(400, f"the body is no JSON: {reason}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body is no JSON object", code="invalid_json")
    if place is not None:
        raise ApiError(
            400,
            f"{place} has half of a surrogate pair; want both halves, or U+FFFD in its place",
            param=place,
            code="invalid_text",
        )
    return fields


def _place_of_half_pair(value: object, place: str = "") -> str | None:
    """The first text in `value` that no encoding has, by its place; ``None`` if all is well."""
    if isinstance(value, str):
        return None if half_pair(value) is None else place
    if isinstance(value, dict):
        for key, item in value.items():
            name = _printable(key)
            where = shortened(f"{place}.{name}" if place else name)
            found = where if name != key else _place_of_half_pair(item, where)
            if found is not None:
                return found
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if (found := _place_of_half_pair(item, f"{place}[{index}]")) is not None:
                return found
    return None


def _printable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _without(
    fields: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]], where: str = ""
) -> dict[str, Any]:
    """`fields` less the unsupported ones that ask for nothing; refuses those that ask."""
    kept = {}
    for name, value in fields.items():
        if name not in neutral:
            kept[name] = value
        elif not any(value == taken and type(value) is type(taken) for taken in neutral[name]):
            raise ApiError(
                400,
                f"{where}{name} is not supported by this server; leave it out",
                param=f"{where}{name}",
                code="unsupported_parameter",
            )
    return kept


def _refuse(kind: type[GenerationRequest], error: ValidationError) -> NoReturn:
    """Say the first of pydantic's findings in this package's words."""
    problem = error.errors(include_url=False, include_context=False)[0]
    *outer, last = problem["loc"]
    is_unknown = problem["type"] == "extra_forbidden"
    place = [part for part in outer if not _names_a_type(part)]
    if is_unknown or not _names_a_type(last):
        place.append(last)
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)[1:]
    param = shortened(param)
    name = next((part for part in reversed(place) if isinstance(part, str)), "")
    if problem["type"] == "missing":
        message, code = f"{param} is missing", "missing_parameter"
    elif is_unknown:
        known = _PARTS.get(str(place[0]), kind).model_fields
        near = nearest(name, known)
        remedy = "" if near is None else f"; did you mean {near}?"
        param = param or '""'
        message, code = f"{param} is not a parameter of this server{remedy}", "unknown_parameter"
    elif name in _UNIONS:
        message, code = f"{param}: want {_UNIONS[name]}", "invalid_type"
    else:
        want = problem["msg"].removeprefix("Input should be ")
        want = want.replace("dictionary or instance of", "object with the fields of")
        message, code = f"{param}={_shown(problem['input'])}: want {want}", "invalid_type"
    raise ApiError(400, message, param=param, code=code) from None


def _names_a_type(part: str | int) -> bool:
    """Whether a step of pydantic's path names an alternative of a union, not a place."""
    return isinstance(part, str) and (part in {"str", "int"} or "[" in part)


def _shown(value: object) -> str:
    return shortened(json.dumps(value, ensure_ascii=False, default=str))


def shortened(text: str) -> str:
    """What a client wrote, as an error repeats it."""
    return text if len(text) <= _MAX_LENGTH else text[: _MAX_LENGTH - 3] + "..."
