"""The scheduler alone, for those who embed it: no torch, no model, no thread, no clock.

::

    core = Core(num_blocks=1024, block_size=16, max_num_seqs=64, vocab_size=32_000)
    inbox = core.inbox()                        # any thread: submit, abort, finish, stats
    arena = Arena(core.layout, core.plan_words)

    inbox.submit(7, prompt, max_tokens=16, arrival=time.monotonic_ns())
    while core.has_work():                      # one thread: plan, run, commit
        sizes = core.plan(time.monotonic_ns(), arena.words)
        if not sizes.is_step:                   # nothing to run; aborts still have their say
            outputs = core.take_outputs()
        else:
            counts, tokens = run(arena.view(sizes), core.block_tables)
            outputs = core.commit(sizes.step, time.monotonic_ns(), counts, tokens)
        deliver(outputs)                        # flat arrays, one entry a sequence

``examples/embed_scheduler.py`` is that loop with a toy model. What a plan holds is described by
:class:`PlanView`, section by section.

Threads: one thread steps a ``Core``; a second one inside it gets ``RuntimeError`` at once (where a
``StepLoop`` steps it, as in an engine on the CPU, others wait for the thread, without the GIL). An
``Inbox`` may be used from any thread and never waits for a step. No call gives up the GIL: each
takes microseconds, and getting the GIL back can take milliseconds. Free-threaded Python is not
supported. Nothing here can be pickled: a ``Core`` stays in its process, numbers and arrays travel.

Errors: a caller's mistake changes nothing and is ``RequestError`` (with ``code`` and
``http_status``), ``ConfigError`` (with ``problems``, every bad field), ``StepError`` or
``TransferError``. A bug in the core is ``CoreBug``, now and at every later call on that core and
its inboxes.

Several cores may live in one process.
"""

from __future__ import annotations

from fastserve._core import (
    COPY_WORDS,
    CORE_DEFAULTS,
    FINISH_REASONS,
    HEADER,
    HEADER_WORDS,
    PLAN_VERSION,
    SLOT_EVENT_WORDS,
    TABLE_EDIT_WORDS,
    TIER_COPY_WORDS,
    Candidate,
    ConfigError,
    Core,
    CoreBug,
    Inbox,
    PlanSizes,
    RequestError,
    StepError,
    StepOutputs,
    Transfer,
    TransferError,
)
from fastserve._shadow import check_front
from fastserve.arena import Arena, EventWord, Header, OutputKind, PlanView, SlotEventKind

check_front()

__all__ = [
    "COPY_WORDS",
    "CORE_DEFAULTS",
    "FINISH_REASONS",
    "HEADER",
    "HEADER_WORDS",
    "PLAN_VERSION",
    "SLOT_EVENT_WORDS",
    "TABLE_EDIT_WORDS",
    "TIER_COPY_WORDS",
    "Arena",
    "Candidate",
    "ConfigError",
    "Core",
    "CoreBug",
    "EventWord",
    "Header",
    "Inbox",
    "OutputKind",
    "PlanSizes",
    "PlanView",
    "RequestError",
    "SlotEventKind",
    "StepError",
    "StepOutputs",
    "Transfer",
    "TransferError",
]
