"""Halves of surrogate pairs: Python's text can hold them, and no encoding has them."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["half_pair"]

_HALF_PAIR: Final = re.compile("[\ud800-\udfff]")


def half_pair(text: str) -> re.Match[str] | None:
    """The first half of a surrogate pair, or ``None`` if all of ``text`` can be encoded."""
    return _HALF_PAIR.search(text)
