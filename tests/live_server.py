"""A real uvicorn on an ephemeral loopback port, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from fastserve.server import bind


class LiveServer:
    """Where it listens, and a way to run something on its event loop."""

    def __init__(self, app: FastAPI) -> None:
        self._place = bind("127.0.0.1", 0)
        self.port: int = self._place.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
        self._server = uvicorn.Server(config)
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(30), "the server did not start"

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server did not stop"

    def call(self, function: object, *args: object) -> None:
        """Run a plain function on the server's loop and wait for it."""
        done = threading.Event()
        self.loop.call_soon_threadsafe(lambda: (function(*args), done.set()))
        assert done.wait(30)

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        task = asyncio.create_task(self._server.serve(sockets=[self._place]))
        while not self._server.started and not task.done():
            await asyncio.sleep(0)
        self._started.set()
        await task


@contextmanager
def serving(app: FastAPI) -> Iterator[LiveServer]:
    """Serve `app` for the length of the block."""
    server = LiveServer(app)
    server.start()
    try:
        yield server
    finally:
        server.stop()
