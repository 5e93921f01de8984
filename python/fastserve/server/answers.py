r"""Answers in OpenAI's shapes, whole and in pieces.

Outputs of the engine are cumulative, so a piece is what is new since the last one. Pieces are plain
dicts encoded by ``json``: nothing is validated on the way out.

Log probabilities name a token by its text; one that is no text by itself (part of a character) is
``bytes:\xe5\xa5``, as OpenAI names it.
"""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastserve.server.json_response import SURROGATES
from fastserve.text.detokenizer import Detokenizer, TokenTable

if TYPE_CHECKING:
    from fastserve.outputs import CompletionOutput, Logprob, RequestOutput
    from fastserve.sampling_params import SamplingParams

__all__ = ["Answers", "ChatAnswers", "CompletionAnswers", "encode_event", "usage_of"]

DONE = b"data: [DONE]\n\n"


def encode_event(fields: Mapping[str, Any]) -> bytes:
    """One server-sent event. What some clients take for the end of a line is escaped."""
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    if not text.isascii():
        for character in ("\x85", "\u2028", "\u2029"):
            text = text.replace(character, f"\\u{ord(character):04x}")
    return b"data: " + text.encode(errors=SURROGATES) + b"\n\n"


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Tokens of all prompts and all their choices."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_generated = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {
            "cached_tokens": sum(output.num_cached_tokens for output in outputs)
        },
    }


class Answers(ABC):
    """The answer to one HTTP request: one choice for each sequence of each prompt."""

    WHOLE: str
    PIECE: str
    ID_PREFIX: str
    PATH: str

    def __init__(
        self, model: str, table: TokenTable, params: SamplingParams, *, usage_in_stream: bool
    ) -> None:
        self._table = table
        self._num_per_prompt = params.n
        self._num_best = params.logprobs or 0
        self._usage_in_stream = usage_in_stream
        self._sent: dict[int, _Sent] = {}
        self._head = {
            "id": f"{self.ID_PREFIX}-{uuid.uuid4().hex}",
            "object": self.WHOLE,
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer as one object."""
        choices = []
        for number, output in enumerate(outputs):
            for choice in output.outputs:
                index = number * self._num_per_prompt + choice.index
                logprobs = self._logprobs(_Sent(), choice)
                choices.append(
                    {
                        "index": index,
                        **self._whole_text(choice.text),
                        "logprobs": logprobs,
                        "finish_reason": choice.finish_reason,
                        "stop_reason": choice.stop_reason,
                    }
                )
        return {**self._head, "choices": choices, "usage": usage_of(outputs)}

    def pieces(self, number: int, output: RequestOutput) -> Iterator[bytes]:
        """Events for what is new in `output`, the answer so far to prompt `number`."""
        for choice in output.outputs:
            index = number * self._num_per_prompt + choice.index
            sent = self._sent.setdefault(index, _Sent())
            is_new_text = len(choice.text) > sent.num_characters
            ends = choice.finish_reason is not None and not sent.ended
            if not (is_new_text or ends):
                continue
            piece = {
                "index": index,
                **self._piece_text(choice.text[sent.num_characters :], is_first=sent.is_first),
                "logprobs": self._logprobs(sent, choice),
                "finish_reason": choice.finish_reason,
            }
            if ends:
                piece["stop_reason"] = choice.stop_reason
            sent.num_characters = len(choice.text)
            sent.is_first, sent.ended = False, ends
            yield self._event([piece])

    def usage_event(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The last event before the end, where the client asked for the usage."""
        fields = {**self._head, "object": self.PIECE, "choices": [], "usage": usage_of(outputs)}
        return encode_event(fields)

    def _event(self, choices: list[dict[str, Any]]) -> bytes:
        fields = {**self._head, "object": self.PIECE, "choices": choices}
        if self._usage_in_stream:
            fields["usage"] = None
        return encode_event(fields)

    def _logprobs(self, sent: _Sent, choice: CompletionOutput) -> dict[str, Any] | None:
        """Those of the tokens that `sent` has not seen; ``None`` where none were asked for."""
        if choice.logprobs is None:
            return None
        first, sent.num_tokens = sent.num_tokens, len(choice.logprobs)
        tokens = choice.token_ids[first : sent.num_tokens]
        return self._shape_logprobs(sent, tokens, choice.logprobs[first : sent.num_tokens])

    def _token_text(self, token: int) -> str:
        raw = self._table.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    @abstractmethod
    def _whole_text(self, text: str) -> dict[str, Any]:
        """The fields of a choice that hold its whole text."""

    @abstractmethod
    def _piece_text(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """The fields of a streamed choice that hold a piece of it."""

    @abstractmethod
    def _shape_logprobs(
        self, sent: _Sent, tokens: Sequence[int], logprobs: Sequence[Mapping[int, Logprob]]
    ) -> dict[str, Any]:
        """The log probabilities of `tokens`, as this endpoint's schema has them."""


class _Sent:
    """How much of one choice has been sent."""

    def __init__(self) -> None:
        self.is_first = True
        self.ended = False
        self.num_characters = 0
        self.num_tokens = 0
        self.text_offset = 0
        self.detokenizer: Detokenizer | None = None


class CompletionAnswers(Answers):
    """``/v1/completions``."""

    WHOLE = PIECE = "text_completion"
    ID_PREFIX = "cmpl"
    PATH = "/v1/completions"

    def _whole_text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _piece_text(self, text: str, *, is_first: bool) -> dict[str, Any]:
        return {"text": text}

    def _shape_logprobs(
        self, sent: _Sent, tokens: Sequence[int], logprobs: Sequence[Mapping[int, Logprob]]
    ) -> dict[str, Any]:
        sent.detokenizer = sent.detokenizer or Detokenizer(self._table)
        offsets = []
        for token in tokens:
            offsets.append(sent.text_offset)
            sent.text_offset += len(sent.detokenizer.push([token]).text)
        return {
            "tokens": [self._token_text(token) for token in tokens],
            "token_logprobs": [
                best[token].logprob for token, best in zip(tokens, logprobs, strict=True)
            ],
            "top_logprobs": [
                {self._token_text(token): entry.logprob for token, entry in best.items()}
                for best in logprobs
            ],
            "text_offset": offsets,
        }


class ChatAnswers(Answers):
    """``/v1/chat/completions``."""

    WHOLE = "chat.completion"
    PIECE = "chat.completion.chunk"
    ID_PREFIX = "chatcmpl"
    PATH = "/v1/chat/completions"

    def _whole_text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _piece_text(self, text: str, *, is_first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
        if text or is_first:
            delta["content"] = text
        return {"delta": delta}

    def _shape_logprobs(
        self, sent: _Sent, tokens: Sequence[int], logprobs: Sequence[Mapping[int, Logprob]]
    ) -> dict[str, Any]:
        content = []
        for token, best in zip(tokens, logprobs, strict=True):
            # The token itself is always among them; OpenAI lists it only where it is a best one.
            ranked = sorted((found.rank, other, found.logprob) for other, found in best.items())
            ranked = [entry for entry in ranked if entry[0] <= self._num_best]
            top = [self._entry(other, logprob) for _, other, logprob in ranked]
            content.append({**self._entry(token, best[token].logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._table.token_bytes(token)
        return {"token": self._token_text(token), "logprob": logprob, "bytes": list(raw)}
