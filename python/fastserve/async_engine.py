"""Online use: requests come and go while others run.

::

    async with AsyncEngine("smollm2") as engine:
        async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=50)):
            print(output.outputs[0].text)

A thread of the engine's own looks after the steps, and sleeps while there is nothing to do. Outputs
say everything so far; a reader that is slower than the engine misses intermediate ones, never text,
and nothing piles up for it::

    any loop                                     the engine's thread
    generate ── submit ──▶ Inbox, wake ────────▶ step
       ▲                                          │ requests with news
       └── _Stream.put ◀── call_soon_threadsafe ◀─┘ once a step for each event loop
    closed early ── abort, wake ───────────────▶ its blocks are back within a step
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from fastserve.config import EngineConfig, EngineOptions
from fastserve.errors import EngineDeadError
from fastserve.models.resolve import check_name
from fastserve.progress import LoadingBar
from fastserve.prompts import Prompt, tokenize
from fastserve.sampling_params import SamplingParams
from fastserve.text.chat_template import as_conversation, template_options

if TYPE_CHECKING:
    from fastserve.active_request import ActiveRequest
    from fastserve.engine import Engine
    from fastserve.outputs import RequestOutput
    from fastserve.text.tokenizer import Tokenizer

__all__ = ["AsyncEngine"]

logger = logging.getLogger("fastserve.async_engine")

_LONG_TEXT = 2000
"""Characters from which a prompt is tokenised off the event loop."""


class AsyncEngine:
    """A model and an engine that runs on its own thread.

    It may be made before or inside an event loop, and used from several loops. Used as a context
    manager, plain or asynchronous, it is shut down at the end of the block.

    Args:
        model: A folder, a GGUF file, a hub id or ``smollm2``.
        progress: Show a bar while loading; by default where stderr is a terminal. A callable is the
            caller's own bar: it gets bytes done and bytes in all.
        options: The fields of :class:`fastserve.config.EngineConfig`.

    Raises:
        ModelError: There is no such model, or it cannot be run.
        ConfigError: Names every bad option.
        TypeError: An option that is not known, with the nearest that is.
    """

    def __init__(
        self, model: str | Path, *, progress: LoadingBar = None, **options: Unpack[EngineOptions]
    ) -> None:
        config = EngineConfig.from_keywords("AsyncEngine", dict(options))
        check_name(model)
        from fastserve.engine import Engine  # Late: importing fastserve costs nothing.

        self._start(Engine.load(model, config, progress=progress))

    @classmethod
    def from_engine(cls, engine: Engine) -> AsyncEngine:
        """Take over an engine that is ready. Nobody else may step it from now on."""
        self = cls.__new__(cls)
        self._start(engine)
        return self

    def _start(self, engine: Engine) -> None:
        self._engine = engine
        self._stepper = _Stepper(engine)
        # The thread does not know this object, so it ends when nobody else does, at exit too.
        self._finalizer = weakref.finalize(self, self._stepper.stop)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's.

        Raises:
            ModelError: ``skip_tokenizer_init`` left it out.
        """
        return self._engine.require_tokenizer()

    @property
    def model_name(self) -> str:
        """What was asked for."""
        return self._engine.model_name

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output, in force."""
        return self._engine.max_model_len

    @property
    def is_running(self) -> bool:
        """Whether it takes requests."""
        return self._engine.is_alive

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue `prompt`. Every output is cumulative: it says everything so far.

        The request is submitted when the first output is asked for. Closing the iterator, or
        cancelling the task that waits on it, aborts the request.

        Args:
            prompt: Text, token ids, or a dict with ``prompt`` or ``prompt_token_ids``.
            sampling_params: ``SamplingParams()`` where left out.
            request_id: A name of the caller's, unique among the requests that have not finished.
            priority: Under the ``priority`` policy lower numbers run first.

        Yields:
            Outputs; the last one is ``finished``. After a failure its finish reason is ``error``
            and ``RequestOutput.error`` says what failed; after a shutdown it is ``abort``.

        Raises:
            RequestError: The request is refused.
            ParameterError: The parameters do not fit the model.
            EngineDeadError: The engine does not run any more.
        """
        stream = _Stream(asyncio.get_running_loop())
        if isinstance(prompt, str) and len(prompt) > _LONG_TEXT:
            prompt = await asyncio.to_thread(tokenize, prompt, self._engine.tokenizer)
        request = self._engine.submit(
            prompt, sampling_params, request_id=request_id, priority=priority, listener=stream
        )
        self._stepper.wake()
        try:
            while True:
                output = await stream.next()
                yield output
                if output.finished:
                    return
        finally:
            if not request.finished:
                self._engine.abort(request)
                self._stepper.wake()

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation by the model's chat template; otherwise as :meth:`generate`.

        Args:
            messages: ``{"role": ..., "content": ...}`` each; the content is text, or a list of
                OpenAI's text parts.
            sampling_params: As for :meth:`generate`.
            request_id: As for :meth:`generate`.
            add_generation_prompt: End the prompt where the assistant's answer begins.
            continue_final_message: The last message is the beginning of the answer.
            tools: Described to the model, where its template can.
            chat_template_kwargs: Further variables of the template.
            priority: As for :meth:`generate`.

        Yields:
            What :meth:`generate` yields.

        Raises:
            ModelError: The model has no chat template.
            ChatTemplateError: The messages are not to the template's liking; says why.
            TypeError: Something else than messages was given.
        """
        options = template_options(
            add_generation_prompt, continue_final_message, tools, chat_template_kwargs
        )
        # Off the event loop, because nobody knows how long they are before they are read.
        prompt = await asyncio.to_thread(
            self.tokenizer.apply_chat_template, as_conversation(messages), **options
        )
        outputs = self.generate(prompt, sampling_params, request_id, priority=priority)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def abort(self, request_id: str) -> bool:
        """End a request with ``abort``. False: there is none of that name that has not finished."""
        request = self._engine.find(request_id)
        if request is None:
            return False
        self._engine.abort(request)
        self._stepper.wake()
        return True

    async def health(self) -> None:
        """Return if the engine runs.

        Raises:
            EngineDeadError: It does not; says why.
        """
        self._engine.check_alive()

    def stats(self) -> dict[str, int]:
        """Counters since the start and gauges of now, by name."""
        return self._engine.stats()

    def shutdown(self) -> None:
        """Abort every request and give the memory back. Waits for the step that runs.

        Any thread may call it, and again. Streams end with an output whose finish reason is
        ``abort``.
        """
        self._stepper.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.shutdown)


class _Stream:
    """The newest output of one request, on its way to the event loop that waits for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._latest: RequestOutput | None = None
        self._has_news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Replace what was not read yet. Runs on the loop."""
        self._latest = output
        self._has_news.set()

    async def next(self) -> RequestOutput:
        """The newest output, when there is one that was not read yet."""
        await self._has_news.wait()
        self._has_news.clear()
        assert self._latest is not None, "the event says so"
        return self._latest


class _Stepper:
    """The thread that steps an engine while there is work."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wake = threading.Event()
        self._stopping = False
        # A daemon, for an interpreter waits for others before it runs what is to be done at exit.
        self._thread = threading.Thread(target=self._run, name="fastserve-engine", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There may be work."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread, and with it the engine. May be called again."""
        self._stopping = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                if self._step():
                    continue
                if not self._stopping:
                    self._wake.wait()
        except EngineDeadError:
            pass  # It died in its last step, which has ended every request and said so.
        except Exception:
            logger.exception("the engine's thread stops")
        finally:
            _deliver(self._engine.shutdown())

    def _step(self) -> bool:
        """Run a step if there is work. Returns whether there was anything to do."""
        if not self._engine.has_work():
            self._engine.check_alive()
            return False
        news = self._engine.step()
        _deliver(news)
        return bool(news) or self._engine.ran_step


def _deliver(news: list[ActiveRequest]) -> None:
    """Hand outputs to the loops that wait for them, one call a loop."""
    batches: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput]]] = {}
    for request in news:
        if isinstance(request.listener, _Stream):
            batch = batches.setdefault(request.listener.loop, [])
            batch.append((request.listener, request.output()))
    for loop, batch in batches.items():
        try:
            loop.call_soon_threadsafe(_put_all, batch)
        except RuntimeError:  # That loop is closed, and whoever waited in it is gone.
            logger.debug("%d outputs have no reader any more", len(batch))


def _put_all(batch: list[tuple[_Stream, RequestOutput]]) -> None:
    for stream, output in batch:
        stream.put(output)
