"""From logits and random bits to a token, the same one on any machine.

The order is vLLM's: temperature, min-p, top-k, top-p, then one draw. What makes the draw repeatable
is that probabilities are *integers*. With ``z`` the float32 quotient of logit and temperature::

    weight[i] = round(2**40 * exp(z[i] - max(z)))      exp in float64, halves to even

so the best token weighs exactly 2**40 and sums have no rounding, whatever order they are taken in
(a vocabulary of 2**20 tokens stays below 2**60). Tokens below 2**-41 of the best are never drawn.

* min-p keeps ``weight >= min_p * 2**40``;
* top-k keeps every token whose ``z`` is at least the k-th largest (equals of it stay too);
* top-p goes through what is left by weight, equals by token id, and keeps a token while the ones
  before it weigh less than ``top_p`` of the whole;
* with ``r`` the 64 random bits, the draw is the first token, in order of ids, at which the running
  sum of the kept weights exceeds ``floor(r * total / 2**64)``.

Our ``exp`` is made of operations that every machine rounds alike (``rust/cpu/src/sampling``), so
there the weights are the same on any. Where another implementation takes its own, a weight may
differ by one part in 2**40 about once in 2**12 times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fastserve._core import cpu

if TYPE_CHECKING:
    from fastserve.sampling_record import SlotStates

__all__ = ["draw_tokens"]

Ints = NDArray[np.int32]


def draw_tokens(
    pool: cpu.Pool,
    logits: NDArray[np.float32],
    rows: NDArray[np.int64],
    state: SlotStates,
    slots: Ints,
    positions: Ints,
) -> Ints:
    """One token for each of `rows` of `logits`.

    Args:
        pool: Shares out the rows.
        logits: ``[any, vocab_size]``; a row's best one over the temperature is finite.
        rows: Those to draw from, ``[n]``.
        state: Has the settings and the seeds.
        slots: The row slot of each draw, ``[n]``.
        positions: Of the tokens to come, ``[n]``.
    """
    bits = cpu.draw_bits(state.seeds[slots], state.sequence_indices[slots], positions)
    return cpu.draw_tokens(
        pool,
        logits,
        rows.astype(np.int32),
        temperature=state.temperature[slots],
        top_k=state.top_k[slots],
        top_p=state.top_p[slots],
        min_p=state.min_p[slots],
        bits=bits,
    )
