"""Shared by all tests: where the repository is, and how hypothesis draws.

Markers: ``full`` selects the whole product of conditions (``make test-full``); ``wheel`` builds the
wheel and installs it into an empty environment.
"""

from __future__ import annotations

import sys
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


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return REPOSITORY


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what the comparisons with transformers have compared, ties included."""
    greedy = sys.modules.get("greedy")
    for name, tally in getattr(greedy, "TALLIES", {}).items():
        for line in tally.lines(name):
            terminalreporter.write_line(line)
