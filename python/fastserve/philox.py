"""Random bits that are a function and not a state: Philox4x32-10.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A key of two
words and a counter of four give four random words, whatever was drawn before. So the noise of a
token is named by (seed, sequence index, position) alone: batching, chunks, preemption and the order
of steps cannot change it, and a device can compute the same bits with ten rounds of 32-bit
multiplications. Ours are in ``rust/cpu/src/sampling/philox.rs``.

Counters are used like this, and any other implementation must do the same::

    key      (seed low, seed high)
    counter  (position, sequence index, purpose, 0)

``position`` is that of the token being drawn: the prompt's first token has 0. ``purpose`` is 0 for
the bits that pick a token; seeds use other counters. The 64 bits of a draw are
``word[0] + 2**32 * word[1]``.

The known answers of the Random123 distribution are in ``tests/test_sampler_philox.py``.
"""

from __future__ import annotations

from typing import Final

from fastserve._core import cpu

__all__ = ["PURPOSE_SEED", "derive_seed"]

PURPOSE_SEED: Final = 1
"""Third counter word of the bits that become the seed of a request that came without one."""


def derive_seed(engine_seed: int, request_id: int) -> int:
    """The seed of a request that has none: the same engine seed and id give the same seed."""
    counter = (request_id & 0xFFFFFFFF, request_id >> 32, PURPOSE_SEED, 0)
    low, high, _, _ = cpu.philox4x32(counter, (engine_seed & 0xFFFFFFFF, engine_seed >> 32))
    return low | high << 32
