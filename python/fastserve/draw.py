"""From logits and random bits to a token, the same one on any machine.

The order is vLLM's: temperature, min-p, top-k, top-p, then one draw. What makes the draw repeatable
is that probabilities are *integers*. With ``z`` the float32 quotient of logit and temperature::

    weight[i] = round(2**40 * exp(z[i] - max(z)))      exp in float64

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
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["draw_tokens", "kept_weights"]

Floats = NDArray[np.float32]

ONE: Final = 2**40
"""Weight of the best token."""

_ROWS_AT_ONCE: Final = 16
_NUM_LIKELY: Final = 256
"""Top-p looks among this many best tokens first and sorts the vocabulary only if it must."""


def draw_tokens(
    logits: Tensor,
    *,
    temperature: Floats,
    top_k: NDArray[np.int32],
    top_p: Floats,
    min_p: Floats,
    bits: NDArray[np.uint64],
) -> NDArray[np.int32]:
    """One token per row of `logits` (float32 ``[rows, vocabulary]``, unchanged)."""
    tokens = np.empty(len(logits), dtype=np.int32)
    for first in range(0, len(logits), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        weights = kept_weights(
            logits[rows], temperature[rows], top_k[rows], top_p[rows], min_p[rows]
        )
        running = weights.cumsum(dim=1)
        totals = running[:, -1].numpy().astype(np.uint64)
        targets = _multiply_high(bits[rows], totals).astype(np.int64)
        drawn = torch.searchsorted(running, torch.from_numpy(targets)[:, None], right=True)
        tokens[rows] = drawn[:, 0].numpy()
    return tokens


def kept_weights(
    logits: Tensor, temperature: Floats, top_k: NDArray[np.int32], top_p: Floats, min_p: Floats
) -> Tensor:
    """Integer weights ``[rows, vocabulary]``, zero for every token that may not be drawn."""
    scaled = logits / torch.from_numpy(temperature)[:, None]
    best = scaled.amax(dim=1, keepdim=True)
    weights = ((scaled.double() - best.double()).exp_() * ONE).round_().to(torch.int64)
    if min_p.any():
        floor = torch.from_numpy(min_p.astype(np.float64) * ONE)[:, None]
        weights.masked_fill_(weights < floor, 0)
    if top_k.any():
        _keep_top_k(weights, scaled, top_k)
    for row in np.flatnonzero(top_p < 1.0).tolist():
        _keep_top_p(weights[row], float(top_p[row]))
    return weights


def _keep_top_k(weights: Tensor, scaled: Tensor, top_k: NDArray[np.int32]) -> None:
    vocab_size = scaled.shape[1]
    limits = np.where(top_k > 0, np.minimum(top_k, vocab_size), vocab_size)
    rows = np.flatnonzero(limits < vocab_size)
    if not len(rows):
        return
    chosen = torch.from_numpy(rows)
    best = scaled[chosen].topk(int(limits[rows].max()), dim=1).values
    last = best.gather(1, torch.from_numpy(limits[rows].astype(np.int64) - 1)[:, None])
    weights[chosen] = weights[chosen].masked_fill_(scaled[chosen] < last, 0)


def _keep_top_p(weights: Tensor, top_p: float) -> None:
    """Zero what lies beyond the share `top_p` of one row."""
    target = max(int(top_p * float(weights.sum())), 1)
    for num_best in (min(_NUM_LIKELY, len(weights)), len(weights)):
        best = weights.topk(num_best).values
        running = best.cumsum(dim=0)
        if int(running[-1]) >= target:
            break
    num_kept = int(torch.searchsorted(running, target)) + 1
    last = best[num_kept - 1]
    num_equal_kept = int((best[:num_kept] == last).sum())
    equal = torch.nonzero(weights == last)[:, 0]  # In order of ids.
    weights.masked_fill_(weights < last, 0)
    weights[equal[num_equal_kept:]] = 0


def _multiply_high(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The upper 64 bits of the 128-bit products."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    a_high, a_low, b_high, b_low = a >> shift, a & low, b >> shift, b & low
    middle = a_high * b_low + (a_low * b_low >> shift)
    other = a_low * b_high + (middle & low)
    product: NDArray[np.uint64] = a_high * b_high + (middle >> shift) + (other >> shift)
    return product
