"""OpenAI's error envelope, and the one mapping from this package's errors to it.

::

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

``param`` names the request's parameter at fault, ``code`` is stable and for machines.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from fastserve.errors import EngineDeadError, FastserveError, ModelError

__all__ = ["ApiError", "as_api_error"]

logger = logging.getLogger("fastserve.server")

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_ABOUT_THE_PROMPT = frozenset({"empty_prompt", "context_length_exceeded", "token_out_of_range"})


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: HTTP status.
        message: Value, limit and remedy.
        param: The request's parameter that is meant, if one is.
        code: Stable machine-readable name of the kind of error.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def reason(self) -> str:
        """What a log may say of it: nothing that the client wrote but an unknown name."""
        code = self.code or "refused"
        return code if self.param is None else f"{code} {self.param!a}"

    def envelope(self) -> dict[str, Any]:
        """The answer's body."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def as_api_error(error: Exception, *, prompt_param: str | None = None) -> ApiError:
    """What to answer for `error`. A bug is logged here and answered without its details.

    Args:
        error: Whatever went wrong.
        prompt_param: What this request calls its prompt: ``prompt`` or ``messages``.
    """
    if isinstance(error, ApiError):
        return error
    message = str(error)
    status, code = getattr(error, "http_status", None), getattr(error, "code", None)
    if isinstance(error, FastserveError) and status is not None:  # RequestError, ParameterError
        param = prompt_param if code in _ABOUT_THE_PROMPT else _named(message)
        return ApiError(status, message, param=param, code=code)
    if isinstance(error, EngineDeadError):
        return ApiError(503, f"{message}; restart the server", code="engine_stopped")
    if isinstance(error, ModelError):
        return ApiError(400, message, param=prompt_param, code="unsupported_by_model")
    if isinstance(error, FastserveError) and not isinstance(error, RuntimeError):
        return ApiError(400, message)
    logger.error("a request failed: %s", message, exc_info=error)
    return ApiError(500, "the server failed at this request; its log says why", code="internal")


def _named(message: str) -> str | None:
    """The parameter of ``name=value: want …`` or the like, as this package's errors say it."""
    match = re.match(r"(\w+)(?:=|\[| has token )", message)
    return match[1] if match else None
