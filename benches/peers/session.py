"""One engine's process, from its start to its end."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers import workloads
from peers.load import CpuTime, cpu_time, peak_bytes
from peers.protocol import (
    Command,
    Done,
    Event,
    Failed,
    ProtocolError,
    Ready,
    Run,
    Stop,
    decode_event,
    encode,
)
from peers.workloads import Request

_PACKAGE = Path(__file__).parent
_END_S = 15.0


class EngineError(RuntimeError):
    """The engine did not start, or ended. The message is one line."""


class Session:
    """A worker with an engine in it. A context manager: the process ends with the block.

    Args:
        python: The interpreter of the engine's environment.
        adapter: A key of ``worker.ENGINES``.
        options: For the adapter.
        variables: Of the process's environment, beside the caller's.
        log: Where the engine's own output goes.

    Raises:
        EngineError: It does not start.
    """

    def __init__(
        self,
        python: Path,
        adapter: str,
        options: Mapping[str, Any],
        variables: Mapping[str, str],
        log: Path,
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._start_s = time.monotonic()
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [str(python), "-m", "peers.worker", adapter, json.dumps(dict(options))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env={**os.environ, **variables},
                start_new_session=True,
            )
        try:
            ready = self._receive()
            if not isinstance(ready, Ready):
                raise EngineError(f"{ready} (see {log})")
            self.version = ready.version
            self.first_token_s = self._first_token()
            self.run(workloads.warm_up(seed=99), timeout_s=600.0)
        except BaseException:
            self._end()
            raise

    def run(self, requests: list[Request], timeout_s: float) -> Done:
        """Have the engine answer requests.

        Raises:
            EngineError: It ended, or broke the protocol.
        """
        self._send(Run(requests, timeout_s))
        done = self._receive()
        if not isinstance(done, Done):
            raise EngineError(f"{done} (see {self._log})")
        return done

    def cpu_time(self) -> CpuTime:
        """Of the machine, and of this program with the engine."""
        return cpu_time(os.getpid())

    def peak_bytes(self) -> int:
        """Largest memory of the engine's processes so far; see :func:`load.peak_bytes`."""
        return peak_bytes(self._process.pid)

    def _first_token(self) -> float:
        """Seconds from the start of the process to the first token of the first request."""
        done = self.run(workloads.first_request(seed=98), timeout_s=600.0)
        if done.problems or not done.tracks[0].times_s:
            raise EngineError(f"the first request failed: {done.problems} (see {self._log})")
        return done.tracks[0].times_s[0] - self._start_s

    def _send(self, command: Command) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(encode(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise EngineError(f"the process has ended (see {self._log})") from error

    def _receive(self) -> Event:
        assert self._process.stdout is not None
        try:
            event = decode_event(self._process.stdout.readline())
        except ProtocolError as error:
            code = self._process.poll()
            raise EngineError(f"{error} (exit {code}; see {self._log})") from error
        if isinstance(event, Failed):
            raise EngineError(f"{event.message.splitlines()[0]} (see {self._log})")
        return event

    def _end(self) -> None:
        """Ask, then wait, then end the process and its children."""
        with contextlib.suppress(EngineError, subprocess.TimeoutExpired):
            self._send(Stop())
            self._process.wait(_END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)  # Its own session: nobody else is in the group.
        self._process.wait()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()


def package_path() -> str:
    """What ``PYTHONPATH`` must have for a worker to find this package."""
    return str(_PACKAGE.parent)
