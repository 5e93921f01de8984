"""Log probabilities of chosen tokens and of the best ones.

They are the model's own: taken from the raw logits, before bias, penalties and temperature (vLLM's
``raw_logprobs``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastserve._core import cpu

__all__ = ["RowLogprobs", "row_logprobs"]


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """What one output row has to say.

    Attributes:
        rank: Of the chosen token; the best has 1, and equals share the better rank.
        token_ids: The chosen token, then the best ones in order, equals by id (the chosen may be
            among them).
        logprobs: Theirs.
    """

    rank: int
    token_ids: list[int]
    logprobs: list[float]


def row_logprobs(
    pool: cpu.Pool,
    logits: NDArray[np.float32],
    rows: NDArray[np.int64],
    chosen: NDArray[np.int32],
    num_best: NDArray[np.int32],
) -> list[RowLogprobs]:
    """For each of `rows` of `logits`: its `chosen` token and its `num_best` best ones.

    Args:
        pool: Shares out the rows.
        logits: ``[any, vocab_size]``; `rows` of it are finite.
        rows: ``[n]``.
        chosen: A token for each, ``[n]``.
        num_best: For each, at least 0, ``[n]``; all tokens where it is more than there are.
    """
    found = cpu.row_logprobs(pool, logits, rows.astype(np.int32), chosen, num_best)
    return [RowLogprobs(*row) for row in found]
