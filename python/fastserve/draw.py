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

Only ``exp`` may differ between two machines, by a unit in its last place, which moves a weight by
one part in 2**40 about once in 2**12 times.

Rows are taken one after the other: a row of a large vocabulary fills a core's cache, and where
top-k is on the rest of a row's arrays are as short as what it left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["Candidates", "candidates", "draw_token"]

Floats = NDArray[np.float32]
Weights = NDArray[np.int64]

ONE: Final = 2**40
"""Weight of the best token."""

_NUM_LIKELY: Final = (256, 4096)
"""Top-p looks among so many best tokens first and sorts the vocabulary only if it must."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """What may be drawn in one row.

    Attributes:
        token_ids: In ascending order; ``None`` stands for the whole vocabulary.
        weights: Theirs; zero for a token that is not kept.
    """

    token_ids: NDArray[np.int64] | None
    weights: Weights


def draw_token(kept: Candidates, bits: int) -> int:
    """The token that 64 random bits pick.

    A token whatever the weights are: they are one request's, and a step is everybody's.
    """
    running = kept.weights.cumsum()
    target = bits * int(running[-1]) >> 64
    place = min(int(running.searchsorted(target, side="right")), len(running) - 1)
    return place if kept.token_ids is None else int(kept.token_ids[place])


def candidates(
    logits: Floats, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> Candidates:
    """Weigh the tokens of one row of logits; the best one over `temperature` must be finite."""
    with np.errstate(over="ignore"):  # Far below the best one, -inf is as good.
        scaled = logits / np.float32(temperature)
    best = np.float64(scaled.max())
    token_ids = None
    if 0 < top_k < len(scaled):
        last = torch.from_numpy(scaled).topk(top_k).values[-1]
        token_ids = np.flatnonzero(scaled >= last.item())
        scaled = scaled[token_ids]
    shares = scaled.astype(np.float64)
    shares -= best
    np.exp(shares, out=shares)
    shares *= ONE
    weights = np.rint(shares, out=shares).astype(np.int64)
    if min_p > 0.0:
        weights[weights < min_p * ONE] = 0
    if top_p < 1.0:
        _keep_top_p(weights, top_p)
    return Candidates(token_ids, weights)


def _keep_top_p(weights: Weights, top_p: float) -> None:
    """Zero what lies beyond the share `top_p`."""
    target = max(int(top_p * float(weights.sum())), 1)
    for num_best in (*_NUM_LIKELY, len(weights)):
        best = torch.from_numpy(weights).topk(min(num_best, len(weights))).values.numpy()
        running = best.cumsum()
        if running[-1] >= target:
            break
    num_kept = int(running.searchsorted(target)) + 1
    last = best[num_kept - 1]
    num_equal_kept = int((best[:num_kept] == last).sum())
    equal = np.flatnonzero(weights == last)  # In order of ids.
    weights[weights < last] = 0
    weights[equal[num_equal_kept:]] = 0
