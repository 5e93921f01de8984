"""Plain JSON answers, encoded without validation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

__all__ = ["json_response"]


def json_response(fields: Mapping[str, Any], status: int = 200) -> Response:
    """`fields` as a response."""
    body = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    return Response(body, status_code=status, media_type="application/json")
