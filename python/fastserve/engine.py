"""An engine: requests in, steps, and what they have to say back to the requests.

::

    submit ─▶ Inbox          step ─┬─ core.plan(now, arena)        Rust writes the plan
    (any thread)                   ├─ forward                      K and V, logits
                                   ├─ sample                       a token a row
                                   └─ core.commit(step, ...)  ─▶   requests that have news

Whoever owns an engine calls :meth:`Engine.step` while there is work, from one thread at a time;
``LLM`` does that until its prompts are answered, ``AsyncEngine`` on a thread that it starts.
Submitting and aborting may be done from any thread. Where the forward pass is Python, a step is run
by that call. On the CPU's own kernels a thread in Rust runs steps, from the first call on; it is
some steps ahead, and the call takes what it has to say (:mod:`fastserve.steps`).

With more than one step in flight, step k+1 is planned before step k is run: a token that is not
known yet stands in the plan as −1 − slot and is taken from the sampler's last samples, and block
tables are a copy that follows the plans' edits, as a device's would be.

What goes wrong:

* A request is refused: an exception from :meth:`Engine.submit`; nothing is queued.
* A row's logits are not finite: that request alone ends with ``error``.
* The forward pass raises: the step is rolled back and its sequences compute again; one under which
  that happens too often ends with ``error``. The engine goes on.
* The device is gone (``KernelError``) or there is a bug (``CoreBug``, or anything else between two
  forward passes): every request ends with ``error`` and the engine is dead, which the next call
  says.
"""

from __future__ import annotations

import itertools
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastserve.active_request import FINISHED_BY_ERROR, ActiveRequest
from fastserve.config import EngineConfig
from fastserve.core import Core
from fastserve.errors import EngineDeadError, FastserveError, ModelError
from fastserve.philox import derive_seed
from fastserve.prompts import Prompt, as_sampling_params, tokenize
from fastserve.request_table import RequestTable
from fastserve.sampler import ALL_MASKED, NOT_FINITE
from fastserve.sampling_params import ParameterError, SamplingParams
from fastserve.sampling_record import encode
from fastserve.sizing import core_keywords
from fastserve.steps import FORKED, make_steps

if TYPE_CHECKING:
    from fastserve.progress import LoadingBar
    from fastserve.runner import Runner
    from fastserve.steps import News
    from fastserve.text.tokenizer import Tokenizer

__all__ = ["Engine"]

logger = logging.getLogger("fastserve.engine")

_SHUT_DOWN: Final = "the engine is shut down; make a new one"
_ROW_FAILED: Final = {
    NOT_FINITE: "the model's logits are not finite",
    ALL_MASKED: "every token is masked; allow more than the tokens that end a sequence",
}
"""What an output row with this count means."""


def _why(failure: str | None, count: int) -> str | None:
    """What to tell a request that ended with ``error``."""
    return _ROW_FAILED.get(count) if failure is None else f"the step failed: {failure}"


class Engine:
    """Runs a model one step at a time.

    Args:
        runner: Runs the forward pass.
        tokenizer: ``None`` for a model that takes and gives only token ids.
        config: Limits; everything at its default where left out.
        model_name: For whoever asks.

    Attributes:
        config: As given.
        core_config: The core's limits in force.
        tokenizer: As given.
        model_name: As given.
        max_model_len: Longest sequence, prompt and output, in force.
        vocab_size: Token ids are below it.
        ran_step: Whether the last call of :meth:`step` had one. If not, the next will not either,
            unless something is submitted, aborted or resumed.

    Raises:
        ConfigError: The configuration does not fit the model or the memory.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        *,
        model_name: str = "model",
    ) -> None:
        self.config = config = config or EngineConfig()
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.vocab_size = runner.vocab_size
        costs = None if config.target_itl_ms is None else runner.step_costs()
        self._core = Core(
            **core_keywords(
                config,
                max_positions=runner.config.max_positions,
                vocab_size=runner.vocab_size,
                kv_bytes_per_block=runner.kv_bytes_per_block(config.block_size),
                costs=costs,
            )
        )
        for warning in self._core.warnings:
            logger.warning("%s", warning)
        self.core_config: dict[str, Any] = self._core.config
        if costs is not None:
            logger.info(
                "beside streams a step takes up to %d prompt tokens, fewer as their context grows",
                self.core_config["max_num_mixed_prefill_tokens"],
            )
        self.max_model_len: int = self.core_config["max_model_len"]
        self._inbox = self._core.inbox()
        self._steps = make_steps(self._core, runner, config.block_size)
        self._in_delivery: News | None = None
        self._num_rows_delivered = 0
        self._with_news: dict[int, ActiveRequest] = {}
        self._eos_token_ids = tuple(runner.config.eos_token_ids)
        self._requests = RequestTable()
        self._numbers = itertools.count(1)
        self.ran_step = False

    @classmethod
    def load(
        cls, model: str | Path, config: EngineConfig | None = None, *, progress: LoadingBar = None
    ) -> Engine:
        """Load `model` and make an engine for it.

        Args:
            model: A folder, a GGUF file, a hub id or ``smollm2``.
            config: Limits.
            progress: Show a bar while loading; by default where stderr is a terminal. A callable is
                the caller's own bar: it gets bytes done and bytes in all.

        Raises:
            ModelError: There is no such model, or it cannot be run.
            ConfigError: The configuration does not fit the model or the memory.
        """
        from fastserve.loading import load_model  # Late: an engine can do without our models.

        config = config or EngineConfig()
        runner, tokenizer = load_model(model, config, progress=progress)
        return cls(runner, tokenizer, config, model_name=str(model))

    # Requests: any thread.

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        listener: object = None,
    ) -> ActiveRequest:
        """Queue a request for the next step.

        Args:
            prompt: Text, token ids, or a dict with one of them.
            params: How to continue it; every default where left out.
            request_id: The caller's name for it, unique among those that have not finished.
            priority: Under the ``priority`` policy lower numbers run first.
            listener: Kept with the request, for whoever steps the engine.

        Raises:
            RequestError: The core refuses it.
            ParameterError: The parameters do not fit the model.
            EngineDeadError: The engine does not run any more.
        """
        self.check_alive()
        params = as_sampling_params(params)
        tokenized = tokenize(prompt, self.tokenizer)
        self._check_params(params)
        number = next(self._numbers)
        now = time.monotonic_ns()
        request = ActiveRequest(
            number=number,
            request_id=f"request-{number}" if request_id is None else request_id,
            prompt=tokenized.text,
            prompt_token_ids=tokenized.token_ids,
            params=params,
            table=None if self.tokenizer is None else self.tokenizer.table,
            arrival_ns=now,
            listener=listener,
        )
        stops = tuple(params.stop_token_ids or ())
        end_token_ids = stops if params.ignore_eos else (*self._eos_token_ids, *stops)
        seed = derive_seed(self.config.seed, number) if params.seed is None else params.seed
        self._requests.add(request)
        try:
            self._inbox.submit(
                number,
                tokenized.token_ids,
                max_tokens=self.max_model_len if params.max_tokens is None else params.max_tokens,
                min_tokens=params.min_tokens,
                stop_token_ids=end_token_ids,
                num_sequences=params.n,
                priority=priority,
                score_prompt=params.prompt_logprobs is not None,
                namespace=tokenized.namespace,
                sampling=encode(params, seed, end_token_ids),
                arrival=now,
            )
        except BaseException:
            self._requests.remove(request)
            raise
        return request

    def abort(self, request: ActiveRequest) -> None:
        """End `request` at the next step with ``abort``, whatever its state.

        Its name may be used again at once.
        """
        self._requests.free_name(request)
        if self.is_alive:
            self._inbox.abort(request.number)

    def find(self, request_id: str) -> ActiveRequest | None:
        """The request called `request_id`, if it has neither ended nor been aborted."""
        return self._requests.find(request_id)

    def _check_params(self, params: SamplingParams) -> None:
        """What only the model and the core can tell."""
        bad: list[str] = []
        max_n = self.core_config["max_num_sequences_per_request"]
        if params.n > max_n:
            bad.append(f"n={params.n}: want 1 to {max_n}")
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            beyond = [token for token in getattr(params, name) or () if token >= self.vocab_size]
            if beyond:
                bad.append(f"{name} has token {beyond[0]}: want 0 to {self.vocab_size - 1}")
        if params.stop_strings and self.tokenizer is None:
            bad.append("stop: want stop_token_ids instead, the model has no tokenizer")
        if bad:
            raise ParameterError(bad)

    # Steps: one thread at a time.

    @property
    def is_alive(self) -> bool:
        """Whether it takes requests and steps."""
        return self._requests.closed is None and not self._steps.is_lost

    @property
    def num_active(self) -> int:
        """Requests that the core has not settled."""
        return len(self._requests)

    def has_work(self) -> bool:
        """Whether anything waits, runs or is in flight."""
        return self.is_alive and self._steps.has_work()

    def step(self) -> list[ActiveRequest]:
        """Run one step, or take what was run since the last call.

        Returns:
            The requests that have news: tokens, or an end. Empty also where nothing could run.

        Raises:
            EngineDeadError: The engine does not run any more.
        """
        self.check_alive()
        self._steps.wait()  # Before anything is taken: a signal's handler may raise here.
        try:
            self._steps.advance()
            self.ran_step = False
            return self._deliver()
        except Exception as error:  # A bug, the core's or ours; or the device is gone.
            if self._requests.closed is not None:
                self.check_alive()  # Somebody has shut the engine down meanwhile.
            logger.exception("the engine stops")
            return self._die(f"the engine stopped: {error}")

    def _deliver(self) -> list[ActiveRequest]:
        """Hand what was said to its requests. Returns those that have news.

        What is interrupted, by a second Ctrl-C say, goes on where it was the next time: news is
        dropped when all of it has been delivered.
        """
        while (news := self._steps.first()) is not None:
            if news is not self._in_delivery:
                self._num_rows_delivered = 0
                self._in_delivery = news
            self._deliver_one(news)
            self.ran_step |= news.is_step
            self._steps.drop_first()
        for request in self._with_news.values():
            if request.settled:
                self._requests.remove(request)
            elif request.finished:
                self._requests.free_name(request)
        requests, self._with_news = self._with_news, {}
        return list(requests.values())

    def _deliver_one(self, news: News) -> None:
        result, outputs = news.result, news.outputs
        if result is not None:
            for scored in result.scores:
                if (request := self._requests.get(scored.request_id)) is not None:
                    request.score(scored)
        tokens, starts = outputs.tokens.tolist(), outputs.token_indptr.tolist()
        rows = zip(
            outputs.request_ids.tolist(),
            outputs.seq_indices.tolist(),
            outputs.source_rows.tolist(),
            starts,
            starts[1:],
            outputs.finish_reasons.tolist(),
            outputs.stop_tokens.tolist(),
            outputs.num_cached_tokens.tolist(),
            strict=False,
        )
        for number, index, row, start, end, code, stop_token, num_cached in itertools.islice(
            rows, self._num_rows_delivered, None
        ):
            request = self._requests.get(number)
            if request is None:
                self._num_rows_delivered += 1
                continue
            self._with_news[number] = request
            if index == 0:
                request.num_cached_tokens = num_cached
            logprobs = None
            if result is not None and start < end:
                logprobs = result.logprobs.get(row)
            if code == FINISHED_BY_ERROR:
                count = 0 if result is None or row < 0 else int(result.counts[row])
                request.error = request.error or _why(news.failure, count)
            kept = request.take(
                index,
                tokens[start:end],
                logprobs,
                code,
                stop_token if stop_token >= 0 else None,
                news.at_ns,
            )
            if kept is not None:
                self._inbox.finish(number, index, "stop", kept)
            self._num_rows_delivered += 1

    def check_alive(self) -> None:
        """Raise :class:`EngineDeadError` if the engine does not run any more."""
        self._check_process()
        self._requests.check_open()

    def _check_process(self) -> None:
        """In a forked child nothing may be asked of what the parent's thread may hold."""
        if self._steps.is_lost:
            raise EngineDeadError(FORKED)

    def _die(self, why: str) -> list[ActiveRequest]:
        """Stop for good. Returns the requests that this ended."""
        ended = self._requests.close(why)
        for request in ended:
            request.fail(why)
        try:
            self._steps.close()
        except FastserveError:
            logger.debug("the core cannot be closed", exc_info=True)
        return ended

    # The rest.

    def shutdown(self) -> list[ActiveRequest]:
        """End everything with ``abort`` and give the memory back. May be called again.

        Returns:
            The requests that this ended.
        """
        ended: list[ActiveRequest] = []
        if self.is_alive:
            try:
                self._steps.close()
                ended = self._deliver()
            except FastserveError:
                logger.exception("the core cannot be closed")
            ended += self._die(_SHUT_DOWN)
        return ended

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer, for whoever cannot do without.

        Raises:
            ModelError: There is none.
        """
        if self.tokenizer is None:
            raise ModelError("the engine has no tokenizer; leave out skip_tokenizer_init")
        return self.tokenizer

    def stats(self) -> dict[str, int]:
        """Counters since the start and gauges of now, by name. Any thread may ask."""
        self._check_process()
        return self._inbox.stats()

    def timeline(self, request: ActiveRequest) -> list[dict[str, Any]]:
        """What happened to a request, oldest first, as far as it is kept. Any thread may ask."""
        self._check_process()
        return self._inbox.timeline(request.number)

    def reset_prefix_cache(self) -> None:
        """Match nothing that is cached now any more, with requests running too."""
        self.check_alive()
        self._core.reset_prefix_cache()

    def check(self) -> None:
        """Prove the core's invariants, in time that grows with the pool.

        Raises:
            CoreBug: One is broken.
        """
        self._check_process()
        self._core.check()
