"""A request that has not ended: its tokens, its text, and why its sequences ended.

The core knows tokens and blocks; this is the other half. Text is made late: a sequence without stop
strings turns its tokens into text when somebody asks, all new ones at once.

A sequence ends in two ways. The core ends it (a stop token, a length, an abort, an error) and says
so; or its text does (a stop string), and then the core has to be told and goes on to name it until
it has heard. *Finished* is what the caller sees; *settled* is that the core will not name it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from fastserve.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from fastserve.text.detokenizer import Detokenizer, StopStrings, TextDelta, TokenTable

if TYPE_CHECKING:
    from fastserve.sampler import RowLogprobs, ScoredToken
    from fastserve.sampling_params import SamplingParams

__all__ = ["FINISHED_BY_ERROR", "ActiveRequest"]

FINISH_REASONS: Final[dict[int, FinishReason]] = {1: "stop", 2: "length", 3: "abort", 4: "error"}
"""By the core's code; 0 is a sequence that goes on."""

FINISHED_BY_ERROR: Final = 4


class TextSide:
    """Makes detokenizers for the sequences of one request.

    Args:
        table: The vocabulary's bytes; ``None`` for a model without tokenizer, which has no text.
        params: What the request asked.
    """

    def __init__(self, table: TokenTable | None, params: SamplingParams) -> None:
        self.table = table
        self._params = params
        self._stops: StopStrings = StopStrings(params.stop_strings)

    def detokenizer(self) -> Detokenizer | None:
        """A new one."""
        if self.table is None:
            return None
        return Detokenizer(
            self.table,
            self._stops,
            skip_special_tokens=self._params.skip_special_tokens,
            include_stop_str_in_output=self._params.include_stop_str_in_output,
            min_tokens=self._params.min_tokens,
        )

    def token_text(self, token: int) -> str:
        """What one token stands for by itself."""
        if self.table is None:
            return ""
        return self.table.token_bytes(token).decode(errors="replace")

    def logprobs(self, row: RowLogprobs) -> TokenLogprobs:
        """A row as the caller sees it: the token itself first, then the best ones in order."""
        found: TokenLogprobs = {}
        ranks = (row.rank, *range(1, len(row.token_ids)))
        for token, logprob, rank in zip(row.token_ids, row.logprobs, ranks, strict=True):
            if token not in found:
                found[token] = Logprob(logprob, rank, self.token_text(token))
        return found


class ActiveSequence:
    """One of a request's sequences."""

    __slots__ = (
        "_detokenizer",
        "_hides_last_token",
        "_num_detokenized",
        "_params",
        "_side",
        "_text",
        "_text_ended",
        "finish_reason",
        "index",
        "logprobs",
        "settled",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, index: int, params: SamplingParams, side: TextSide) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.settled = False
        self._params = params
        self._side = side
        self._detokenizer = side.detokenizer()
        self._text = ""
        self._num_detokenized = 0
        self._hides_last_token = False
        self._text_ended = False

    def take(
        self,
        tokens: Sequence[int],
        row: RowLogprobs | None,
        reason: FinishReason | None,
        stop_token: int | None,
    ) -> int | None:
        """Take what a step has to say.

        Returns:
            How many tokens are kept, if a stop string has just ended what the core goes on with.
        """
        if self.finish_reason is not None:
            return None  # Tokens of a step that was planned before the text had ended.
        self.token_ids += tokens
        if row is not None:
            self.logprobs.append(self._side.logprobs(row))
        self._hides_last_token = (
            stop_token is not None and not self._params.include_stop_str_in_output
        )
        if self._params.stop_strings and self._find_stop_string():
            return None if reason is not None else len(self.token_ids)
        if reason is not None:
            self.finish_reason = reason
            if stop_token in (self._params.stop_token_ids or ()):
                self.stop_reason = stop_token
        return None

    def _find_stop_string(self) -> bool:
        """Turn the new tokens into text; whether that completed a stop string."""
        delta = self._detokenize()
        if delta is None or delta.stop is None:
            return False
        del self.token_ids[delta.num_tokens_kept :]
        del self.logprobs[delta.num_tokens_kept :]
        self.finish_reason, self.stop_reason = "stop", delta.stop
        self._text_ended = True
        return True

    def _detokenize(self) -> TextDelta | None:
        end = len(self.token_ids) - self._hides_last_token
        if self._detokenizer is None or self._text_ended or end <= self._num_detokenized:
            return None
        delta = self._detokenizer.push(self.token_ids[self._num_detokenized : end])
        self._num_detokenized = end
        self._text += delta.text
        return delta

    def text(self) -> str:
        """All text that is certain."""
        self._detokenize()
        if self.finish_reason is not None and not self._text_ended:
            self._text_ended = True
            if self._detokenizer is not None:
                self._text += self._detokenizer.finish()
        return self._text

    def output(self) -> CompletionOutput:
        """As the caller sees it now."""
        logprobs, total = None, None
        if self._params.logprobs is not None:
            logprobs = self.logprobs.copy()
            total = sum(
                entry[token].logprob
                for token, entry in zip(self.token_ids, self.logprobs, strict=True)
            )
        return CompletionOutput(
            index=self.index,
            text=self.text(),
            token_ids=self.token_ids.copy(),
            logprobs=logprobs,
            cumulative_logprob=total,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class ActiveRequest:
    """A request between ``Engine.submit`` and the step that settles it.

    Attributes:
        number: The core's id.
        request_id: The caller's, or the engine's where none was given.
        prompt: As text, ``None`` where it came as token ids.
        prompt_token_ids: As the model sees it.
        params: What was asked.
        sequences: One for each of ``n``.
        num_cached_tokens: Prompt tokens found in the cache.
        error: What failed, if something did.
        listener: Whoever waits for news; nothing here looks at it.
    """

    def __init__(
        self,
        *,
        number: int,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        table: TokenTable | None,
        arrival_ns: int,
        listener: object = None,
    ) -> None:
        self.number = number
        self.listener = listener
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.num_cached_tokens = 0
        self.error: str | None = None
        self._side = TextSide(table, params)
        self.sequences = [ActiveSequence(index, params, self._side) for index in range(params.n)]
        self._arrival_ns = arrival_ns
        self._first_token_ns: int | None = None
        self._last_token_ns: int | None = None
        self._scores: list[TokenLogprobs | None] | None = None
        self._num_scored = 0
        if params.prompt_logprobs is not None:
            self._scores = [None] * len(prompt_token_ids)

    @property
    def finished(self) -> bool:
        """Whether every sequence has ended, as far as the caller is concerned."""
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def settled(self) -> bool:
        """Whether the core has ended every sequence, so that it will not name the request again."""
        return all(sequence.settled for sequence in self.sequences)

    @property
    def num_generation_tokens(self) -> int:
        """Tokens generated so far, over all sequences."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    def score(self, scored: ScoredToken) -> None:
        """Take the log probability of a prompt token. After a preemption one may come again."""
        assert self._scores is not None
        self._num_scored += self._scores[scored.position] is None
        self._scores[scored.position] = self._side.logprobs(scored.logprobs)

    def take(
        self,
        index: int,
        tokens: Sequence[int],
        row: RowLogprobs | None,
        code: int,
        stop_token: int | None,
        now_ns: int,
    ) -> int | None:
        """Take what a step has to say about one sequence.

        Returns:
            How many of its tokens are kept, if a stop string ended it and the core must be told.
        """
        sequence = self.sequences[index]
        sequence.settled |= code != 0
        if tokens and sequence.finish_reason is None:
            self._last_token_ns = now_ns
            if self._first_token_ns is None:
                self._first_token_ns = now_ns
        return sequence.take(tokens, row, FINISH_REASONS.get(code), stop_token)

    def fail(self, error: str) -> None:
        """The core can say nothing any more: end what has not ended, with `error`."""
        self.error = self.error or error
        for sequence in self.sequences:
            sequence.take((), None, "error", None)
            sequence.settled = True

    def metrics(self) -> RequestMetrics:
        """Times so far."""

        def seconds(nanos: int | None) -> float | None:
            return None if nanos is None else nanos / 1e9

        return RequestMetrics(
            arrival_s=self._arrival_ns / 1e9,
            first_token_s=seconds(self._first_token_ns),
            last_token_s=seconds(self._last_token_ns),
            num_generation_tokens=self.num_generation_tokens,
        )

    def output(self) -> RequestOutput:
        """Everything so far, for the caller to keep."""
        scores = self._scores
        if scores is not None and self._num_scored < len(scores) - 1:
            scores = None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=None if scores is None else scores.copy(),
            outputs=[sequence.output() for sequence in self.sequences],
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            error=self.error,
            metrics=self.metrics(),
        )
