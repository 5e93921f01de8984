"""How the steps of an engine are run, behind one interface.

* :class:`PythonSteps` runs a step when it is asked for news: for runners whose forward pass is
  Python.
* :class:`NativeSteps` takes what a Rust thread has to say that never takes the GIL
  (``rust/py/src/steps``): for a model on the CPU's own kernels. The thread runs ahead of whoever
  reads, so text is made of step k while step k + 1 is computed.

Either tells what happened as :class:`News`, in the order in which it happened.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from fastserve._core import StepLoop
from fastserve.arena import Arena, Words
from fastserve.errors import KernelError
from fastserve.sampler import Sampler, SampleResult

if TYPE_CHECKING:
    from fastserve._core import StepNews
    from fastserve.core import Core, PlanSizes, StepOutputs
    from fastserve.runner import NativeParts, Runner

__all__ = ["FORKED", "NativeSteps", "News", "PythonSteps", "Steps", "make_steps"]

logger = logging.getLogger("fastserve.engine")

FORKED: Final = (
    "the engine belongs to the process that this one was forked from; make one in each process"
)


@dataclass(frozen=True, slots=True)
class News:
    """What one step has to say, or the time between two.

    Attributes:
        outputs: For each sequence with something to say.
        at_ns: When, on ``time.monotonic_ns``.
        is_step: Whether a step was run.
        result: What its output rows gave; ``None`` where it failed.
        failure: What failed; the step was rolled back.
    """

    outputs: StepOutputs
    at_ns: int
    is_step: bool
    result: SampleResult | None = None
    failure: str | None = None


class Steps(Protocol):
    """Runs the steps of one core. One thread at a time asks it.

    Attributes:
        is_lost: Whether this is a forked process, which has not what it takes.
    """

    is_lost: bool

    def has_work(self) -> bool:
        """Whether anything waits, runs, is in flight or has not been told."""

    def wait(self) -> None:
        """Wait until :meth:`advance` need not. What a signal's handler raises comes out here."""

    def advance(self) -> None:
        """Have at least one step told, if there is work and nothing is told yet.

        Raises:
            KernelError: The device is gone.
            CoreBug: A bug of the core.
        """

    def first(self) -> News | None:
        """The oldest news that was not dropped, if there is some: the same object each time."""

    def drop_first(self) -> None:
        """The oldest news has been delivered."""

    def close(self) -> None:
        """Drop what is in flight and end everything. All blocks are back after it."""


def make_steps(core: Core, runner: Runner, block_size: int) -> Steps:
    """Allocate the runner's cache for `core`, and get ready to step both."""
    num_blocks: int = core.config["num_blocks"]
    in_flight: int = core.config["max_num_steps_in_flight"]
    tables = core.block_tables
    if in_flight > 1:
        # The core's own tables are those of the step planned last, not of the step being run.
        tables = np.zeros_like(tables)
    runner.allocate_kv(num_blocks, block_size, tables)
    parts = runner.native_parts()
    if parts is not None:
        return NativeSteps(core, parts)
    return PythonSteps(core, runner, tables)


@dataclass(frozen=True, slots=True)
class _Planned:
    """A step that is planned and not run."""

    sizes: PlanSizes
    arena: Arena


class PythonSteps:
    """Runs a step in whatever thread asks for news.

    Args:
        core: Plans and commits.
        runner: Runs the forward pass. Its cache is allocated.
        block_tables: What the runner reads: the core's own, or a copy where several steps may be in
            flight, which follows the plans' edits.
    """

    is_lost = False

    def __init__(self, core: Core, runner: Runner, block_tables: Words) -> None:
        self._core = core
        self._runner: Runner | None = runner
        self._block_tables = block_tables
        config = core.config
        self._max_in_flight: int = config["max_num_steps_in_flight"]
        self._sampler = Sampler(config["max_num_seqs"], runner.vocab_size, runner.pool)
        layout, num_words = core.layout, core.plan_words
        arenas = [Arena(layout, num_words) for _ in range(self._max_in_flight + 1)]
        self._next_arena = itertools.cycle(arenas).__next__
        self._planned: deque[_Planned] = deque()
        self._spare_arena = self._next_arena()
        self._told: deque[News] = deque()

    def has_work(self) -> bool:
        """As the protocol says."""
        return bool(self._told) or self._core.has_work()

    def wait(self) -> None:
        """As the protocol says: there is nothing to wait for."""

    def advance(self) -> None:
        """As the protocol says: runs one step."""
        if self._told:
            return
        self._plan_ahead()
        if self._planned:
            self._told.append(self._step())
        else:
            outputs = self._core.take_outputs()
            self._told.append(News(outputs, time.monotonic_ns(), is_step=False))

    def first(self) -> News | None:
        """As the protocol says."""
        return self._told[0] if self._told else None

    def drop_first(self) -> None:
        """As the protocol says."""
        self._told.popleft()

    def _step(self) -> News:
        step = self._planned[0].sizes.step
        try:
            result = self._run(self._planned[0])
        except KernelError:
            raise
        except Exception as error:
            logger.exception("step %d failed and is rolled back", step)
            return self._roll_back(str(error))
        except BaseException:  # Ctrl-C in the middle of a step.
            self._told.append(self._roll_back())
            raise
        self._planned.popleft()
        now = time.monotonic_ns()
        outputs = self._core.commit(step, now, result.counts, result.tokens)
        return News(outputs, now, is_step=True, result=result)

    def _plan_ahead(self) -> None:
        """Plan as many steps as may be in flight."""
        while len(self._planned) < self._max_in_flight:
            arena = self._spare_arena
            sizes = self._core.plan(time.monotonic_ns(), arena.words)
            if not sizes.is_step:
                return
            self._planned.append(_Planned(sizes, arena))
            self._spare_arena = self._next_arena()

    def _run(self, planned: _Planned) -> SampleResult:
        plan = planned.arena.view(planned.sizes)
        if self._max_in_flight > 1:
            slots, places, blocks = plan.table_edits.T
            self._block_tables[slots, places] = blocks
        self._sampler.apply_events(plan)
        assert self._runner is not None, "an engine that is alive has its runner"
        logits = self._runner.forward(plan, self._sampler.last_samples)
        return self._sampler.sample(logits, plan)

    def _roll_back(self, failure: str | None = None) -> News:
        """The oldest step in flight failed, and those planned on top of it with it."""
        step, now = self._planned[0].sizes.step, time.monotonic_ns()
        self._planned.clear()
        return News(self._core.fail(step, now), now, is_step=True, failure=failure)

    def close(self) -> None:
        """As the protocol says."""
        self._runner = None  # And with it the weights and the cache.
        if self._planned:
            self._told.append(self._roll_back())
        self._told.append(_last_words(self._core))


class NativeSteps:
    """Takes what a thread of the extension has to say, which steps while Python does other things.

    Args:
        core: Stepped by the thread from now on; what else is called waits for a plan or a commit.
        parts: The model and its cache.
    """

    def __init__(self, core: Core, parts: NativeParts) -> None:
        self._core = core
        self._loop: StepLoop | None = StepLoop(
            core,
            parts.decoder,
            parts.pool,
            parts.cache.kv,
            parts.cache.cos_sin,
            now=time.monotonic_ns(),
        )
        self._told: deque[StepNews | News] = deque()
        self._readable = select.poll()
        self._readable.register(self._loop.fileno(), select.POLLIN)
        self.is_lost = False
        _native.add(self)

    def has_work(self) -> bool:
        """As the protocol says."""
        return bool(self._told) or (self._loop is not None and self._loop.has_work())

    def wait(self) -> None:
        """As the protocol says: for the thread to say something, or to have nothing to do."""
        loop = self._loop
        if loop is None:
            return
        loop.start()
        self._take_all(loop)
        while not self._told and loop.has_work():
            self._readable.poll()
            self._take_all(loop)

    def advance(self) -> None:
        """As the protocol says: the thread has, before :meth:`wait` returned."""
        if not self._told and self._loop is not None:
            self._loop.check()

    def _take_all(self, loop: StepLoop) -> None:
        """Keep what was said. One call of C from end to end, in which no signal is handled."""
        self._told.extend(iter(loop.take, None))

    def first(self) -> News | None:
        """As the protocol says."""
        if not self._told:
            return None
        said = self._told[0]
        if isinstance(said, News):
            return said
        if said.failure is not None:
            logger.error("step %s failed and is rolled back: %s", said.step, said.failure)
        result = None if said.samples is None else SampleResult.of(said.samples)
        news = News(said.outputs, said.at, said.step is not None, result, said.failure)
        self._told[0] = news
        return news

    def drop_first(self) -> None:
        """As the protocol says."""
        self._told.popleft()

    def close(self) -> None:
        """As the protocol says. Waits for the step that runs."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.stop()
            self._take_all(loop)
            self._told.append(_last_words(self._core))


def _last_words(core: Core) -> News:
    """End everything that the core has."""
    core.close()
    return News(core.take_outputs(), time.monotonic_ns(), is_step=False)


_native: weakref.WeakSet[NativeSteps] = weakref.WeakSet()


def _lose_threads() -> None:
    """A forked child has none of its parent's threads."""
    for steps in _native:
        steps.is_lost = True


os.register_at_fork(after_in_child=_lose_threads)
