"""The commands together, and how their errors leave the program."""

from __future__ import annotations

import os
import sys
from typing import Annotated, cast

import typer

from fastserve.cli.chat import chat
from fastserve.cli.console import BAD_INPUT, print_error
from fastserve.cli.doctor import doctor
from fastserve.cli.generate import generate
from fastserve.cli.help import Command, Group
from fastserve.cli.options import LogLevelOption
from fastserve.cli.serve import serve
from fastserve.keywords import why_not_here
from fastserve.log import LogLevel, configure

__all__ = ["app", "run"]

# What the option parser raises for a wrong command line: BadParameter is one kind of it, and typer
# gives the base another name in every other version.
_ParserError = cast(type[typer.BadParameter], typer.BadParameter.__mro__[2])

app = typer.Typer(
    name="fastserve",
    cls=Group,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # The Python names of the flags are taken too: --max_tokens.
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)
app.command(cls=Command)(generate)
app.command(cls=Command)(chat)
app.command(cls=Command)(serve)
app.command(cls=Command)(doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        from fastserve._core import __version__

        typer.echo(f"fastserve {__version__}")
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    log_level: LogLevelOption = None,
) -> None:
    """Serve a language model: from the terminal, or over HTTP."""
    configure(log_level or LogLevel.WARNING)
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]


def _open_what_is_closed() -> None:
    """Streams that a shell closed (``>&-``) are empty, and swallow what they are given."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def run(arguments: list[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    _open_what_is_closed()
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    elif arguments == ["version"]:
        arguments = ["--version"]
    try:
        return app(arguments or ["--help"], prog_name="fastserve", standalone_mode=False) or 0
    except _ParserError as error:
        # One line instead of typer's box.
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "fastserve"
        print_error(f"{_message(error, command)}; see {command} --help")
        return BAD_INPUT


def _message(error: typer.BadParameter, command: str) -> str:
    """What the parser says, or better: why a flag that people know from elsewhere is not here."""
    name = getattr(error, "option_name", "")
    if name == "--model":
        return f"--model: MODEL is the first argument, {command} MODEL"
    if reason := why_not_here(name.removeprefix("--").replace("-", "_")):
        return f"no flag {name}: {reason}"
    return error.format_message().rstrip(".").replace(": Value error, ", ": ")
