"""Random bits: published known answers, and the properties that sampling leans on."""

import numpy as np
import pytest

from fastserve.philox import derive_seed, draw_bits, philox4x32

# Random123's kat_vectors, lines "philox4x32 10": counter[4] key[2] answer[4].
KNOWN_ANSWERS = """
00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8
ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd
243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1
""".strip().splitlines()


@pytest.mark.parametrize("line", KNOWN_ANSWERS)
def test_known_answers_of_random123(line: str) -> None:
    words = [int(word, 16) for word in line.split()]
    got = philox4x32(tuple(words[:4]), tuple(words[4:6]))
    assert [int(word) for word in got] == words[6:]


def test_a_draw_does_not_depend_on_its_company() -> None:
    seeds = np.array([0, 1, 2**64 - 1, 12345], dtype=np.uint64)
    together = draw_bits(seeds, [0, 1, 2, 3], [10, 11, 12, 2**31 - 1])
    alone = [
        int(draw_bits(seed, index, position))
        for seed, index, position in zip(seeds, range(4), (10, 11, 12, 2**31 - 1), strict=True)
    ]
    assert together.tolist() == alone


def test_every_part_of_the_name_changes_the_bits() -> None:
    base = int(draw_bits(7, 0, 5))
    names = (8, 0, 5), (7 + 2**32, 0, 5), (7, 1, 5), (7, 0, 6)
    others = [draw_bits(*name) for name in names]
    assert len({base, *map(int, others)}) == 5


def test_draws_are_uniform() -> None:
    draws = draw_bits(3, 0, np.arange(100_000)) / 2.0**64
    assert abs(draws.mean() - 0.5) < 0.005
    assert abs(draws.var() - 1 / 12) < 0.002
    counts, _ = np.histogram(draws, bins=64, range=(0.0, 1.0))
    expected = len(draws) / 64
    assert ((counts - expected) ** 2 / expected).sum() < 105  # chi-squared, 63 degrees, p < 0.001


def test_derived_seeds_repeat_and_differ() -> None:
    assert derive_seed(1, 2) == derive_seed(1, 2)
    assert len({derive_seed(s, r) for s in range(20) for r in range(20)}) == 400
    assert 0 <= derive_seed(2**64 - 1, 2**64 - 1) < 2**64
