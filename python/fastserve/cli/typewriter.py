"""Streamed text on a terminal, broken between words.

A word is shown as it comes, letter by letter. When it turns out not to fit its line, it is taken
back and written on the next one. Into a file or a pipe the text goes as it is.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable

from rich.cells import cell_len

__all__ = ["Typewriter"]


class Typewriter:
    """Writes text to stdout.

    Args:
        width: Columns to fill; ``None`` to break no lines. By default the terminal's, less the last
            one, where terminals disagree about the cursor.
        put: Where the characters go.
    """

    def __init__(
        self, width: int | None = None, put: Callable[[str], object] | None = None
    ) -> None:
        if put is None and sys.stdout.isatty():
            width = shutil.get_terminal_size().columns - 1
        self._width = width
        self._put = put or sys.stdout.write
        self._column = 0
        self._word = ""

    def write(self, text: str) -> None:
        """Show `text`, which goes on where the last one ended."""
        if self._width is None:
            self._put(text)
        else:
            self._put("".join(map(self._typed, text)))
        sys.stdout.flush()

    def _typed(self, character: str) -> str:
        """What one more character makes the terminal do."""
        assert self._width is not None
        if character == "\n":
            self._column, self._word = 0, ""
            return character
        cells = cell_len(character)
        moved = ""
        if self._column + cells > self._width:
            if character == " ":  # It would only hang over the end of the line.
                self._column, self._word = 0, ""
                return "\n"
            moved = self._next_line()
        self._column += cells
        # Scripts with wide characters break lines anywhere.
        self._word = "" if character.isspace() or cells > 1 else self._word + character
        return moved + character

    def _next_line(self) -> str:
        """Take the word under way to the next line, unless it fills this one by itself."""
        assert self._width is not None
        cells = cell_len(self._word)
        if not 0 < cells < self._width // 2:
            self._column, self._word = 0, ""
            return "\n"
        self._column = cells
        return f"\x1b[{cells}D\x1b[K\n{self._word}"
