"""An unknown keyword is an error that names it and the nearest known one."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

__all__ = ["names_unknown_keywords", "nearest", "unknown_keyword"]

Class = TypeVar("Class", bound=type)


def unknown_keyword(where: str, name: str, known: Iterable[str]) -> TypeError:
    """The error for keyword `name`, which `where` does not take."""
    known = sorted(known)
    near = nearest(name, known)
    remedy = f"known: {', '.join(known)}" if near is None else f"did you mean {near!r}?"
    return TypeError(f"{where} has no keyword {name!r}; {remedy}")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that `name` may have been meant for."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)), None)


def names_unknown_keywords(decorated: Class) -> Class:
    """Let a class with keyword-only parameters refuse others with :func:`unknown_keyword`."""
    init: Callable[..., None] = vars(decorated)["__init__"]
    known = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **keywords: Any) -> None:
        for name in keywords:
            if name not in known:
                raise unknown_keyword(decorated.__name__, name, known)
        init(self, *args, **keywords)

    type.__setattr__(decorated, "__init__", checked)
    return decorated
