"""What a step takes, measured before the first one.

A step with prompt tokens takes longer than one without, and whoever streams waits for it. How long
depends on the model, the machine and the context, so it is measured: one layer of the model runs a
few steps, and a step of the whole takes as many times that as there are layers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from fastserve.arena import Arena
from fastserve.core import Core

if TYPE_CHECKING:
    from fastserve.runner import Runner

__all__ = ["MIN_MIXED_PREFILL_TOKENS", "MIN_POSITIONS", "StepCosts", "measure"]

MIN_MIXED_PREFILL_TOKENS: Final = 64
"""With fewer rows matrix products are slow: streams would gain little and prompts lose much."""

MIN_POSITIONS: Final = 2
"""Of a model that can be measured: a prompt of one token, and its answer."""

_CHUNK: Final = 32
_CONTEXT: Final = 1024
_REPEATS: Final = 3
_MAX_CONTEXT_PER_TOKEN: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Nanoseconds that parts of a step take.

    Attributes:
        step_ns: A step with one row that has one token to go.
        token_ns: A token of a prompt, without what it attends to.
        context_ns: Each token that a token of a prompt attends to.
    """

    step_ns: float
    token_ns: float
    context_ns: float

    def max_prefill_tokens(self, target_itl_ms: float) -> int:
        """Prompt tokens without context that a step may hold beside streams, to keep a target.

        At least :data:`MIN_MIXED_PREFILL_TOKENS`, for which the target may be missed.
        """
        room_ns = target_itl_ms * 1e6 - self.step_ns
        tokens = int(room_ns / self.token_ns) if room_ns > 0 else 0
        return min(max(tokens, MIN_MIXED_PREFILL_TOKENS), 1 << 30)

    @property
    def context_per_token(self) -> int:
        """Tokens of context that take as long as a token of a prompt."""
        if self.context_ns * _MAX_CONTEXT_PER_TOKEN <= self.token_ns:
            return _MAX_CONTEXT_PER_TOKEN
        return max(round(self.token_ns / self.context_ns), 1)


def measure(layer: Runner, *, num_layers: int, weight_ratio: float) -> StepCosts:
    """Run a few steps of one layer.

    Args:
        layer: The model with one layer. Its cache is made here.
        num_layers: Of the whole model.
        weight_ratio: Bytes of the whole model's weights, as a multiple of this one's.
    """
    # All chunks are whole, but for a model that has no room for one.
    longest = layer.config.max_positions - 1
    num_tokens = min(longest // _CHUNK * _CHUNK or longest, _CHUNK + _CONTEXT)
    context = max(num_tokens - _CHUNK, 0)
    steps = _Steps(layer, num_tokens)
    first = steps.measure()
    last = first
    if context:
        while steps.start < context:
            steps.skip()
        last = steps.measure()
    one = steps.measure()
    chunk = min(_CHUNK, num_tokens)
    return StepCosts(
        step_ns=one * weight_ratio,
        token_ns=max(first * num_layers / chunk, 1.0),
        context_ns=max(last - first, 0.0) * num_layers / (chunk * max(context, 1)),
    )


class _Steps:
    """The steps of one request: its prompt, a chunk a step, then a token."""

    def __init__(self, layer: Runner, num_tokens: int) -> None:
        block_size = 16
        num_blocks = (num_tokens + 1) // block_size + 1
        self._core = Core(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=num_tokens + 2,
            max_num_seqs=1,
            max_num_batched_tokens=_CHUNK,
            vocab_size=layer.vocab_size,
        )
        layer.allocate_kv(num_blocks, block_size, self._core.block_tables)
        self._layer = layer
        self._arena = Arena(self._core.layout, self._core.plan_words)
        self._last_samples = np.zeros(1, np.int32)
        prompt = np.zeros(num_tokens, np.int32)
        self._core.inbox().submit(1, prompt, max_tokens=2, arrival=0)
        self._plan()

    def _plan(self) -> None:
        self._sizes = self._core.plan(0, self._arena.words)

    @property
    def start(self) -> int:
        """Position of the first token of the step that is next."""
        return int(self._arena.view(self._sizes).positions[0])

    def measure(self) -> float:
        """Nanoseconds that the next step takes, at best of several times."""
        plan = self._arena.view(self._sizes)
        times = []
        for _ in range(_REPEATS):
            start = time.perf_counter_ns()
            self._layer.forward(plan, self._last_samples)
            times.append(time.perf_counter_ns() - start)
        self.skip()
        return float(min(times))

    def skip(self) -> None:
        """Do without the next step: what it would compute is of no interest."""
        num_outputs = self._arena.view(self._sizes).num_outputs
        counts = np.ones(num_outputs, np.int32)
        self._core.commit(self._sizes.step, 0, counts, np.zeros(num_outputs, np.int32))
        self._plan()
