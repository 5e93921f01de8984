"""Flags made from the fields of a configuration class, so that the two never drift apart.

The field ``max_num_seqs: int = 128`` is the flag ``--max-num-seqs`` with that default, and its help
is what the class's docstring says under ``Attributes``::

    @app.command()
    @takes("engine", EngineConfig, panel="Engine")
    def serve(model: str, *, engine: dict[str, Any]) -> None: ...

``serve`` gets the values by field name, ready to be passed on as keywords.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from fastserve.cli.console import CommandError, one_line_errors

__all__ = ["takes"]


def takes(
    into: str,
    config: type,
    *,
    panel: str,
    defaults: Mapping[str, Any] | None = None,
    leave_out: Collection[str] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the parameter `into` of a command by one flag for each field of `config`.

    Args:
        into: Keyword of the command that takes the values as a dict.
        config: A dataclass whose docstring describes its fields.
        panel: Heading in ``--help``.
        defaults: Defaults of this command that differ from the class's own.
        leave_out: Fields that make no sense here.
    """
    flags = [
        _flag(name, hint, default, text, panel)
        for name, hint, default, text in _fields(config, defaults or {})
        if name not in leave_out
    ]
    readers = {flag.name: _reader(get_type_hints(config)[flag.name]) for flag in flags}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_flags(**values: Any) -> None:
            with one_line_errors():
                taken = {name: read(name, values.pop(name)) for name, read in readers.items()}
            command(**values, **{into: taken})

        signature = inspect.signature(command, eval_str=True)
        kept = [parameter for name, parameter in signature.parameters.items() if name != into]
        parameters = [*kept, *flags]
        with_flags.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        )
        with_flags.__annotations__ = {p.name: p.annotation for p in parameters}
        return with_flags

    return decorate


def _fields(config: type, defaults: Mapping[str, Any]) -> list[tuple[str, Any, Any, str]]:
    """Name, type, default and description of each field."""
    hints, texts = get_type_hints(config), _descriptions(config)
    found = []
    for field in fields(config):
        default = field.default
        if default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        default = defaults.get(field.name, default)
        found.append((field.name, hints[field.name], default, texts[field.name]))
    return found


def _flag(name: str, hint: Any, default: Any, text: str, panel: str) -> inspect.Parameter:
    kind, metavar = _on_the_command_line(hint)
    spelled = "--" + name.replace("_", "-")
    names = [f"{spelled}/--no-{spelled[2:]}"] if kind is bool else [spelled]
    if get_origin(_non_optional(kind)) is list:
        text += " May be given several times."
    parser = _optional_number(kind) if NoneType in _union(kind) else None
    option = typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar, parser=parser)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=_plain_default(default),
        annotation=Annotated[kind, option],
    )


def _non_optional(kind: Any) -> Any:
    (kind,) = _members(kind)
    return kind


def _plain_default(default: Any) -> Any:
    return None if isinstance(default, Collection) and not isinstance(default, str) else default


def _on_the_command_line(hint: Any) -> tuple[Any, str | None]:
    """The type that typer parses for a field, and how ``--help`` names it."""
    members = _members(hint)
    if any(_origin(member) is Mapping for member in members):
        return list[str] | None, "ID=NUMBER"
    for member in members:
        if _origin(member) in (Sequence, list, tuple):
            (item, *_) = get_args(member)
            return list[item] | None, _metavar(item)  # type: ignore[valid-type]
    (kind,) = members
    return (kind | None if NoneType in _union(hint) else kind), _metavar(kind)


def _optional_number(kind: Any) -> Callable[[Any], float | None] | None:
    """Reads a number, or ``none``: what the help calls None can be typed."""
    number = _non_optional(kind)
    if number not in (int, float):
        return None

    def read(text: Any) -> float | None:
        if str(text).lower() == "none":
            return None
        try:
            return number(text)  # type: ignore[no-any-return]
        except ValueError:
            want = "a whole number" if number is int else "a number"
            raise typer.BadParameter(f"{text!r}: want {want}, or none") from None

    return read


def _metavar(kind: Any) -> str | None:
    """How ``--help`` names a value."""
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    return {int: "N", float: "X", str: "TEXT"}.get(kind)


def _reader(hint: Any) -> Callable[[str, Any], Any]:
    """How the parsed value of a field becomes the value that the class takes."""
    if any(_origin(member) is Mapping for member in _members(hint)):
        return _pairs
    return lambda _, value: value


def _pairs(name: str, values: Sequence[str] | None) -> dict[int, float] | None:
    """``["50256=-100"]`` as ``{50256: -100.0}``."""
    pairs = {}
    for value in values or ():
        match = re.fullmatch(r"(\d+)[=:](-?\d+(?:\.\d+)?)", value)
        if match is None:
            flag = "--" + name.replace("_", "-")
            raise CommandError(f"{flag} {value}: want ID=NUMBER, for example 50256=-100")
        pairs[int(match[1])] = float(match[2])
    return pairs or None


def _union(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _members(hint: Any) -> list[Any]:
    """The alternatives of a type, ``None`` left out; the widest one last given wins above."""
    return [member for member in _union(hint) if member is not NoneType]


def _origin(hint: Any) -> Any:
    return get_origin(hint) if get_origin(hint) is not Literal else None


def _descriptions(config: type) -> dict[str, str]:
    """What the docstring says of each attribute, on one line, without reST marks."""
    _, _, attributes = inspect.cleandoc(config.__doc__ or "").partition("Attributes:\n")
    texts: dict[str, str] = {}
    name = ""
    for line in attributes.splitlines():
        if line and not line.startswith(" "):
            break
        head = re.match(r"    (\w+)(?: \([^)]*\))?: +(.*)", line)
        if head:
            name, texts[head[1]] = head[1], head[2]
        elif name and line.strip():
            texts[name] += " " + line.strip()
    return {name: text.replace("``", "") for name, text in texts.items()}
