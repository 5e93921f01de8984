"""The requests of an engine that have not been settled, by number and by the caller's name."""

from __future__ import annotations

import threading

from fastserve.active_request import ActiveRequest
from fastserve.core import RequestError
from fastserve.errors import EngineDeadError

__all__ = ["RequestTable"]


class RequestTable:
    """Shared by the threads that submit and the one that steps.

    A name may be used again as soon as its request has finished or been aborted; a number never is.

    Attributes:
        closed: Why no request is taken any more; ``None`` while they are.
    """

    def __init__(self) -> None:
        self.closed: str | None = None
        self._lock = threading.Lock()
        self._requests: dict[int, ActiveRequest] = {}
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, number: int) -> ActiveRequest | None:
        """The request with the core's id `number`."""
        return self._requests.get(number)

    def find(self, request_id: str) -> ActiveRequest | None:
        """The request whose caller calls it `request_id`."""
        with self._lock:
            return self._requests.get(self._numbers.get(request_id, 0))

    def check_open(self) -> None:
        """Raise :class:`EngineDeadError` if the table is closed."""
        if self.closed is not None:
            raise EngineDeadError(self.closed)

    def add(self, request: ActiveRequest) -> None:
        """Enter a new request.

        Raises:
            RequestError: Its name is in use.
            EngineDeadError: The table is closed.
        """
        with self._lock:
            self.check_open()
            if request.request_id in self._numbers:
                error = RequestError(
                    f"request id {request.request_id!r} is in use by a request that has not ended; "
                    "choose another"
                )
                error.code, error.http_status = "duplicate_request", 409
                raise error
            self._requests[request.number] = request
            self._numbers[request.request_id] = request.number

    def free_name(self, request: ActiveRequest) -> None:
        """Let the caller use the name again; a newer request may have it already."""
        with self._lock:
            self._free_name(request)

    def remove(self, request: ActiveRequest) -> None:
        """The core will not name it again."""
        with self._lock:
            self._requests.pop(request.number, None)
            self._free_name(request)

    def close(self, why: str) -> list[ActiveRequest]:
        """Take no more requests, and take out those that are there."""
        with self._lock:
            self.closed = why
            taken = list(self._requests.values())
            self._requests.clear()
            self._numbers.clear()
        return taken

    def _free_name(self, request: ActiveRequest) -> None:
        if self._numbers.get(request.request_id) == request.number:
            del self._numbers[request.request_id]
