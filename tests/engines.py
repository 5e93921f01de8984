"""Engines for tests, and what must hold of every one of them afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fastserve.active_request import ActiveRequest
from fastserve.config import EngineConfig
from fastserve.engine import Engine
from toy_runner import ToyRunner


def assert_conserved(engine: Engine) -> None:
    """Every block is in one place, and none is held where nothing runs; after the end too."""
    engine.check()
    stats = engine.stats()
    assert stats["free"] + stats["held"] + stats["cached"] == stats["capacity"], stats
    if not engine.has_work():
        assert stats["held"] == 0, stats
        assert stats["num_running"] == stats["num_waiting"] == 0, stats


def run_all(engine: Engine) -> list[ActiveRequest]:
    """Step until there is nothing to do. Returns the requests that finished, in that order."""
    finished: dict[int, ActiveRequest] = {}
    while engine.has_work():
        news = engine.step()
        finished |= {request.number: request for request in news if request.finished}
        stats = engine.stats()
        assert stats["free"] + stats["held"] + stats["cached"] == stats["capacity"], stats
    assert_conserved(engine)
    return list(finished.values())


class ToyEngines:
    """Makes engines over toy models and looks at all of them at the end."""

    def __init__(self) -> None:
        self.made: list[Engine] = []

    def __call__(
        self, runner: ToyRunner | None = None, *, tokenizer: Any = None, **limits: Any
    ) -> Engine:
        limits = {"num_blocks": 200, "block_size": 8, "max_num_batched_tokens": 64} | limits
        engine = Engine(runner or ToyRunner(), tokenizer, EngineConfig(**limits))
        self.made.append(engine)
        return engine


def watched(make: Callable[[], ToyEngines] = ToyEngines) -> Iterator[ToyEngines]:
    """What a fixture yields: at the end every engine is idle and has all its blocks."""
    engines = make()
    yield engines
    for engine in engines.made:
        assert not engine.has_work(), "a test leaves its engine idle"
        assert_conserved(engine)
        engine.shutdown()
        assert_conserved(engine)


toy_engine = pytest.fixture(watched)
