"""Offline use: a list of prompts in, a list of answers out.

::

    with LLM("smollm2") as llm:
        outputs = llm.generate(["Hello,", "The capital of France is"], SamplingParams(max_tokens=8))
        print(outputs[0].outputs[0].text)

What a step has to say is looked at in the caller's thread. The step itself runs there too, or, on
the CPU's own kernels, on a thread of the engine's.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, Unpack

from fastserve.config import EngineConfig, EngineOptions
from fastserve.errors import EngineDeadError, RequestError
from fastserve.interrupts import deferred_interrupts
from fastserve.models.resolve import check_name
from fastserve.progress import LoadingBar, generating
from fastserve.prompts import Prompt, Prompts, as_list
from fastserve.sampling_params import SamplingParams
from fastserve.text.chat_template import as_conversation, template_options

if TYPE_CHECKING:
    from fastserve.active_request import ActiveRequest
    from fastserve.engine import Engine
    from fastserve.outputs import RequestOutput
    from fastserve.text.tokenizer import Tokenizer

__all__ = ["LLM"]

Message: TypeAlias = Mapping[str, Any]
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None


@dataclass(frozen=True, slots=True)
class _Job:
    """One prompt of a batch."""

    prompt: Prompt
    params: SamplingParams | None
    priority: int


class LLM:
    """A model and an engine for batches of prompts.

    Several may live in one process. One thread at a time generates; a second one waits. Used as a
    context manager, it is shut down at the end of the block.

    Args:
        model: A folder, a GGUF file, a hub id or ``smollm2``.
        progress: Show a bar while loading; by default where stderr is a terminal. A callable is the
            caller's own bar: it gets bytes done and bytes in all.
        options: The fields of :class:`fastserve.config.EngineConfig`. ``target_itl_ms`` is None by
            default: batches are answered as a whole.

    Raises:
        ModelError: There is no such model, or it cannot be run.
        ConfigError: Names every bad option.
        TypeError: An option that is not known, with the nearest that is.
    """

    def __init__(
        self, model: str | Path, *, progress: LoadingBar = None, **options: Unpack[EngineOptions]
    ) -> None:
        # Nobody streams: a step may take as many tokens as it can.
        config = EngineConfig.from_keywords("LLM", {"target_itl_ms": None, **options})
        check_name(model)
        from fastserve.engine import Engine  # Late: importing fastserve costs nothing.

        self._set_up(Engine.load(model, config, progress=progress))

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """Take over an engine that is ready."""
        llm = cls.__new__(cls)
        llm._set_up(engine)
        return llm

    def _set_up(self, engine: Engine) -> None:
        self._engine = engine
        self._stepping = threading.RLock()
        _llms.add(self)

    @property
    def engine(self) -> Engine:
        """The engine itself, for those who step it by hand."""
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's.

        Raises:
            ModelError: ``skip_tokenizer_init`` left it out.
        """
        return self._engine.require_tokenizer()

    def get_tokenizer(self) -> Tokenizer:
        """Return :attr:`tokenizer`; vLLM's name for it."""
        return self.tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output, in force."""
        return self._engine.max_model_len

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        priority: int | Sequence[int] = 0,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
            prompts: Text, token ids, a dict with ``prompt`` or ``prompt_token_ids``, or a list of
                these.
            sampling_params: For all prompts, or one for each. ``SamplingParams()`` where left out.
            priority: Under the ``priority`` policy lower numbers run first; one for each, or for
                all.
            progress: Show a bar; by default where stderr is a terminal.
            use_tqdm: vLLM's name for `progress`.

        Returns:
            One output a prompt, in order.

        Raises:
            RequestError: A prompt is refused; nothing of the batch goes on.
            EngineDeadError: The engine does not run any more.
            KeyboardInterrupt: Ctrl-C, within a step. The batch is aborted; the engine is usable.
        """
        given = as_list(prompts)
        params = _one_each("sampling_params", sampling_params, len(given))
        priorities = _one_each("priority", priority, len(given))
        jobs = [_Job(*job) for job in zip(given, params, priorities, strict=True)]
        num_tokens = num_finished = 0
        with (
            self._stepping,
            generating(len(jobs), use_tqdm if progress is None else progress) as advance,
            _Batch(self._engine, jobs, self._stepping) as batch,
        ):
            while not batch.finished:
                for request in batch.step():
                    if request.finished:
                        num_finished += 1
                        num_tokens += request.num_generation_tokens
                advance(num_finished, num_tokens)
        return [request.output() for request in batch.requests]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> Iterator[RequestOutput]:
        """Continue one prompt, and give its output so far after every step that had news of it.

        Closing the iterator aborts the request. Each output may be asked for in another thread, as
        web frameworks do with an iterator that they are given. Raises what :meth:`generate` raises.
        """
        job = _Job(prompt, sampling_params, priority)
        with _Batch(self._engine, [job], self._stepping) as batch:
            (request,) = batch.requests
            output: RequestOutput | None = None
            while output is None or not output.finished:
                # Never held across the yield: who goes on from there may be another thread.
                with self._stepping:
                    # It may have been finished by another batch, generated between two outputs.
                    has_news = batch.finished or request in batch.step()
                    if has_news:
                        output = request.output()
                if has_news and output is not None:
                    yield output

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] = 0,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or a list of them, by the model's chat template.

        Args:
            messages: ``{"role": ..., "content": ...}`` each; the content is text, or a list of
                OpenAI's text parts.
            sampling_params: As for :meth:`generate`.
            add_generation_prompt: End the prompt where the assistant's answer begins.
            continue_final_message: The last message is the beginning of the answer.
            tools: Described to the model, where its template can.
            chat_template_kwargs: Further variables of the template.
            priority: As for :meth:`generate`.
            progress: As for :meth:`generate`.
            use_tqdm: vLLM's name for `progress`.

        Raises:
            ModelError: The model has no chat template.
            ChatTemplateError: The messages are not to the template's liking; says why.
            TypeError: Something else than messages was given.
        """
        tokenizer = self._engine.require_tokenizer()
        options = template_options(
            add_generation_prompt, continue_final_message, tools, chat_template_kwargs
        )
        prompts: list[Prompt] = [
            tokenizer.apply_chat_template(conversation, **options)
            for conversation in _conversations(messages)
        ]
        return self.generate(
            prompts, sampling_params, priority=priority, progress=progress, use_tqdm=use_tqdm
        )

    def stats(self) -> dict[str, int]:
        """Counters since the start and gauges of now, by name.

        ``num_preemptions``, ``num_recomputed_tokens``, ``prefix_cache_hits`` and so on; the pool's
        ``free``, ``held``, ``cached`` and ``capacity`` blocks.
        """
        return self._engine.stats()

    def reset_prefix_cache(self) -> None:
        """Forget everything that is cached."""
        with self._stepping:
            self._engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Give the memory back. May be called again; generating is an error from then on."""
        with self._stepping:
            self._engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()


_llms: weakref.WeakSet[LLM] = weakref.WeakSet()


def _free_locks() -> None:
    """In a forked child nobody has the lock whose owner was another thread of the parent."""
    for llm in _llms:
        llm._stepping = threading.RLock()


os.register_at_fork(after_in_child=_free_locks)


class _Batch:
    """Some jobs, from the first submitted to the last settled.

    On the way out all its blocks are back, whatever happened; what has not finished is aborted.
    Both ends take the lock `stepping`; for :meth:`step` the caller holds it.
    """

    def __init__(
        self, engine: Engine, jobs: Sequence[_Job], stepping: AbstractContextManager[object]
    ) -> None:
        self.requests: list[ActiveRequest] = []
        self._engine = engine
        self._waiting = deque(jobs)
        self._stepping = stepping

    def __enter__(self) -> Self:
        try:
            with self._stepping, deferred_interrupts():
                self._submit()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    @property
    def finished(self) -> bool:
        """Whether every job has its answer."""
        return not self._waiting and all(request.finished for request in self.requests)

    def step(self) -> list[ActiveRequest]:
        """Run one step. Returns the requests that have news."""
        with deferred_interrupts():
            news = self._engine.step()
            if not self._engine.is_alive:
                raise EngineDeadError(
                    next((r.error for r in news if r.error), "the engine stopped")
                )
            self._submit()
        return news

    def _end(self) -> None:
        """Abort what has not finished, and step until the core has heard of every end.

        Where nobody else has requests, also until no step is in flight: it would hold blocks.
        """
        with self._stepping, deferred_interrupts():
            self._waiting.clear()
            for request in self.requests:
                if not request.finished:
                    self._engine.abort(request)
            while self._engine.has_work() and not (
                self._engine.num_active and all(request.settled for request in self.requests)
            ):
                self._engine.step()

    def _submit(self) -> None:
        """Queue as many jobs as the queue takes. The rest follow when it has room again."""
        while self._waiting:
            job = self._waiting[0]
            try:
                request = self._engine.submit(job.prompt, job.params, priority=job.priority)
            except RequestError as error:
                if error.code in {"queue_full", "queue_tokens_full"} and self.requests:
                    return
                raise
            self.requests.append(request)
            self._waiting.popleft()


def _conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """One conversation or many, as many."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    first = messages[0] if is_list and len(messages) > 0 else None
    if is_list and (first is None or isinstance(first, list | tuple)):
        return [
            as_conversation(conversation, f"messages[{index}]")
            for index, conversation in enumerate(messages)
        ]
    return [as_conversation(messages)]


def _one_each(name: str, value: Any, num: int) -> list[Any]:
    """`value` for each of `num` prompts, or its own items if it is a list."""
    if not isinstance(value, Sequence):
        return [value] * num
    if len(value) != num:
        raise ValueError(
            f"{len(value)} {name} for {num} prompts; want one for each, or one for all"
        )
    return list(value)
