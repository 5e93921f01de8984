"""``fastserve doctor``: what this machine and this installation can do."""

from __future__ import annotations

import json
import shutil
import textwrap
from typing import Annotated

import typer

from fastserve.cli.console import one_line_errors

__all__ = ["doctor"]

MARGIN = 20


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="As JSON, for a program or a bug report.")
    ] = False,
) -> None:
    """Show processor, kernels, memory, versions and number formats, and what is wrong.

    Ends with 1 if something is wrong.
    """
    with one_line_errors():
        from fastserve.doctor import examine

        report = examine()
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        for section in report.sections:
            typer.echo(typer.style(section.title, bold=True))
            for name, text in section.lines:
                typer.echo(_line(name, text))
        typer.echo()
        for problem in report.problems:
            typer.echo(_wrapped("! ", problem))
        if not report.problems:
            typer.echo("nothing is wrong")
    raise typer.Exit(1 if report.problems else 0)


def _line(name: str, text: str) -> str:
    return _wrapped(f"  {name:<{MARGIN - 2}}", text)


def _wrapped(first: str, text: str) -> str:
    """`text` after `first`, its further lines below its beginning. Paths stay whole."""
    width = max(60, min(100, shutil.get_terminal_size().columns))
    return textwrap.fill(
        text,
        width=width,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )
