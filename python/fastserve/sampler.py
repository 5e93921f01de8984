"""One token for every output row of a step: the sampler of the extension, on a plan's arrays.

What belongs to a sequence arrives once, in its row slot's event: the sampling record and the tokens
so far. A step then needs its logits and its plan. What is done with them, and in which order, is
told in ``rust/cpu/src/sampling/sampler.rs``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fastserve._core import cpu
from fastserve._core.cpu import ALL_MASKED, NOT_FINITE
from fastserve.arena import PlanView, Words

__all__ = [
    "ALL_MASKED",
    "NOT_FINITE",
    "RowLogprobs",
    "SampleResult",
    "Sampler",
    "ScoredToken",
]


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """What one output row has to say.

    Log probabilities are the model's own: taken from the raw logits, before bias, penalties and
    temperature (vLLM's ``raw_logprobs``).

    Attributes:
        rank: Of the chosen token; the best has 1, and equals share the better rank.
        token_ids: The chosen token, then the best ones in order, equals by id (the chosen may be
            among them).
        logprobs: Theirs.
    """

    rank: int
    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """The log probability of one prompt token.

    Attributes:
        request_id: Whose prompt, by the core's number.
        position: Of the token in the prompt; the first token has none, so 1 or more.
        logprobs: Its own, and the best tokens' in its place.
    """

    request_id: int
    position: int
    logprobs: RowLogprobs


@dataclass(frozen=True, slots=True)
class SampleResult:
    """What a step's output rows gave.

    Attributes:
        counts: Tokens appended a row: 1 for a sample, 0 for a score; a row that failed has
            :data:`NOT_FINITE` (its logits, the raw ones or those made of them) or
            :data:`ALL_MASKED` (no token may be taken).
        tokens: The sampled token a row; of no meaning where the count is not 1.
        logprobs: Of the sampled tokens, by output row, where they were asked for.
        scores: Of prompt tokens, where they were asked for.
    """

    counts: Words
    tokens: Words
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)
    scores: list[ScoredToken] = field(default_factory=list)

    @classmethod
    def of(cls, samples: cpu.Samples) -> SampleResult:
        """What the extension's sampler says, as objects where a request asked for more."""
        return cls(
            samples.counts,
            samples.tokens,
            {row: RowLogprobs(*found) for row, found in samples.logprobs()},
            [
                ScoredToken(request_id, position, RowLogprobs(*found))
                for request_id, position, found in samples.scores()
            ],
        )


class Sampler:
    """Holds sampling state per row slot; samples step after step, in the order of the steps.

    Args:
        max_num_seqs: Row slots.
        vocab_size: Columns of the logits.
        pool: Threads to share out rows to. ``None``: the caller's alone.

    Attributes:
        last_samples: ``[max_num_seqs]`` the token each slot sampled last: what a plan means by
            −1 − slot. A view: the next step changes it.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, pool: cpu.Pool | None = None) -> None:
        self._pool = pool or cpu.Pool(1)
        self._sampler = cpu.Sampler(max_num_seqs, vocab_size)
        self.last_samples: Words = self._sampler.last_samples

    def apply_events(self, plan: PlanView) -> None:
        """Take over the slots that `plan` assigns and forget those it releases.

        To be called once for every plan, before :meth:`sample` and after the step before it was
        sampled.
        """
        if len(plan.slot_events):
            self._sampler.apply_events(plan.slot_events, plan.event_words)

    def sample(self, logits: NDArray[np.float32], plan: PlanView) -> SampleResult:
        """Sample `plan`'s output rows from `logits`, float32 ``[num_outputs, vocab_size]``."""
        return SampleResult.of(
            self._sampler.sample(
                self._pool,
                logits,
                positions=plan.positions,
                out_rows=plan.out_rows,
                out_slots=plan.out_slots,
                out_kinds=plan.out_kinds,
            )
        )
