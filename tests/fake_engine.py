"""An engine without a model, for tests of what stands in front of one.

Its tokens are bytes, and its answer to a prompt is a script: ``SCRIPTS[prompt]``, or the prompt
backwards. Each step gives one token of each sequence, when the test lets it (``gate``).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field

from fastserve.errors import ModelError
from fastserve.sampling_params import SamplingParams
from fastserve.text.detokenizer import Detokenizer, StopStrings, TokenTable

END = 256


class FakeTokenizer:
    """Bytes as tokens, and a template that shows where its parts came from."""

    def __init__(self) -> None:
        self.table = TokenTable([bytes([byte]) for byte in range(256)] + [b"<end>"], [END])
        self.has_chat_template = True

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def apply_chat_template(self, messages: list[Mapping[str, str]]) -> list[int]:
        if not self.has_chat_template:
            raise ModelError("the model has no chat template; use /v1/completions")
        return self.encode("".join(f"[{m['role']}]{m['content']}" for m in messages) + "[answer]")


@dataclass
class Choice:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, FakeLogprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class FakeLogprob:
    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class Output:
    prompt_token_ids: list[int]
    outputs: list[Choice]
    num_cached_tokens: int = 0
    finished: bool = False


class FakeEngine:
    """What the server needs of an ``AsyncEngine``.

    Attributes:
        scripts: Answers by prompt; others are answered backwards.
        gate: Cleared, it stops every generation before its next token.
        running: Requests that have neither ended nor been aborted, by prompt.
        aborted: Prompts of requests whose generator was closed early.
        error: Raised by every new request.
        fails_after: Tokens after which every request fails.
    """

    def __init__(self, scripts: Mapping[str, str] | None = None) -> None:
        self.model_name = "fake"
        self.max_model_len = 512
        self.scripts = dict(scripts or {})
        self.tokenizer = FakeTokenizer()
        self._changed = threading.Condition()
        self.reset()

    def reset(self) -> None:
        """As new."""
        self.tokenizer.has_chat_template = True
        self.is_running = True
        self.gate = asyncio.Event()
        self.gate.set()
        self.running: list[str] = []
        self.aborted: list[str] = []
        self.error: Exception | None = None
        self.fails_after: int | None = None

    def shutdown(self) -> None:
        """End as an engine does whose owner is done with it."""
        self.is_running = False

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait in another thread until the running requests make `condition` true."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout=30), "waited 30 s in vain"

    async def generate(
        self, prompt: list[int], params: SamplingParams, *, priority: int = 0
    ) -> AsyncGenerator[Output, None]:
        if self.error is not None:
            raise self.error
        text = bytes(prompt).decode()
        answer = self.scripts.get(text, text[::-1]).encode()[: params.max_tokens]
        output = Output(
            list(prompt), [Choice(index) for index in range(params.n)], len(prompt) // 2
        )
        stops = StopStrings(params.stop_strings)
        writers = [Detokenizer(self.tokenizer.table, stops) for _ in range(params.n)]
        if params.logprobs is not None:
            for choice in output.outputs:
                choice.logprobs = []
        with self._changed:
            self.running.append(text)
            self._changed.notify_all()
        try:
            for step, token in enumerate(answer):
                await self.gate.wait()
                await asyncio.sleep(0)
                if self.fails_after is not None and step >= self.fails_after:
                    raise RuntimeError("the device is on fire")
                for choice, writer in zip(output.outputs, writers, strict=True):
                    self._extend(choice, writer, token, params)
                if all(choice.finish_reason for choice in output.outputs):
                    break
                yield output
            for choice, writer in zip(output.outputs, writers, strict=True):
                choice.text += writer.finish()
                choice.finish_reason = choice.finish_reason or "length"
            output.finished = True
            yield output
        except (GeneratorExit, asyncio.CancelledError):
            self.aborted.append(text)
            raise
        finally:
            with self._changed:
                self.running.remove(text)
                self._changed.notify_all()

    def _extend(
        self, choice: Choice, writer: Detokenizer, token: int, params: SamplingParams
    ) -> None:
        if choice.finish_reason:
            return
        delta = writer.push([token])
        choice.text += delta.text
        choice.token_ids.append(token)
        if choice.logprobs is not None:
            best = {token: FakeLogprob(-0.5, 2), **{t: FakeLogprob(-t / 8, t) for t in (1, 3)}}
            choice.logprobs.append(dict(list(best.items())[: 1 + (params.logprobs or 0)]))
        if delta.stop is not None:
            choice.finish_reason, choice.stop_reason = "stop", delta.stop
