"""Log probabilities of chosen tokens and of the best ones.

They are the model's own: taken from the raw logits, before bias, penalties and temperature (vLLM's
``raw_logprobs``), in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["RowLogprobs", "row_logprobs"]

_ROWS_AT_ONCE: Final = 32


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """What one output row has to say.

    Attributes:
        rank: Of the chosen token; the best has 1, and equals share the better rank.
        token_ids: The chosen token, then the best ones in order (the chosen may be among them).
        logprobs: Theirs.
    """

    rank: int
    token_ids: list[int]
    logprobs: list[float]


def row_logprobs(
    logits: Tensor,
    rows: NDArray[np.int64],
    chosen: NDArray[np.int32],
    num_best: NDArray[np.int32],
) -> list[RowLogprobs]:
    """For each of `rows` of `logits`: its `chosen` token and its `num_best` best ones."""
    found: list[RowLogprobs] = []
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        values = logits[torch.from_numpy(rows[part])].float().log_softmax(dim=1)
        tokens = torch.from_numpy(chosen[part].astype(np.int64))[:, None]
        own = values.gather(1, tokens)
        ranks = (values > own).sum(dim=1) + 1
        best = values.topk(min(int(num_best[part].max()), values.shape[1]), dim=1)
        for rank, token, value, ids, best_values, num in zip(
            ranks.tolist(),
            tokens[:, 0].tolist(),
            own[:, 0].tolist(),
            best.indices.tolist(),
            best.values.tolist(),
            num_best[part].tolist(),
            strict=True,
        ):
            found.append(RowLogprobs(rank, [token, *ids[:num]], [value, *best_values[:num]]))
    return found
