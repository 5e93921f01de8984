"""The OpenAI-compatible HTTP server as an ASGI app over one engine.

``POST /v1/completions`` and ``/v1/chat/completions`` (streaming and not), ``GET /v1/models`` and
``/health``. :mod:`fastserve.server.generation` has a request's life.

There is no global state: two apps over two engines live in one process, and an app can be mounted
in another. The engine belongs to the caller, who shuts it down.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from fastserve.errors import ModelError
from fastserve.server.answers import Answers, ChatAnswers, CompletionAnswers
from fastserve.server.errors import ApiError, as_api_error
from fastserve.server.generation import CLIENT_GONE, Generation, check_model, read_job
from fastserve.server.json_response import json_response
from fastserve.server.requests import ChatRequest, CompletionRequest, GenerationRequest
from fastserve.server.streams import ClientGone

if TYPE_CHECKING:
    from fastserve.async_engine import AsyncEngine
    from fastserve.text.tokenizer import Tokenizer

__all__ = ["create_app"]

logger = logging.getLogger("fastserve.server")


def create_app(engine: AsyncEngine, *, served_model_name: Sequence[str] = ()) -> FastAPI:
    """An app that serves `engine`.

    Args:
        engine: Running; stays the caller's.
        served_model_name: Names that requests may give as ``model``; answers carry the first one.
            By default the model's own name.

    Raises:
        ModelError: The engine has no tokenizer.
    """
    if engine.tokenizer is None:
        raise ModelError("the server needs the model's tokenizer; leave out skip_tokenizer_init")
    names = tuple(served_model_name) or (engine.model_name,)
    api = _Api(engine, engine.tokenizer, names)
    app = FastAPI(title="fastserve", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_api_route("/v1/completions", api.completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", api.chat_completions, methods=["POST"])
    app.add_api_route("/v1/models", api.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", api.model, methods=["GET"])
    app.add_api_route("/health", api.health, methods=["GET"])
    app.add_exception_handler(ApiError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(Exception, _answer_error)
    return app


class _Api:
    """The routes over one engine."""

    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer, names: tuple[str, ...]) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._names = names
        self._created = int(time.time())

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest, CompletionAnswers)

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest, ChatAnswers)

    async def models(self) -> Response:
        return json_response(
            {"object": "list", "data": [self._model(name) for name in self._names]}
        )

    async def model(self, name: str) -> Response:
        check_model(name, self._names)
        return json_response(self._model(name))

    async def health(self) -> Response:
        if self._engine.is_running:
            return json_response({"status": "ok"})
        raise ApiError(
            503, "the engine does not run any more; restart the server", code="engine_stopped"
        )

    async def _generate(
        self, request: Request, kind: type[GenerationRequest], shape: type[Answers]
    ) -> Response:
        try:
            job = await read_job(request, kind, self._tokenizer, self._names)
        except ClientGone:
            logger.info("%s %d: left in the middle of the body", shape.PATH, CLIENT_GONE)
            return Response(status_code=CLIENT_GONE)
        except ApiError as refusal:
            logger.info("%s %d: %s", shape.PATH, refusal.status, refusal.reason)
            raise
        answers = shape(
            self._names[0],
            self._tokenizer.table,
            job.params,
            usage_in_stream=job.request.usage_in_stream,
        )
        return await Generation(engine=self._engine, job=job, answers=answers).respond(request)

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "fastserve",
            "max_model_len": self._engine.max_model_len,
        }


async def _answer_error(_: Request, error: Exception) -> Response:
    refusal = as_api_error(error)
    return json_response(refusal.envelope(), refusal.status)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """What the router has to say: no such path, or not by this method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail.lower()}"
    refusal = ApiError(error.status_code, message, code="no_such_route")
    response = json_response(refusal.envelope(), refusal.status)
    response.headers.update(error.headers or {})
    return response
