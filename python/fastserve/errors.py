"""What a caller can get wrong, as exceptions with the value, the limit and the remedy.

A bug is not here: it raises whatever it raises, or ``CoreBug`` when the Rust core panicked.
``RequestError``, ``StepError`` and ``CoreBug`` are the extension's own and are looked up when they
are first asked for, so that a model can be loaded or a configuration refused without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastserve._shadow import check_front

if TYPE_CHECKING:
    from fastserve._core import CoreBug, RequestError, StepError

check_front()  # Here, because every front end imports this module.

__all__ = [
    "ConfigError",
    "CoreBug",
    "EngineDeadError",
    "FastserveError",
    "KernelError",
    "ModelError",
    "RequestError",
    "StepError",
]

_FROM_CORE = frozenset({"CoreBug", "RequestError", "StepError"})


class FastserveError(Exception):
    """Base of the errors that this package raises on purpose."""


class ConfigError(FastserveError, ValueError):
    """A configuration that cannot be used. Names every bad field, not only the first.

    Attributes:
        owner: The class or function whose parameters are meant.
        problems: One sentence a field: ``name=value: want …``.
    """

    def __init__(self, owner: str, problems: list[str]) -> None:
        super().__init__(owner, problems)
        self.owner = owner
        self.problems = problems

    def __str__(self) -> str:
        return f"{self.owner}: {'; '.join(self.problems)}"


class ModelError(FastserveError):
    """A model that cannot be found, read or run; or a tokenizer or chat template that cannot."""


class EngineDeadError(FastserveError, RuntimeError):
    """The engine was shut down, or stopped at an error that it could not survive; says which."""


class KernelError(FastserveError, RuntimeError):
    """The device failed. The engine is closed and cannot be stepped again."""


def __getattr__(name: str) -> Any:
    if name in _FROM_CORE:
        import fastserve._core

        return getattr(fastserve._core, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
