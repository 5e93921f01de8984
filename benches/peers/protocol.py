"""JSON lines between the driver and an engine's process.

::

    driver → worker   {"do": "run", "timeout_s": 900, "requests": [...]}      {"do": "stop"}
    worker → driver   {"event": "ready", "version": ..., "load_s": ...}
                      {"event": "done", "start_s": ..., "tracks": [...], "problems": [...]}
                      {"event": "failed", "message": ...}

Time stamps are seconds of ``time.monotonic``, which is one clock for all processes of a machine.
They are taken in the worker where the engine's caller sees a token, kept in memory, and sent when
the run is over, so that the protocol takes no time from what it measures.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from peers.workloads import Request


class ProtocolError(RuntimeError):
    """A line is not what the protocol says. The message has the line and what was expected."""


@dataclass(slots=True)
class Track:
    """What a request's caller saw.

    Attributes:
        name: The request's.
        submitted_s: When it was due, not when the engine had time to take it.
        times_s: When tokens arrived.
        counts: How many arrived then.
    """

    name: str
    submitted_s: float
    times_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that arrived."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Run:
    """Command: answer these requests."""

    requests: list[Request]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Command: end the process."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Event: the engine takes requests. `version` names it, `load_s` is its loading alone."""

    version: str
    load_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """Event: the run is over. `problems` is empty where every request had its tokens in time."""

    start_s: float
    tracks: list[Track]
    problems: list[str]


@dataclass(frozen=True, slots=True)
class Failed:
    """Event: the engine cannot run, or not any more."""

    message: str


Command = Run | Stop
Event = Ready | Done | Failed
_COMMANDS: dict[str, type[Command]] = {"run": Run, "stop": Stop}
_EVENTS: dict[str, type[Event]] = {"ready": Ready, "done": Done, "failed": Failed}
_PARTS = {"requests": Request, "tracks": Track}


def encode(message: Command | Event) -> str:
    """One line, without its end."""
    for key, kinds in (("do", _COMMANDS), ("event", _EVENTS)):
        for name, kind in kinds.items():
            if type(message) is kind:
                return json.dumps({key: name, **asdict(message)}, separators=(",", ":"))
    raise ProtocolError(f"{message!r} is no message of the protocol")


def decode_command(line: str) -> Command:
    """Read a driver's line.

    Raises:
        ProtocolError: It is no command.
    """
    message = _decode(line, "do", _COMMANDS)
    assert isinstance(message, Run | Stop)
    return message


def decode_event(line: str) -> Event:
    """Read a worker's line.

    Raises:
        ProtocolError: It is no event.
    """
    message = _decode(line, "event", _EVENTS)
    assert isinstance(message, Ready | Done | Failed)
    return message


def _decode(line: str, key: str, kinds: dict[str, Any]) -> object:
    shown = line.strip() if len(line) <= 200 else f"{line[:200].strip()}… ({len(line)} characters)"
    if not line.endswith("\n"):
        raise ProtocolError(f"the line is cut short, or the process ended: {shown!r}")
    try:
        fields = json.loads(line)
        kind = kinds[fields.pop(key)]
        for name, part in _PARTS.items():
            if name in fields:
                fields[name] = [part(**item) for item in fields[name]]
        return kind(**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        names = ", ".join(kinds)
        raise ProtocolError(
            f"want a JSON object whose {key!r} is one of {names}; got {shown!r} ({error!r})"
        ) from error
