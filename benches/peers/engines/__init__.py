"""Adapters: what an engine must do to be measured. One module an engine, imported in its process.

Keys of the options: ``model`` (path), ``precision`` (``bf16``, ``int8`` or ``q8_0``), ``threads``,
``dtype`` (what an engine on torch computes in), and the engine's own, from ``settings.py``.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any, Protocol, TypeAlias

from peers.workloads import Request

Options: TypeAlias = dict[str, Any]


class Reports(Protocol):
    """Where an adapter says what its caller sees; see ``worker.Recorder``."""

    def tokens(self, name: str, count: int) -> None: ...

    def finished(self, name: str) -> None: ...

    def failed(self, name: str, message: str) -> None: ...


class Engine(ABC):
    """An engine in this process, or one that this process started.

    Attributes:
        version: Name and version, and whatever else a reader must know of how it runs.
        recorder: Of the run that goes on.
    """

    version: str = ""
    recorder: Reports

    def __init__(self, options: Options) -> None:
        self.options = options

    @abstractmethod
    def start(self) -> None:
        """Load the model. Returns when requests may come."""

    def stop(self) -> None:  # noqa: B027
        """Give back what the end of the process would not: by default nothing."""


class OnlineEngine(Engine):
    """An engine that takes requests one by one, as they come."""

    @abstractmethod
    def submit(self, request: Request) -> None:
        """Begin to answer. Never waits for the answer."""


class BatchEngine(Engine):
    """An engine that takes whole batches."""

    @abstractmethod
    def submit_batch(self, requests: list[Request]) -> None:
        """Answer them all."""


class StreamingEngine(OnlineEngine):
    """An engine whose callers are coroutines, all in one event loop on a thread of its own."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.loop = asyncio.new_event_loop()
        self._tasks: set[Any] = set()  # The loop itself holds tasks only weakly.
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    @abstractmethod
    def stream(self, request: Request) -> AsyncIterator[int]:
        """Numbers of new tokens, as they come."""

    def submit(self, request: Request) -> None:
        task = asyncio.run_coroutine_threadsafe(self._answer(request), self.loop)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: Request) -> None:
        reports = self.recorder
        try:
            async for count in self.stream(request):
                reports.tokens(request.name, count)
            reports.finished(request.name)
        except Exception as error:
            reports.failed(request.name, repr(error))
