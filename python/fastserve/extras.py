"""What the base install has, what it has not, and the one line that says how to get it.

The packages are named, not the extra that lists them: that is right in a clone, behind a wheel and
wherever the distribution comes from. A test holds the table to ``pyproject.toml``.
"""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from typing import Final

__all__ = ["BASE", "EXTRAS", "how_to_install", "missing", "require"]

BASE: Final = (
    "numpy",
    "tokenizers",
    "jinja2",
    "gguf",
    "huggingface_hub",
    "safetensors",
    "typer",
    "rich",
)
"""What the base install has."""

EXTRAS: Final = {"server": ("fastapi>=0.115", "uvicorn>=0.34")}
"""What each extra installs."""


def missing(*extras: str) -> list[str]:
    """The packages of `extras` that are not installed."""
    requirements = (requirement for extra in extras for requirement in EXTRAS[extra])
    names = (re.split("[<>=]", requirement)[0] for requirement in requirements)
    return [name for name in names if find_spec(name) is None]


def how_to_install(*extras: str) -> str:
    """The command that installs `extras`."""
    requirements = [requirement for extra in extras for requirement in EXTRAS[extra]]
    return f"pip install {shlex.join(requirements)}"


def require(who: str, *extras: str) -> None:
    """Say what to install where an extra is missing.

    Raises:
        ImportError: Something that `who` needs is not installed; names all of it.
    """
    names = missing(*extras)
    if names:
        lacking = [extra for extra in extras if missing(extra)]
        verb, pronoun = ("is", "it") if len(names) == 1 else ("are", "them")
        raise ImportError(
            f"{who} needs {' and '.join(names)}, which {verb} not installed; "
            f"install {pronoun} with: {how_to_install(*lacking)}"
        )
