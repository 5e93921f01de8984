"""What a request gives back.

The names are vLLM's. An output says everything so far, not only what is new since the last one; it
belongs to whoever got it and does not change any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = [
    "CompletionOutput",
    "FinishReason",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "TokenLogprobs",
]

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log probability at one position.

    Attributes:
        logprob: Natural logarithm, of the model's own distribution.
        rank: 1 for the most likely token.
        decoded_token: The token's text, with U+FFFD for bytes that are no text by themselves.
    """

    logprob: float
    rank: int
    decoded_token: str


TokenLogprobs: TypeAlias = dict[int, Logprob]
"""By token id: the token at a position, then the most likely ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One sequence.

    Attributes:
        index: Which of the request's ``n``.
        text: Never ends inside a character, nor inside what may become a stop string.
        token_ids: The token that ended the sequence is among them.
        logprobs: One entry a token, where ``logprobs`` was asked for.
        cumulative_logprob: Their sum, for the tokens themselves.
        finish_reason: ``None`` while it goes on.
        stop_reason: The stop string, or the token of ``stop_token_ids``, that ended it; ``None``
            for the model's own end of sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """When things happened, in seconds on ``time.monotonic``.

    Attributes:
        arrival_s: It was submitted.
        first_token_s: The first token of any of its sequences, ``None`` before.
        last_token_s: The newest token, ``None`` before the first.
        num_generation_tokens: Tokens generated, over all sequences.
    """

    arrival_s: float
    first_token_s: float | None
    last_token_s: float | None
    num_generation_tokens: int

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def latency_s(self) -> float | None:
        """Time to the newest token."""
        return None if self.last_token_s is None else self.last_token_s - self.arrival_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first, over the time they took. ``None`` before the second."""
        if self.first_token_s is None or self.last_token_s is None:
            return None
        seconds = self.last_token_s - self.first_token_s
        return (self.num_generation_tokens - 1) / seconds if seconds > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A request and what it has so far.

    Attributes:
        request_id: The caller's name for it, or the engine's where none was given.
        prompt: As text, ``None`` where it came as token ids.
        prompt_token_ids: As the model sees it.
        prompt_logprobs: One entry a prompt token, ``None`` for the first, where ``prompt_logprobs``
            was asked for and every one is known.
        outputs: One for each of ``n`` sequences.
        finished: Whether all of them have ended.
        num_cached_tokens: Prompt tokens whose keys and values were in the cache already.
        error: What failed, where a sequence ended with ``error``.
        metrics: Times.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    error: str | None
    metrics: RequestMetrics
