"""An engine's process: reads commands on stdin, runs them, writes events on stdout.

    PYTHONPATH=benches VENV/bin/python -m peers.worker ENGINE OPTIONS_AS_JSON

The engine's own output goes to stderr, whatever it does to stdout. Only the engine's module is
imported, so the process has what that engine's environment has and no more.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from typing import TextIO

from peers.engines import BatchEngine, Engine, OnlineEngine, Options
from peers.protocol import Done, Failed, Ready, Run, Track, decode_command, encode
from peers.workloads import Request

ENGINES = {
    "fastserve": ("peers.engines.fastserve_engine", "Fastserve"),
    "vllm": ("peers.engines.vllm_engine", "Vllm"),
    "openvino": ("peers.engines.openvino_engine", "OpenVino"),
    "llama": ("peers.engines.llama_engine", "Llama"),
    "transformers": ("peers.engines.transformers_engine", "Transformers"),
}


class Recorder:
    """What the callers of one run see. Any thread may report; a report is stamped on arrival."""

    def __init__(self, requests: list[Request], start_s: float) -> None:
        self.tracks = {
            request.name: Track(request.name, start_s + request.at_s) for request in requests
        }
        self.problems: list[str] = []
        self._wanted = {request.name: request.num_tokens for request in requests}
        self._open = set(self._wanted)
        self._changed = threading.Condition()

    def tokens(self, name: str, count: int) -> None:
        """`count` more tokens of a request. Reports of requests of an earlier run are dropped."""
        now = time.monotonic()
        track = self.tracks.get(name)
        if track is not None and count > 0:
            track.times_s.append(now)
            track.counts.append(count)

    def finished(self, name: str) -> None:
        """The engine says that a request is over; a wrong number of tokens is a problem."""
        if name in self._wanted:
            got, wanted = self.tracks[name].num_tokens, self._wanted[name]
            problem = None if got == wanted else f"{name}: {got} tokens, wanted {wanted}"
            self._close(name, problem)

    def failed(self, name: str, message: str) -> None:
        """A request ended without its answer."""
        self._close(name, f"{name}: {message}")

    def wait(self, timeout_s: float) -> None:
        """Until every request is over, or until the time is up, which is a problem."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._open, timeout_s):
                self.problems.append(f"timeout: {len(self._open)} requests unfinished")

    def _close(self, name: str, problem: str | None) -> None:
        with self._changed:
            if name not in self._open:
                return
            self._open.discard(name)
            if problem is not None:
                self.problems.append(problem)
            self._changed.notify_all()


def run(engine: Engine, command: Run) -> Done:
    """Submit each request when it is due, and wait for all."""
    start_s = time.monotonic()
    recorder = Recorder(command.requests, start_s)
    engine.recorder = recorder
    last_s = max((request.at_s for request in command.requests), default=0.0)
    deadline_s = start_s + last_s + command.timeout_s
    if isinstance(engine, BatchEngine):
        engine.submit_batch(command.requests)
    else:
        assert isinstance(engine, OnlineEngine)
        for request in sorted(command.requests, key=lambda request: request.at_s):
            time.sleep(max(0.0, start_s + request.at_s - time.monotonic()))
            engine.submit(request)
    recorder.wait(max(0.0, deadline_s - time.monotonic()))
    return Done(start_s, list(recorder.tracks.values()), list(recorder.problems))


def serve(name: str, options: Options, commands: TextIO, events: TextIO) -> None:
    """Start the engine and obey until told to stop, or until nobody is there to tell."""

    def send(message: Ready | Done | Failed) -> None:
        events.write(encode(message) + "\n")
        events.flush()

    module, kind = ENGINES[name]
    try:
        begin_s = time.monotonic()
        engine: Engine = getattr(importlib.import_module(module), kind)(options)
        engine.start()
        send(Ready(engine.version, time.monotonic() - begin_s))
        for line in commands:
            command = decode_command(line)
            if not isinstance(command, Run):
                break
            send(run(engine, command))
        engine.stop()
    except Exception as error:
        send(Failed(f"{type(error).__name__}: {error}"))
        raise


def main() -> None:
    """Take stdout for the protocol and give the engine stderr in its place."""
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    options = json.loads(sys.argv[2])
    try:
        serve(sys.argv[1], options, sys.stdin, events)
    finally:
        sys.stderr.flush()
        os._exit(0)  # Threads and children of some engines never end by themselves.


if __name__ == "__main__":
    main()
