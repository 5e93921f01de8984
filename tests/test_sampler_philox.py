"""Random bits: published known answers, and the properties that sampling leans on."""

import numpy as np
import pytest

from fastserve._core.cpu import draw_bits, philox4x32
from fastserve.philox import derive_seed

# Random123's kat_vectors, lines "philox4x32 10": counter[4] key[2] answer[4].
KNOWN_ANSWERS = """
00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8
ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd
243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1
""".strip().splitlines()

LAST = 2**31 - 1


def bits(seed: int, index: int, position: int) -> int:
    """Of one draw."""
    words = np.array([[index], [position]], dtype=np.int32)
    return int(draw_bits(np.array([seed], dtype=np.uint64), *words)[0])


@pytest.mark.parametrize("line", KNOWN_ANSWERS)
def test_known_answers_of_random123(line: str) -> None:
    words = [int(word, 16) for word in line.split()]
    assert philox4x32(tuple(words[:4]), tuple(words[4:6])) == tuple(words[6:])


def test_the_bits_of_a_draw_are_two_words() -> None:
    low, high, _, _ = philox4x32((9, 4, 0, 0), (5, 2))
    assert bits(5 + (2 << 32), 4, 9) == low | high << 32


def test_a_draw_does_not_depend_on_its_company() -> None:
    seeds = np.array([0, 1, 2**64 - 1, 12345], dtype=np.uint64)
    positions = np.array([10, 11, 12, LAST], dtype=np.int32)
    together = draw_bits(seeds, np.arange(4, dtype=np.int32), positions)
    alone = map(bits, seeds.tolist(), range(4), positions.tolist())
    assert together.tolist() == list(alone)


def test_every_part_of_the_name_changes_the_bits() -> None:
    names = (7, 0, 5), (8, 0, 5), (7 + 2**32, 0, 5), (7, 1, 5), (7, 0, 6)
    assert len({bits(*name) for name in names}) == 5


def test_draws_are_uniform() -> None:
    num = 100_000
    zeros = np.zeros(num, dtype=np.int32)
    seeds = np.full(num, 3, dtype=np.uint64)
    draws = draw_bits(seeds, zeros, np.arange(num, dtype=np.int32)) / 2.0**64
    assert abs(draws.mean() - 0.5) < 0.005
    assert abs(draws.var() - 1 / 12) < 0.002
    counts, _ = np.histogram(draws, bins=64, range=(0.0, 1.0))
    expected = num / 64
    assert ((counts - expected) ** 2 / expected).sum() < 105  # chi-squared, 63 degrees, p < 0.001


def test_names_of_different_lengths_are_refused() -> None:
    one, two = np.zeros(1, dtype=np.int32), np.zeros(2, dtype=np.int32)
    with pytest.raises(ValueError, match=r"got \[2, 1, 2\] values, want equally many"):
        draw_bits(np.zeros(2, dtype=np.uint64), one, two)


def test_derived_seeds_repeat_and_differ() -> None:
    assert derive_seed(1, 2) == derive_seed(1, 2)
    assert len({derive_seed(s, r) for s in range(20) for r in range(20)}) == 400
    assert 0 <= derive_seed(2**64 - 1, 2**64 - 1) < 2**64


def test_a_derived_seed_has_a_counter_of_its_own() -> None:
    """What requests got so far is what they get in the next release."""
    low, high, _, _ = philox4x32((7, 0, 1, 0), (3, 0))
    assert derive_seed(3, 7) == low | high << 32
