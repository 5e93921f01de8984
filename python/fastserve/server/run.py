"""Run an app on a socket until a signal ends it.

======== ===============================================================================
signal   effect
======== ===============================================================================
SIGINT   Stop at once: running requests are aborted, their streams end with an error.
SIGTERM  Drain: take nothing new, finish what runs for up to ``shutdown_timeout_s``.
another  Stop at once.
======== ===============================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import uvicorn

if TYPE_CHECKING:
    from fastapi import FastAPI

    from fastserve.async_engine import AsyncEngine

__all__ = ["bind", "run"]

logger = logging.getLogger("fastserve.server")

_LAST_WORDS_S: Final = 5
"""What clients get to hear that they were broken off."""


def bind(host: str, port: int) -> socket.socket:
    """A listening place, taken before the model is loaded: a taken port shows at once.

    Raises:
        OSError: It cannot be had; the message says why and what to do.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        place = socket.socket(family, kind, protocol)
        try:
            place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            place.bind(address)
        except OSError:
            place.close()
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(
            f"cannot listen on {host}:{port}: {reason.lower()}; choose another --host or --port"
        ) from None
    return place


def run(
    app: FastAPI,
    engine: AsyncEngine,
    place: socket.socket,
    *,
    shutdown_timeout_s: float = 30.0,
    on_ready: Callable[[], None] = lambda: None,
) -> int:
    """Serve `app` on `place` until a signal comes. Returns the number of the first one.

    Call it in the main thread. The engine is shut down when this returns.

    Args:
        app: Over `engine`.
        engine: What is shut down.
        place: From :func:`bind`.
        shutdown_timeout_s: How long running requests get at SIGTERM.
        on_ready: Called when connections are taken.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        # What has not ended in time is ended by the engine, which says so to its clients.
        timeout_graceful_shutdown=max(1, round(shutdown_timeout_s)) + _LAST_WORDS_S,
    )
    return asyncio.run(_run(_Server(config, on_ready), engine, place, shutdown_timeout_s))


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: it would raise the signal again at the end."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _run(
    server: _Server, engine: AsyncEngine, place: socket.socket, shutdown_timeout_s: float
) -> int:
    first_signal = 0
    stopping: asyncio.Future[None] | None = None
    loop = asyncio.get_running_loop()

    def stop() -> None:
        nonlocal stopping
        if stopping is None:
            # Every open request ends with an error then, so that uvicorn has nothing to wait for.
            stopping = loop.run_in_executor(None, engine.shutdown)

    def on_signal(number: int) -> None:
        nonlocal first_signal
        at_once = number == signal.SIGINT or first_signal != 0
        first_signal = first_signal or number
        server.should_exit = True
        if at_once:
            stop()
        else:
            loop.call_later(shutdown_timeout_s, stop)
        logger.info("stopping" if at_once else "finishing what runs; another signal stops at once")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await server.serve(sockets=[place])
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        await (stopping or loop.run_in_executor(None, engine.shutdown))
    return first_signal
