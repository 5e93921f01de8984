"""What the log levels mean, and the one place that turns the log on.

======== ==========================================================================================
level    meaning
======== ==========================================================================================
error    Something failed that the user asked for, and nothing else will say so.
warning  It works, but not as asked: a limit was lowered, a file was read the slow way.
info     Once a start or a request: the model, its format, the size of the pool, a line a request.
debug    Once a step and more.
======== ==========================================================================================

Every logger is a child of ``fastserve``. As a library the package only logs, it never adds a
handler: that is the program's to decide. The command line is such a program and calls
:func:`configure`. Lines go to stderr, so that stdout stays the answer's. Prompts and answers are
never logged.
"""

from __future__ import annotations

import logging
import sys
from enum import StrEnum
from typing import TextIO

__all__ = ["LogLevel", "configure"]


class LogLevel(StrEnum):
    """How much is logged: this level and those above it."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class _Line(logging.Formatter):
    """``12:30:59 warning  max_model_len lowered from 8192 to 4096``."""

    def format(self, record: logging.LogRecord) -> str:
        clock = self.formatTime(record, "%H:%M:%S")
        line = f"{clock} {record.levelname.lower():<8} {record.getMessage()}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to stderr as it is now: a progress bar puts itself there and moves out of the way."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(_Line())

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def configure(level: LogLevel) -> None:
    """Log `level` and above to stderr, in place of whatever an earlier call set.

    The HTTP server's own warnings come along.
    """
    for name, lowest in (("fastserve", level), ("uvicorn.error", LogLevel.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers = [_Stderr()]
        logger.setLevel(lowest.upper())
        logger.propagate = False
