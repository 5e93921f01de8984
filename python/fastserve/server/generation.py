"""From a request's body to its answer.

::

    body ─▶ worker thread: parse, template, tokenise ─▶ engine.generate, one a prompt
                                                              │ outputs so far
                     client ◀── JSON, or events ◀── Answers ◀─┘
                     client gone ──▶ the generators are closed, which aborts the request

Nothing that grows with the prompt runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from fastserve.sampling_params import SamplingParams
from fastserve.server.answers import DONE, Answers, encode_event
from fastserve.server.errors import ApiError, as_api_error
from fastserve.server.json_response import json_response
from fastserve.server.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse,
    shortened,
)
from fastserve.server.streams import ClientGone, EventStream, merged, unless_gone

if TYPE_CHECKING:
    from fastserve.async_engine import AsyncEngine
    from fastserve.outputs import RequestOutput
    from fastserve.text.tokenizer import Tokenizer

    Outputs: TypeAlias = AsyncGenerator[tuple[int, RequestOutput], None]

__all__ = ["CLIENT_GONE", "Generation", "Job", "read_job"]

logger = logging.getLogger("fastserve.server")

CLIENT_GONE = 499  # nginx's number for it. Only the log sees it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request, ready for the engine.

    Attributes:
        request: As the client sent it.
        prompts: Token ids, one list a prompt.
        params: The same for all prompts.
    """

    request: GenerationRequest
    prompts: list[list[int]]
    params: SamplingParams


async def read_job(
    request: Request,
    kind: type[GenerationRequest],
    tokenizer: Tokenizer,
    names: tuple[str, ...],
) -> Job:
    """Read, check and tokenise a request in a worker thread.

    Raises:
        ApiError: It is refused.
        ClientGone: The client left before it had sent all of it.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        # A page in a browser may send anything else to a local server without being asked.
        got = content_type or "not given"
        raise ApiError(
            415, f"content-type is {got}; want application/json", code="unsupported_media_type"
        )
    try:
        body = await request.body()
    except ClientDisconnect:
        raise ClientGone from None

    def read() -> Job:
        parsed = parse(kind, body)
        check_model(parsed.model, names)
        params = parsed.sampling_params()
        return Job(request=parsed, prompts=_token_ids(tokenizer, parsed), params=params)

    try:
        return await asyncio.to_thread(read)
    except Exception as error:
        raise as_api_error(error, prompt_param=kind.PROMPT) from error


def check_model(name: str | None, names: tuple[str, ...]) -> None:
    """Refuse a model that is not one of `names`. Naming none means the one there is."""
    if name is not None and name not in names:
        raise ApiError(
            404,
            f"model {shortened(repr(name))} is not served here; served: {', '.join(names)}",
            param="model",
            code="model_not_found",
        )


def _token_ids(tokenizer: Tokenizer, request: GenerationRequest) -> list[list[int]]:
    if isinstance(request, ChatRequest):
        return [tokenizer.apply_chat_template(request.conversation())]
    assert isinstance(request, CompletionRequest)
    return [
        tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        for prompt in request.prompts()
    ]


@dataclass(slots=True, kw_only=True)
class Generation:
    """One job under way: runs it, answers it, and writes one line about it to the log."""

    engine: AsyncEngine
    job: Job
    answers: Answers
    latest: dict[int, RequestOutput] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    async def respond(self, request: Request) -> Response:
        """The answer. What the engine refuses is an error with a status, in a stream too."""
        outputs = self._outputs()
        try:
            if not self.job.request.streams:
                await unless_gone(request.receive, _exhausted(outputs))
                response = json_response(self.answers.whole(self._in_order()))
                self._log("200")
                return response
            await unless_gone(request.receive, anext(outputs))
        except ClientGone:
            self._log(str(CLIENT_GONE))
            return Response(status_code=CLIENT_GONE)
        except Exception as error:
            refusal = as_api_error(error, prompt_param=self.job.request.PROMPT)
            self._log(f"{refusal.status} {refusal.reason}")
            raise refusal from error
        return EventStream(self._events(outputs), outputs.aclose)

    async def _outputs(self) -> Outputs:
        """What the engine has so far, with the number of its prompt; kept in `latest` too."""
        priority = self.job.request.priority or 0
        sources = [
            self.engine.generate(prompt, self.job.params, priority=priority)
            for prompt in self.job.prompts
        ]
        async with aclosing(merged(sources)) as outputs:
            async for number, output in outputs:
                self.latest[number] = output
                for choice in output.outputs:
                    if choice.finish_reason in {"abort", "error"}:
                        raise _broken_off(choice.finish_reason)
                yield number, output

    async def _events(self, outputs: Outputs) -> AsyncGenerator[bytes, None]:
        """The stream, from the outputs that have come already to its end."""
        result = str(CLIENT_GONE)
        try:
            for number, output in list(self.latest.items()):
                for piece in self.answers.pieces(number, output):
                    yield piece
            async for number, output in outputs:
                for piece in self.answers.pieces(number, output):
                    yield piece
            if self.job.request.usage_in_stream:
                yield self.answers.usage_event(self._in_order())
            yield DONE
            result = "200"
        except Exception as error:
            refusal = as_api_error(error, prompt_param=self.job.request.PROMPT)
            result = f"{refusal.status} {refusal.reason}"
            yield encode_event(refusal.envelope())
        finally:
            self._log(result)

    def _in_order(self) -> list[RequestOutput]:
        return [self.latest[number] for number in sorted(self.latest)]

    def _log(self, result: str) -> None:
        outputs = self._in_order()
        logger.info(
            "%s %s: %d prompt tokens (%d cached), %d generated, %.2f s",
            self.answers.PATH,
            result,
            sum(map(len, self.job.prompts)),
            sum(output.num_cached_tokens for output in outputs),
            sum(len(choice.token_ids) for output in outputs for choice in output.outputs),
            time.perf_counter() - self.started,
        )


async def _exhausted(outputs: Outputs) -> None:
    async with aclosing(outputs):
        async for _ in outputs:
            pass


def _broken_off(reason: str) -> ApiError:
    if reason == "abort":
        return ApiError(503, "the server is stopping and broke this request off", code="aborted")
    return ApiError(
        500, "the model failed at this request; the server's log says why", code="error"
    )
