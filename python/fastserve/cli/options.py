"""Arguments that several commands have, and what the log level does to all of them."""

from __future__ import annotations

from typing import Annotated

import typer

from fastserve.log import LogLevel, configure

__all__ = ["LogLevelOption", "ModelArgument", "set_log_level"]

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A folder, a .gguf file, a hub id (owner/name), or smollm2.",
        show_default=False,
    ),
]
LogLevelOption = Annotated[
    LogLevel | None,
    typer.Option(metavar="|".join(LogLevel), help="What to log to stderr: this level and above."),
]


def set_log_level(level: LogLevel | None) -> None:
    """Apply a command's own ``--log-level``; without one, the level set before stays."""
    if level is not None:
        configure(level)
