"""Waiting for several answers at once, and stopping when nobody waits for them any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["ClientGone", "EventStream", "merged", "unless_gone"]

Item = TypeVar("Item")
Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


async def merged(
    sources: Sequence[AsyncGenerator[Item, None]],
) -> AsyncGenerator[tuple[int, Item], None]:
    """Items of all `sources` as they come, each with its source's number.

    The first error of one ends all. A slow reader holds the sources back: at most one item of each
    is waiting. Closing this closes them.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for item in only:
                yield 0, item
        return
    ready: asyncio.Queue[tuple[int, Item]] = asyncio.Queue(maxsize=1)

    async def forward(number: int, source: AsyncGenerator[Item, None]) -> None:
        async with aclosing(source):
            async for item in source:
                await ready.put((number, item))

    tasks = [asyncio.create_task(forward(*source)) for source in enumerate(sources)]
    try:
        async for numbered in _until_done(ready, tasks):
            yield numbered
    finally:
        await _cancel(tasks)


async def _until_done(
    ready: asyncio.Queue[Item], tasks: Sequence[asyncio.Task[None]]
) -> AsyncIterator[Item]:
    """What comes through `ready` until all `tasks` are done; raises what one of them raised."""
    running = set(tasks)
    getter = asyncio.create_task(ready.get())
    try:
        while running or not ready.empty() or getter.done():
            done, _ = await asyncio.wait({*running, getter}, return_when=asyncio.FIRST_COMPLETED)
            for task in done & running:
                task.result()
            running -= done
            if getter in done:
                item = getter.result()
                getter = asyncio.create_task(ready.get())
                yield item
    finally:
        await _cancel([getter])


async def unless_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """Wait for `work`, and cancel it when the client goes away.

    The request's body must have been read: what `receive` says after it is that the client left.

    Raises:
        ClientGone: The client left first. `work` has been cancelled and has cleaned up.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _cancel([task, gone])


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel `tasks` and wait until they have cleaned up. Their errors were somebody's already."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events from `events`, stopped when the client goes away.

    Args:
        events: Encoded events.
        close: Called when the stream is over, however it ended. ``events`` may not have been
            started by then, so it cannot clean up by itself.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, as ASGI wants it."""
        try:
            await unless_gone(receive, self._send_all(send))
        except (ClientGone, OSError):
            pass
        finally:
            await self._events.aclose()
            await self._close()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
