"""The log goes to stderr, in lines of one form, from the level that was asked for."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator

import pytest

from fastserve import log

logger = logging.getLogger("fastserve.test")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Other tests capture records at the root."""
    names = ("fastserve", "uvicorn.error")
    before = [(n, logging.getLogger(n).handlers, logging.getLogger(n).level) for n in names]
    yield
    for name, handlers, level in before:
        logging.getLogger(name).handlers = handlers
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).propagate = True


def test_a_line_has_time_level_and_message(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(log.LogLevel.WARNING)
    logger.warning("%s lowered from %d to %d", "max_model_len", 8192, 4096)
    logger.info("not asked for")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d warning  max_model_len lowered from 8192 to 4096\n", captured.err
    )


def test_the_level_may_change_and_no_line_comes_twice(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(log.LogLevel.ERROR)
    log.configure(log.LogLevel.DEBUG)
    logger.debug("once")
    assert capsys.readouterr().err.count("once") == 1


def test_stderr_is_the_one_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    log.configure(log.LogLevel.INFO)
    bar = io.StringIO()
    monkeypatch.setattr("sys.stderr", bar)
    logger.info("above the bar")
    assert "above the bar" in bar.getvalue()
