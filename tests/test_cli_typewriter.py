"""What a terminal shows of streamed text, by a terminal that knows the two moves that are used."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.cli.typewriter import Typewriter


def shown(pieces: list[str], width: int) -> list[str]:
    """The screen's lines after `pieces`."""
    written: list[str] = []
    typewriter = Typewriter(width, written.append)
    for piece in pieces:
        typewriter.write(piece)
    lines = [""]
    for move, character in re.findall(r"\x1b\[(\d+)D\x1b\[K|(.)", "".join(written), re.DOTALL):
        if move:
            lines[-1] = lines[-1][: -int(move)]
        elif character == "\n":
            lines.append("")
        else:
            lines[-1] += character
    return lines


def test_lines_break_between_words() -> None:
    text = "the quick brown fox jumps"
    assert shown([text], 10) == ["the quick ", "brown fox ", "jumps"]
    assert shown(list(text), 10) == shown([text], 10)


def test_a_word_longer_than_half_a_line_is_cut() -> None:
    assert shown(["a " + "x" * 14], 10) == ["a xxxxxxxx", "xxxxxx"]


def test_a_space_at_the_end_of_a_full_line_is_the_line_break() -> None:
    assert shown(["0123456789 next"], 10) == ["0123456789", "next"]


def test_wide_characters_take_two_columns_and_break_anywhere() -> None:
    assert shown(["语言模型模型"], 9) == ["语言模型", "模型"]


def test_line_breaks_of_the_text_stay() -> None:
    assert shown(["a\n\nb"], 10) == ["a", "", "b"]


@pytest.mark.parametrize("text", ["a\tb \x1b[31m red", "  leading"])
def test_without_a_width_the_text_is_untouched(text: str) -> None:
    written: list[str] = []
    Typewriter(None, written.append).write(text)
    assert written == [text]


@given(st.lists(st.text("ab \n", max_size=8), max_size=12))
def test_no_line_is_too_long_and_no_letter_is_lost(pieces: list[str]) -> None:
    text = "".join(pieces)
    lines = shown(pieces, 6)
    assert all(len(line) <= 6 for line in lines)
    assert "".join(lines).replace(" ", "") == re.sub(r"\s", "", text)
