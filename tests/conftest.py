"""Shared by all tests: where the repository is, and how hypothesis draws.

Markers: ``full`` selects the whole product of conditions (``make test-full``); ``wheel`` builds the
wheel and installs it into an empty environment.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

REPOSITORY = Path(__file__).resolve().parent.parent

# Equal draws on every machine and every day: a red test can be repeated, and no test has a clock.
settings.register_profile(
    "fastserve",
    derandomize=True,
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("fastserve")


# A shell starts what runs in the background with Ctrl-C ignored, and children inherit that. The
# tests that send it mean it as it is in a terminal.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return REPOSITORY


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command line run in this process sets up logging to its own stderr; take that back."""
    logger = logging.getLogger("fastserve")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagate


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what the comparisons with transformers have compared, ties included."""
    greedy = sys.modules.get("greedy")
    for name, tally in getattr(greedy, "TALLIES", {}).items():
        for line in tally.lines(name):
            terminalreporter.write_line(line)
