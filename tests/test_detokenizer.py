"""Tokens to text over the binding, against Python's own decoder and a search in the whole text."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.text.detokenizer import Detokenizer, StopStrings, TokenTable

# Every byte is a token, so that a text can be cut anywhere. 256 is special.
BYTES = TokenTable([bytes([byte]) for byte in range(256)] + [b"<|end|>"], [256])

TEXTS = {
    "ascii": "plain text, nothing else",
    "cjk": "语言模型は言語모델",
    "emoji with joiners": "👩‍👩‍👧‍👦 and 👨🏽‍🚀, 🏳️‍🌈",
    "combining marks": "e\u0301 a\u0308\u0323 \u0915\u094d\u0937\u093f",
    "widths": "aé好😀\u07ff\u0800\uffff\U00010000\U0010ffff",
}
BROKEN = {
    "continuation first": b"\x80\xbfa",
    "cut at the end": "好".encode()[:2],
    "cut in the middle": "好".encode()[:2] + b"x" + "😀".encode()[:3] + b"y",
    "surrogates": b"\xed\xa0\x80\xed\xbf\xbf",
    "too long": b"\xc0\xaf\xe0\x80\xaf\xf0\x80\x80\xaf",
    "beyond unicode": b"\xf4\x90\x80\x80\xf5\x80",
    "no utf-8 at all": bytes(range(0xF0, 0x100)),
}
RAW = {name: text.encode() for name, text in TEXTS.items()} | BROKEN


def text_of(pieces: list[bytes], stops: tuple[str, ...] = (), **options: bool | int) -> list[str]:
    """The delta of every piece (one or several byte tokens pushed together), and of the finish."""
    detokenizer = Detokenizer(BYTES, StopStrings(stops), **options)
    deltas = [detokenizer.push(list(piece)).text for piece in pieces]
    return [*deltas, detokenizer.finish()]


@pytest.mark.parametrize("name", RAW)
def test_every_split_gives_the_text_of_the_whole(name: str) -> None:
    raw = RAW[name]
    whole = raw.decode("utf-8", errors="replace")
    for first, second in itertools.combinations_with_replacement(range(len(raw) + 1), 2):
        pieces = [raw[:first], raw[first:second], raw[second:]]
        assert "".join(text_of(pieces)) == whole, pieces
    assert "".join(text_of([bytes([byte]) for byte in raw])) == whole


@pytest.mark.parametrize("name", TEXTS)
def test_a_delta_is_whole_characters(name: str) -> None:
    deltas = text_of([bytes([byte]) for byte in TEXTS[name].encode()])
    assert all(len(delta) <= 1 for delta in deltas)
    assert "\ufffd" not in "".join(deltas)


@given(st.lists(st.binary(max_size=4), max_size=12))
def test_any_bytes_decode_as_python_decodes_them(pieces: list[bytes]) -> None:
    raw = b"".join(pieces)
    assert "".join(text_of(pieces)) == raw.decode("utf-8", errors="replace")
    assert BYTES.decode(list(raw)) == raw.decode("utf-8", errors="replace")


@pytest.mark.parametrize("name", TEXTS)
def test_every_stop_string_is_found_at_every_split(name: str) -> None:
    text = TEXTS[name]
    raw = text.encode()
    for start in range(len(text)):
        stop = text[start : start + 3]
        kept = text[: text.index(stop)]
        num_tokens = len((kept + stop).encode())
        for cut in range(len(raw) + 1):
            detokenizer = Detokenizer(BYTES, StopStrings([stop]))
            first, last = detokenizer.push(list(raw[:cut])), detokenizer.push(list(raw[cut:]))
            assert kept.startswith(first.text)
            assert first.text + last.text + detokenizer.finish() == kept
            assert last.stop == stop
            assert last.num_tokens_kept == num_tokens


alphabet = st.sampled_from(["a", "b", "ab", "\n", "é", "好", "😀"])
texts = st.lists(alphabet, max_size=20).map("".join)
stop_lists = st.lists(st.lists(alphabet, min_size=1, max_size=3).map("".join), max_size=4)


@given(texts, stop_lists, st.booleans())
def test_the_first_complete_stop_string_ends_the_text(
    text: str, stops: list[str], include: bool
) -> None:
    ends = {text.index(stop) + len(stop): stop for stop in sorted(stops, key=len) if stop in text}
    end = min(ends, default=None)
    detokenizer = Detokenizer(BYTES, StopStrings(stops), include_stop_str_in_output=include)
    deltas = [detokenizer.push([byte]) for byte in text.encode()]
    got = "".join(delta.text for delta in deltas) + detokenizer.finish()
    if end is None:
        assert got == text
        assert all(delta.stop is None for delta in deltas)
    else:
        assert got == text[: end if include else end - len(ends[end])]
        assert deltas[-1].stop == ends[end]
        assert deltas[-1].num_tokens_kept == len(text[:end].encode())


def test_special_tokens_are_skipped_when_asked() -> None:
    tokens = [*b"hi", 256, *b"!"]
    assert BYTES.decode(tokens) == "hi!"
    assert BYTES.decode(tokens, skip_special_tokens=False) == "hi<|end|>!"
    assert BYTES.decode(tokens, skip_special_tokens=True) == "hi!"


def test_special_tokens_count_as_tokens() -> None:
    delta = Detokenizer(BYTES, StopStrings(["i!"])).push([*b"hi", 256, *b"!x"])
    assert (delta.text, delta.stop, delta.num_tokens_kept) == ("h", "i!", 4)


def test_min_tokens_lets_early_stop_strings_pass() -> None:
    detokenizer = Detokenizer(BYTES, StopStrings(["."]), min_tokens=2)
    delta = detokenizer.push(b"a.b.c")
    assert (delta.text, delta.stop, delta.num_tokens_kept) == ("a.b", ".", 4)


def test_token_ids_come_as_arrays_too() -> None:
    outputs = np.frombuffer("é!好".encode(), np.uint8).astype(np.int32)
    assert Detokenizer(BYTES).push(outputs).text == "é!好"
    assert Detokenizer(BYTES).push(outputs[2::1][:1]).text == "!"
    assert Detokenizer(BYTES).push(outputs[::-1][-3:-2]).text == "!"


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    assert BYTES.decode([*b"a", 257, 2**31 - 1, *b"b"]) == "ab"
    assert BYTES.token_bytes(257) == b""
    assert BYTES.token_bytes(256) == b"<|end|>"
    assert BYTES.is_special(256)
    assert not BYTES.is_special(257)
    with pytest.raises(OverflowError):
        BYTES.decode([-1])
    with pytest.raises(OverflowError):
        BYTES.decode(np.array([-1], np.int32))


def test_stop_strings_that_are_not_taken() -> None:
    with pytest.raises(ValueError, match="65 stop strings: at most 64 are taken"):
        StopStrings(["x"] * 65)
    with pytest.raises(ValueError, match="stop string 1 is empty"):
        StopStrings(["x", ""])
    assert len(StopStrings(["x"] * 64).strings) == 64


def test_the_leading_space_of_sentencepiece() -> None:
    assert BYTES.decode(list(b"  a b"), strip_leading_space=True) == " a b"
    assert "".join(text_of([b"", b" ", b"a"], strip_leading_space=True)) == "a"
