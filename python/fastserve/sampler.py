"""One token for every output row of a step, vectorised over rows.

What belongs to a sequence arrives once, in its row slot's event: the sampling record and the tokens
so far. It is kept in arrays indexed by slot (:mod:`fastserve.sampling_record`); a step then needs
its logits and its plan. In vLLM's order:

1. rows whose raw logits are not finite are set apart: their request ends with ``error``, alone;
2. log probabilities, from the raw logits (:mod:`fastserve.logprobs`);
3. ``allowed_token_ids``, ``min_tokens`` (end tokens masked), ``logit_bias``, then repetition,
   frequency and presence penalties; a row whose best logit is not finite after them is set apart
   too;
4. greedy rows take the best token (the lowest id of equals), the others draw
   (:mod:`fastserve.draw`), with bits named by seed, sequence index and position alone.

The row work is Rust's (``rust/cpu/src/sampling``); a step of greedy rows without any of the rest is
one pass over its logits.

Nothing here is undone when a step fails: a rolled-back sequence gets its slot again through an
event, which brings its tokens and so resets what was counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fastserve._core import cpu
from fastserve.arena import EventWord, OutputKind, PlanView, SlotEventKind
from fastserve.draw import draw_tokens
from fastserve.logprobs import RowLogprobs, row_logprobs
from fastserve.sampling_record import SlotStates

__all__ = ["ALL_MASKED", "NOT_FINITE", "SampleResult", "Sampler", "ScoredToken"]

Ints = NDArray[np.int32]
Rows = NDArray[np.int64]
Floats = NDArray[np.float32]

NOT_FINITE: Final = -1
"""Count of a row whose logits have NaN or an infinity: the raw ones, or those made of them."""

ALL_MASKED: Final = -2
"""Count of a row in which no token may be taken."""

_MASKED: Final = float("-inf")


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
            :data:`NOT_FINITE` or :data:`ALL_MASKED`.
        tokens: The sampled token a row; of no meaning where the count is not 1.
        logprobs: Of the sampled tokens, by output row, where they were asked for.
        scores: Of prompt tokens, where they were asked for.
    """

    counts: Ints
    tokens: Ints
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)
    scores: list[ScoredToken] = field(default_factory=list)


class Sampler:
    """Holds sampling state per row slot; samples step after step, in the order of the steps.

    Args:
        max_num_seqs: Row slots.
        vocab_size: Columns of the logits.
        pool: Threads to share out rows to. ``None``: the caller's alone.

    Attributes:
        last_samples: ``[max_num_seqs]`` the token each slot sampled last: what a plan means by
            −1 − slot.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, pool: cpu.Pool | None = None) -> None:
        self.vocab_size = vocab_size
        self._pool = pool or cpu.Pool(1)
        self.last_samples: Ints = np.zeros(max_num_seqs, dtype=np.int32)
        self._slots = SlotStates(max_num_seqs)
        self._score_tokens: dict[int, Ints] = {}
        # Untouched pages of zeros cost nothing, so only slots with penalties take memory.
        self._output_counts = np.zeros((max_num_seqs, vocab_size), dtype=np.int32)
        self._seen = np.zeros((max_num_seqs, vocab_size), dtype=np.bool_)

    def apply_events(self, plan: PlanView) -> None:
        """Take over the slots that `plan` assigns and forget those it releases.

        To be called once for every plan, before :meth:`sample` and after the step before it was
        sampled.
        """
        for event in plan.slot_events:
            slot = int(event[EventWord.SLOT])
            self._score_tokens.pop(slot, None)
            if event[EventWord.KIND] == SlotEventKind.RELEASED:
                self._slots.release(slot)
            else:
                self._assign(slot, event, *plan.event_payload(event))

    def _assign(self, slot: int, event: Ints, record: Ints, tokens: Ints) -> None:
        words = event.view(np.uint32)
        request = int(words[EventWord.REQUEST_LOW]) | int(words[EventWord.REQUEST_HIGH]) << 32
        num_prompt_tokens = int(event[EventWord.NUM_PROMPT_TOKENS])
        index = int(event[EventWord.INDEX])
        self._slots.assign(slot, request, index, num_prompt_tokens, record)
        if self._slots.num_prompt_logprobs[slot] >= 0:
            self._score_tokens[slot] = tokens[:num_prompt_tokens].copy()
        if self._slots.penalized[slot]:
            known = np.where(tokens < 0, self.last_samples[np.maximum(-1 - tokens, 0)], tokens)
            output = known[num_prompt_tokens:]
            self._output_counts[slot] = np.bincount(output, minlength=self.vocab_size)
            self._seen[slot] = False
            self._seen[slot, known] = True

    def sample(self, logits: Floats, plan: PlanView) -> SampleResult:
        """Sample `plan`'s output rows from `logits`, float32 ``[num_outputs, vocab_size]``."""
        num = plan.num_outputs
        if num == 0:
            return SampleResult(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32))
        tokens, best, finite = cpu.best_tokens(self._pool, logits)
        result = SampleResult(np.ones(num, dtype=np.int32), tokens)
        result.counts[~finite] = NOT_FINITE
        sampled = plan.out_kinds == OutputKind.SAMPLE
        if not sampled.all():
            self._score(logits, plan, result, finite)
        rows = np.flatnonzero(sampled & finite)
        self._sample_others(logits, best, plan, result, rows)
        kept = rows[result.counts[rows] > 0]
        slots = plan.out_slots[kept]
        self._remember(slots, result.tokens[kept])
        wanted = kept[self._slots.num_logprobs[slots] >= 0]
        if len(wanted):
            num_best = self._slots.num_logprobs[plan.out_slots[wanted]]
            found = row_logprobs(self._pool, logits, wanted, result.tokens[wanted], num_best)
            result.logprobs.update(zip(wanted.tolist(), found, strict=True))
        return result

    def _sample_others(
        self, logits: Floats, best: Floats, plan: PlanView, result: SampleResult, rows: Rows
    ) -> None:
        """Overwrite the tokens of those of `rows` that are not just the best raw logit."""
        state = self._slots
        slots = plan.out_slots[rows]
        adjusts = state.adjusts[slots]
        drawn = rows[~state.greedy[slots] & ~adjusts]
        if len(drawn):
            self._draw(logits, drawn, best[drawn], plan, result, drawn)
        changed = rows[adjusts]
        if len(changed):
            adjusted = logits[changed]
            self._adjust(adjusted, plan.out_slots[changed], _next_positions(plan, changed))
            tokens, best, _ = cpu.best_tokens(self._pool, adjusted)
            result.tokens[changed] = tokens
            self._draw(adjusted, np.arange(len(changed)), best, plan, result, changed)

    def _draw(
        self,
        logits: Floats,
        rows: Rows,
        best: Floats,
        plan: PlanView,
        result: SampleResult,
        outputs: Rows,
    ) -> None:
        """Draw for those of the output rows `outputs` that are not greedy.

        The logits of each are one of `rows` of `logits`, and its best one is in `best`. Only this
        one need be finite over the temperature: NaN and +inf come first in a row, and what falls to
        -inf beside it is not taken. What is not finite raises nothing, because it ends its row
        alone.
        """
        state = self._slots
        slots = plan.out_slots[outputs]
        divisors = np.where(state.greedy[slots], np.float32(1), state.temperature[slots])
        with np.errstate(over="ignore"):
            scaled = best / divisors
        alive = np.isfinite(scaled)
        dead = ~alive
        result.counts[outputs[dead]] = np.where(scaled[dead] == _MASKED, ALL_MASKED, NOT_FINITE)
        drawn = np.flatnonzero(alive & ~state.greedy[slots])
        if len(drawn):
            into = outputs[drawn]
            result.tokens[into] = draw_tokens(
                self._pool, logits, rows[drawn], state, slots[drawn], _next_positions(plan, into)
            )

    def _adjust(self, logits: Floats, slots: Ints, positions: Ints) -> None:
        """Masks, biases and penalties, in place; `positions` are those of the tokens to come."""
        state = self._slots
        early = positions - state.num_prompt_tokens[slots] < state.min_tokens[slots]
        for row in np.flatnonzero(state.adjusts[slots]).tolist():
            slot, values = int(slots[row]), logits[row]
            if (allowed := state.allowed.get(slot)) is not None:
                kept = values[allowed]
                values[:] = _MASKED
                values[allowed] = kept
            if early[row] and (end := state.end_tokens.get(slot)) is not None:
                values[end] = _MASKED
            if (bias := state.biases.get(slot)) is not None:
                values[bias[0]] += bias[1]
            if state.penalized[slot]:
                self._penalize(values, slot)

    def _penalize(self, logits: Floats, slot: int) -> None:
        """Penalties touch only tokens that the sequence has, so only those are looked at."""
        state = self._slots
        tokens = np.flatnonzero(self._seen[slot])
        counts = self._output_counts[slot, tokens]
        values = logits[tokens]
        factor = state.repetition_penalty[slot]
        with np.errstate(over="ignore"):
            values = np.where(values > 0, values / factor, values * factor)
        values -= state.frequency_penalty[slot] * counts
        values -= state.presence_penalty[slot] * (counts > 0)
        logits[tokens] = values

    def _remember(self, slots: Ints, tokens: Ints) -> None:
        self.last_samples[slots] = tokens
        counted = self._slots.penalized[slots]
        if counted.any():
            slots, tokens = slots[counted], tokens[counted]
            self._output_counts[slots, tokens] += 1
            self._seen[slots, tokens] = True

    def _score(
        self, logits: Floats, plan: PlanView, result: SampleResult, finite: NDArray[np.bool_]
    ) -> None:
        scored = plan.out_kinds == OutputKind.SCORE
        others = ~scored & (plan.out_kinds != OutputKind.SAMPLE)
        if others.any():
            kinds = sorted(set(plan.out_kinds[others].tolist()))
            raise ValueError(f"output kinds {kinds} are not sampled here; want sample or score")
        rows = np.flatnonzero(scored & finite)
        result.counts[rows] = 0
        slots = plan.out_slots[rows]
        positions = _next_positions(plan, rows)
        tokens = np.fromiter(
            (
                self._score_tokens[slot][position]
                for slot, position in zip(slots.tolist(), positions.tolist(), strict=True)
            ),
            dtype=np.int32,
            count=len(rows),
        )
        num_best = self._slots.num_prompt_logprobs[slots]
        found = row_logprobs(self._pool, logits, rows, tokens, num_best)
        result.scores.extend(
            map(ScoredToken, self._slots.request_ids[slots].tolist(), positions.tolist(), found)
        )


def _next_positions(plan: PlanView, outputs: Rows) -> Ints:
    """The position of the token that follows each of the output rows `outputs`."""
    return plan.positions[plan.out_rows[outputs]] + 1
