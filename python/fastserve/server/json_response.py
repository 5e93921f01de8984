"""Plain JSON answers, encoded without validation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from starlette.responses import Response

__all__ = ["SURROGATES", "json_response"]

SURROGATES: Final = "backslashreplace"
"""How to encode JSON whatever is in it: half of a surrogate pair becomes its escape in JSON."""


def json_response(fields: Mapping[str, Any], status: int = 200) -> Response:
    """`fields` as a response."""
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    body = text.encode(errors=SURROGATES)
    return Response(body, status_code=status, media_type="application/json")
