"""``--help`` as one column of flags and one of text, in groups, readable at 80 columns.

Typer's own page is a table that cuts long flags off ("--max-num-batche…"); ours are long, because
they are the fields' names.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from enum import Enum
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["Command", "Group"]

TEXT_COLUMN = 26
MIN_WIDTH, MAX_WIDTH = 60, 100


class Command(TyperCommand):
    """A command with this page's ``--help``."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page."""
        formatter.write(_page(self, ctx))


class Group(TyperGroup):
    """The program itself."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page, with the commands on it."""
        formatter.write(_page(self, ctx))


def _page(command: Any, ctx: Any) -> str:
    parameters = command.get_params(ctx)
    arguments = [p for p in parameters if p.param_type_name == "argument"]
    options = [p for p in parameters if p.param_type_name == "option"]
    pieces = [ctx.command_path, *(_in_usage(argument) for argument in arguments), "[OPTIONS]"]
    commands = {name: command.get_command(ctx, name) for name in _commands(command, ctx)}
    if commands:
        pieces.append("COMMAND ...")
    lines = [f"Usage: {' '.join(pieces)}", "", *_paragraphs(command.help or "")]
    for title, found in _groups(options).items():
        if title == "Options" and arguments:
            lines += [_heading("Arguments"), *_entries(map(_argument, arguments)), ""]
        if title == "Options" and commands:
            entries = ((name, _first_line(found.help)) for name, found in commands.items())
            lines += [_heading("Commands"), *_entries(entries), ""]
        lines += [_heading(title), *_entries(map(_option, found)), ""]
    return "\n".join(lines)


def _commands(command: Any, ctx: Any) -> list[str]:
    return list(command.list_commands(ctx)) if hasattr(command, "list_commands") else []


def _groups(options: list[Any]) -> dict[str, list[Any]]:
    """Options by heading, the general ones first."""
    groups: dict[str, list[Any]] = {"Options": []}
    for option in options:
        groups.setdefault(getattr(option, "rich_help_panel", None) or "Options", []).append(option)
    return groups


def _in_usage(argument: Any) -> str:
    name = _name(argument)
    return name if argument.required else f"[{name}]"


def _name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _argument(argument: Any) -> tuple[str, str]:
    return _name(argument), argument.help or ""


def _option(option: Any) -> tuple[str, str]:
    short = [name for name in option.opts if not name.startswith("--")]
    long = [name for name in option.opts if name.startswith("--")]
    names = ", ".join([*short, *long])
    if option.secondary_opts:
        names = f"--[no-]{long[0][2:]}"
    elif option.metavar:
        names = f"{names} {option.metavar}"
    return names, f"{option.help or ''}{_default(option)}"


def _default(option: Any) -> str:
    value = option.default
    is_switch = value is False and not option.secondary_opts
    if value is None or is_switch or callable(value):
        return ""
    if isinstance(value, bool):
        value = "on" if value else "off"
    if isinstance(value, Enum):
        value = value.value
    return f" (default: {value})"


def _entries(entries: Iterator[tuple[str, str]]) -> Iterator[str]:
    """Names on the left, text on the right; a long name has a line of its own."""
    indent = " " * TEXT_COLUMN
    for name, text in entries:
        first = f"  {name:<{TEXT_COLUMN - 3}} "
        if len(first) > TEXT_COLUMN:
            yield f"  {name}"
            first = indent
        yield textwrap.fill(
            text, _width(), initial_indent=first, subsequent_indent=indent, break_on_hyphens=False
        ).rstrip()


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.strip().split("\n\n"):
        yield textwrap.fill(" ".join(paragraph.split()), _width(), break_on_hyphens=False)
        yield ""


def _first_line(text: str | None) -> str:
    return " ".join((text or "").strip().partition("\n\n")[0].split())


def _heading(title: str) -> str:
    return typer.style(f"{title}:", bold=True)


def _width() -> int:
    return max(MIN_WIDTH, min(MAX_WIDTH, shutil.get_terminal_size().columns))
