"""Tokens to text for one sequence: deltas that never split a character, and stop strings.

The work is in the Rust crate ``rust/text``; this page gives it names and types::

    stops = StopStrings(params.stop_strings)              # once a request
    detokenizer = Detokenizer(table, stops)               # once a sequence
    delta = detokenizer.push(token_ids)                   # every step
    if delta.stop is not None:
        inbox.finish(request_id, index, "stop", delta.num_tokens_kept)
    ...
    last = detokenizer.finish()                           # it ended otherwise

The concatenation of all deltas, ``finish()`` included, is the text of all tokens at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastserve._core import text as _text

__all__ = ["Detokenizer", "StopStrings", "TextDelta", "TokenTable"]

TokenTable = _text.TokenTable


class StopStrings:
    """Up to 64 texts that end a sequence, ready for the search. Shared by a request's sequences.

    Raises:
        ValueError: One is empty, or there are more than 64.
    """

    __slots__ = ("_automaton", "strings")

    def __init__(self, strings: Sequence[str] = ()) -> None:
        self.strings = tuple(strings)
        self._automaton = _text.StopStrings(list(self.strings))


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What :meth:`Detokenizer.push` has to say.

    Attributes:
        text: Text that is certain now. Empty while a character or a stop string may be under way.
        stop: The stop string that ended the sequence, or ``None``.
        num_tokens_kept: Tokens pushed so far; after a match, those up to the one that completes it.
    """

    text: str
    stop: str | None
    num_tokens_kept: int


_NO_STOPS = StopStrings()


class Detokenizer:
    """Turns one sequence's tokens into text. One thread at a time.

    Of several stop strings the one that is complete first wins; of those that end at the same place
    the longest, of equal ones the first listed. It depends on the text alone, not on how the text
    was cut into tokens.

    Args:
        table: The vocabulary's bytes.
        stops: Stop strings of the request.
        skip_special_tokens: Special tokens have no text, and no stop string is found in them.
        include_stop_str_in_output: The text ends after the stop string and not before it.
        min_tokens: A stop string counts only where a token after this many completes it.
        strip_leading_space: Drop one space at the very beginning, as SentencePiece puts there. For
            text that starts at these tokens; not for the continuation of a prompt.
    """

    __slots__ = ("_detokenizer", "_stops")

    def __init__(
        self,
        table: TokenTable,
        stops: StopStrings = _NO_STOPS,
        *,
        skip_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        strip_leading_space: bool = False,
    ) -> None:
        self._stops = stops
        self._detokenizer = _text.Detokenizer(
            table,
            stops._automaton,
            skip_special_tokens=skip_special_tokens,
            include_stop_str_in_output=include_stop_str_in_output,
            min_tokens=min_tokens,
            strip_leading_space=strip_leading_space,
        )

    def push(self, token_ids: NDArray[np.int32] | Sequence[int]) -> TextDelta:
        """Take more tokens. After a match the text is empty and the rest repeats itself.

        Do not push the stop *token* that ended a sequence: its text is no part of the output.
        """
        text, index, num_tokens_kept = self._detokenizer.push(token_ids)
        stop = None if index is None else self._stops.strings[index]
        return TextDelta(text, stop, num_tokens_kept)

    def finish(self) -> str:
        """The sequence is over: return the text that was held back."""
        return self._detokenizer.finish()
