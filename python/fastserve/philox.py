"""Random bits that are a function and not a state: Philox4x32-10.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A key of two
words and a counter of four give four random words, whatever was drawn before. So the noise of a
token is named by (seed, sequence index, position) alone: batching, chunks, preemption and the order
of steps cannot change it, and a device can compute the same bits with ten rounds of 32-bit
multiplications.

Counters are used like this, and any other implementation must do the same::

    key      (seed low, seed high)
    counter  (position, sequence index, purpose, 0)

``position`` is that of the token being drawn: the prompt's first token has 0. The 64 bits of a draw
are ``word[0] + 2**32 * word[1]``.

The known answers of the Random123 distribution are in ``tests/test_sampler_philox.py``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["PURPOSE_SAMPLE", "PURPOSE_SEED", "derive_seed", "draw_bits", "philox4x32"]

Words = NDArray[np.uint64]

PURPOSE_SAMPLE = 0
"""Third counter word of the bits that pick a token."""

PURPOSE_SEED = 1
"""Third counter word of the bits that become the seed of a request that came without one."""

_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox4x32(
    counter: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike],
    key: tuple[ArrayLike, ArrayLike],
) -> tuple[Words, Words, Words, Words]:
    """Ten rounds over 32-bit words held in uint64 arrays; the arguments broadcast."""
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = (np.asarray(word, dtype=np.uint64) for word in key)
    for _ in range(_ROUNDS):
        product_0, product_1 = _MULTIPLIER_0 * c0, _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> _SHIFT) ^ c1 ^ k0,
            product_1 & _LOW,
            (product_0 >> _SHIFT) ^ c3 ^ k1,
            product_0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
    return c0, c1, c2, c3


def draw_bits(seeds: ArrayLike, sequence_indices: ArrayLike, positions: ArrayLike) -> Words:
    """64 random bits for each (seed, sequence index, position of the token to draw)."""
    seed = np.asarray(seeds, dtype=np.uint64)
    counter = (positions, sequence_indices, PURPOSE_SAMPLE, 0)
    low, high, _, _ = philox4x32(counter, (seed & _LOW, seed >> _SHIFT))
    return low | (high << _SHIFT)


def derive_seed(engine_seed: int, request_id: int) -> int:
    """The seed of a request that has none: the same engine seed and id give the same seed."""
    counter = (request_id & 0xFFFFFFFF, request_id >> 32, PURPOSE_SEED, 0)
    low, high, _, _ = philox4x32(counter, (engine_seed & 0xFFFFFFFF, engine_seed >> 32))
    return int(low) | int(high) << 32
