"""`fastserve.core` in somebody's program: its policies, threads, tiers, questions and bugs."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import re
import runpy
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

import fastserve.errors
from core_loop import Loop, make_core
from fastserve.core import CoreBug, Inbox, TransferError


@pytest.fixture
def loop() -> Loop:
    return Loop()


# Seldom asked.


def test_stats_timeline_and_steps_are_plain_data(loop):
    loop.submit(1, [1, 2, 3, 4, 5], num_sequences=2, max_tokens=2)
    loop.run()
    assert loop.core.stats() == loop.inbox.stats()
    assert loop.core.stats()["num_generation_tokens"] == 4
    assert [(event["seq_index"], event["kind"]) for event in loop.core.timeline(1)] == [
        (0, "queued"),
        (0, "admitted"),
        (1, "forked"),
        (0, "first_token"),
        (1, "first_token"),
        (0, "finished"),
        (1, "finished"),
    ]
    assert loop.inbox.timeline(1) == loop.core.timeline(1)
    steps = loop.inbox.steps_since(2)
    assert [step["step"] for step in steps] == [2]
    assert steps[0]["num_decode_rows"] == 2


def test_block_events_tell_what_snapshot_lists():
    loop = Loop(enable_block_events=True)
    loop.submit(1, list(range(9)), namespace=5)
    loop.run()
    stored = loop.core.take_block_events()
    assert {event["kind"] for event in stored} == {"stored"}
    assert {event["namespace"] for event in stored} == {5}
    assert stored[1]["parent"] == stored[0]["hash"]
    listed = {info["block"]: info["hash"] for info in loop.core.snapshot()}
    assert listed == {event["block"]: event["hash"] for event in stored}
    assert loop.core.take_block_events() == []
    loop.core.reset_prefix_cache()
    assert [event["kind"] for event in loop.core.take_block_events()] == ["cleared"]


def test_copies_to_another_tier_and_back(loop):
    prompt = list(range(8))
    with pytest.raises(TransferError, match="no block to copy: the prefix is not cached that far"):
        loop.core.offload(prompt, [70, 71])
    loop.submit(1, prompt, max_tokens=1)
    loop.run()
    away = loop.core.offload(prompt, [70, 71])
    assert repr(away) == f"Transfer(ticket={away.ticket}, first_block=0, num_blocks=2)"
    assert not loop.core.complete(away.ticket, True), "no plan has listed it"
    loop.submit(2, [50], max_tokens=1)
    loop.step()
    copies = loop.arena.view().copies_out.tolist()
    assert [copy[1:] for copy in copies] == [[70, away.ticket, 0], [71, away.ticket, 0]]
    assert loop.core.stats()["held"] == 2
    assert loop.core.complete(away.ticket, True)
    assert loop.core.stats()["held"] == 0

    loop.core.reset_prefix_cache()
    back = loop.core.fetch(prompt, np.array([70, 71]))
    loop.submit(3, [51], max_tokens=1)
    loop.step()
    assert [copy[1] for copy in loop.arena.view().copies_in.tolist()] == [70, 71]
    assert loop.core.complete(back.ticket, True)
    loop.core.check()
    with pytest.raises(TransferError, match="no block to copy: all are cached"):
        loop.core.fetch(prompt, [70, 71])


def test_an_idle_core_makes_a_step_of_copies_alone(loop):
    loop.submit(1, list(range(8)), max_tokens=1)
    loop.run()
    away = loop.core.offload(list(range(8)), [70, 71])
    sizes = loop.plan()
    assert (sizes.is_step, sizes.num_rows, sizes.num_copies) == (True, 0, 2)
    none = np.empty(0, dtype=np.int32)
    assert loop.core.commit(sizes.step, loop.now, none, none).request_ids.tolist() == []
    assert loop.core.complete(away.ticket, True)
    sizes = loop.plan()
    assert (sizes.is_step, sizes.step, sizes.num_copies) == (False, 0, 0)
    assert not loop.core.has_work()


# Policies.


def test_a_callable_orders_the_queue():
    seen = []

    def longest_first(candidate) -> int:
        seen.append(candidate)
        return -candidate.num_prompt_tokens

    loop = Loop(max_num_seqs=1, scheduling_policy=longest_first)
    assert loop.core.config["scheduling_policy"] is longest_first
    for request_id, length in enumerate([1, 3, 2]):
        loop.submit(request_id, [7] * length, max_tokens=1, priority=-9, arrival=request_id + 40)
    order = [loop.step().request_ids.tolist() for _ in range(3)]
    assert order == [[1], [2], [0]]
    assert repr(seen[2]) == (
        "Candidate(request_id=2, priority=-9, num_prompt_tokens=2, max_tokens=1, arrival=42)"
    )
    assert len(seen) == 3, "once a request"


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (lambda candidate: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda candidate: "first", "TypeError: 'str' object cannot be interpreted as an integer"),
        (lambda: 0, "takes 0 positional arguments but 1 was given"),
    ],
)
def test_a_policy_that_fails_is_reported_and_does_no_harm(policy, text):
    loop = Loop(scheduling_policy=policy)
    loop.submit(8)
    with pytest.warns(RuntimeWarning, match="failed for request 8, which keeps rank 0: .*" + text):
        loop.step()
    assert len(loop.run()[8, 0]) == 3


def test_ctrl_c_inside_a_policy_arrives_after_the_step_is_planned():
    def interrupted(candidate) -> int:
        raise KeyboardInterrupt

    loop = Loop(scheduling_policy=interrupted)
    loop.submit(8)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it may come at any later instruction.
        loop.plan()
        for _ in range(1000):
            pass
    assert loop.core.stats()["num_steps_in_flight"] == 1


def test_a_cycle_through_the_policy_is_collected():
    class Policy:
        def __call__(self, candidate) -> int:
            return 0

    policy = Policy()
    policy.core = make_core(scheduling_policy=policy)
    gone = weakref.ref(policy)
    del policy
    gc.collect()
    assert gone() is None


# Threads, processes and bugs.


def call(function) -> object:
    """What `function` returns or raises."""
    try:
        return function()
    except Exception as error:
        return error


def in_a_thread(function) -> object:
    """The same in another thread."""
    result = []
    thread = threading.Thread(target=lambda: result.append(call(function)))
    thread.start()
    thread.join()
    return result[0]


def test_while_one_thread_steps_others_use_the_inbox():
    heard = {}

    def policy(candidate) -> int:
        # The core is inside `plan` now. Another thread must neither get in nor wait.
        if candidate.request_id == 1:
            heard["step"] = in_a_thread(loop.core.stats)
            heard["submit"] = in_a_thread(lambda: loop.submit(2))
            heard["abort"] = in_a_thread(lambda: loop.inbox.abort(2))
            heard["stats"] = in_a_thread(loop.inbox.stats)
            heard["self"] = call(loop.core.check)
        return 0

    loop = Loop(scheduling_policy=policy)
    loop.submit(1)
    loop.step()
    for refused in (heard["step"], heard["self"]):
        assert isinstance(refused, RuntimeError)
        assert "one thread steps, the others use an Inbox" in str(refused)
    assert heard["submit"] is None
    assert heard["abort"] is True
    assert isinstance(heard["stats"], dict)
    assert sorted(loop.run()) == [(1, 0), (2, 0)]


def test_an_inbox_outlives_its_core(loop):
    inbox = loop.inbox
    del loop
    gc.collect()
    inbox.submit(1, [1], max_tokens=1, arrival=0)
    assert inbox.has_commands()
    assert inbox.is_live(1)


def test_nothing_can_be_pickled(loop):
    loop.submit()
    for thing in (loop.core, loop.inbox, loop.plan(), loop.core.fail(1, 1)):
        with pytest.raises(TypeError, match="cannot pickle"):
            pickle.dumps(thing)
    with pytest.raises(TypeError):
        Inbox()


def test_a_bug_in_the_core_is_one_exception_and_stays_said(loop, capfd):
    """A panic is provoked by what no caller can do: writing into the core's own memory."""
    loop.submit(prompt=list(range(9)))
    loop.plan()
    other = make_core()
    tables = loop.core.block_tables
    ctypes.c_int32.from_address(tables.ctypes.data).value = 1_000_000

    with pytest.raises(
        CoreBug, match=r"cannot be used any more; please report it: .*\.rs:\d+"
    ) as bug:
        loop.core.check()
    assert isinstance(bug.value, RuntimeError)
    assert isinstance(bug.value, fastserve.errors.FastserveError)
    message = loop.core.bug
    assert message is not None
    assert message in str(bug.value)
    for later in (loop.step, loop.core.stats, loop.core.close, loop.inbox.stats, loop.submit):
        with pytest.raises(CoreBug, match=r"^this Core stopped at a bug: ") as again:
            later()
        assert message in str(again.value)
    assert loop.inbox.bug == message
    assert capfd.readouterr() == ("", ""), "said once, in the exception"

    assert other.bug is None
    other.check()


def test_the_scheduler_needs_no_torch():
    program = (
        "import sys; sys.modules['torch'] = None; from fastserve.core import *; Core(num_blocks=1)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_example_ends_quietly_when_nobody_reads(repository: Path):
    read_end, write_end = os.pipe()
    os.close(read_end)
    example = repository / "examples" / "embed_scheduler.py"
    environment = os.environ | {"PYTHONPATH": f"{repository}/python"}
    done = subprocess.run(
        [sys.executable, example], stdout=write_end, stderr=subprocess.PIPE, env=environment
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")


def test_the_example_serves_its_prompts(repository: Path, capsys):
    runpy.run_path(str(repository / "examples" / "embed_scheduler.py"), run_name="__main__")
    *lines, last = capsys.readouterr().out.splitlines()
    answers = {line.partition(" (")[0] for line in lines}
    assert answers == {
        "'attack at dawn' -> 'BUUBDLBUEBXO.'",
        "'attack at noon' -> 'BUUBDLBUOPPO.'",
        "'hello' -> 'IFMMP.'",
        "'the quick brown fox' -> 'UIFRVJDLCSPXOGPY.'",
        "'' refused, empty_prompt: prompt is empty; a request needs at least one token",
    }
    assert re.fullmatch(
        r"\d+ steps, 49 tokens generated, blocks: \d+ free \+ 0 held \+ \d+ cached = 64", last
    )
