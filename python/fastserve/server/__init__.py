"""HTTP: an OpenAI-compatible app over an engine (:func:`create_app`), and running it (:func:`run`).

Needs the extra ``server`` (FastAPI and uvicorn).
"""

from __future__ import annotations

try:
    import fastapi as _fastapi
    import uvicorn as _uvicorn
except ImportError as error:
    from fastserve.extras import how_to_install

    raise ImportError(
        f"the server needs {error.name}, which is not installed; "
        f"install it with: {how_to_install('server')}"
    ) from error

from fastserve.server.app import create_app
from fastserve.server.run import bind, run

__all__ = ["bind", "create_app", "run"]

del _fastapi, _uvicorn
