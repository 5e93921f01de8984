"""`fastserve.core`: what crosses between Python and the Rust core, and what is refused there."""

from __future__ import annotations

import gc
import inspect
import pickle
import re

import numpy as np
import pytest

import fastserve.errors
from core_loop import VOCAB_SIZE, Loop, make_core
from fake_model import expected_output
from fastserve.core import (
    CORE_DEFAULTS,
    FINISH_REASONS,
    ConfigError,
    Core,
    RequestError,
    StepError,
)


@pytest.fixture
def loop() -> Loop:
    return Loop()


# Configuration.


def test_signature_shows_the_cores_own_defaults():
    parameters = inspect.signature(Core).parameters
    shown = {name: parameter.default for name, parameter in parameters.items()}
    assert shown.pop("num_blocks") is inspect.Parameter.empty
    assert shown.pop("groups") is None
    assert shown == {
        name: value for name, value in CORE_DEFAULTS.items() if name not in {"num_blocks", "groups"}
    }
    assert CORE_DEFAULTS["groups"] == [{"layers": 1, "window": None}]


def test_every_keyword_arrives():
    given = {
        "num_blocks": 100,
        "block_size": 8,
        "max_model_len": 64,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 70,
        "max_chunk_tokens": 9,
        "long_prefill_threshold": 33,
        "max_long_prefill_percent": 40,
        "max_num_mixed_prefill_tokens": 21,
        "context_per_token": 2000,
        "max_num_output_rows": 11,
        "max_num_steps_in_flight": 2,
        "max_num_draft_tokens": 0,
        "enable_prefix_caching": False,
        "scheduling_policy": "priority",
        "max_wait_s": 1.5,
        "watermark_blocks": 3,
        "vocab_size": 77,
        "max_num_queued_requests": 12,
        "max_num_queued_tokens": 1 << 40,
        "max_num_sequences_per_request": 6,
        "max_sampling_words": 13,
        "max_num_step_failures": 4,
        "max_num_tickets": 3,
        "hash_seed": (1 << 64) - 1,
        "num_step_records": 14,
        "num_timeline_events": 15,
        "enable_block_events": True,
        "groups": [{"layers": 30, "window": 128}],
    }
    assert given.keys() == CORE_DEFAULTS.keys()
    assert Core(**given).config == given


def test_limits_that_were_lowered_are_said():
    core = make_core(num_blocks=2, max_model_len=1000)
    assert core.config["max_model_len"] == 8
    assert core.warnings == [
        "max_model_len lowered from 1000 to 8, which is what 2 blocks of 4 tokens hold"
    ]


def test_every_bad_field_is_named_at_once():
    with pytest.raises(ConfigError) as refusal:
        Core(
            num_blocks=-1,
            block_size=3,
            max_num_seqs="many",
            max_wait_s=float("nan"),
            scheduling_policy="lifo",
            groups=[{"layers": 1, "windows": 2}],
            enable_prefix_caching=1,
        )
    assert refusal.value.problems == [
        "num_blocks=-1: want an int from 0 to 2^32 - 1",
        "max_num_seqs='many': want an int from 0 to 2^32 - 1",
        "max_wait_s=nan: want seconds from 0 to 1e9, or None",
        "scheduling_policy='lifo': want 'fcfs', 'priority' or a callable that ranks a Candidate",
        "groups=[{'layers': 1, 'windows': 2}]: "
        "want [{'layers': int, 'window': int or None}], or None",
        "enable_prefix_caching=1: want True or False",
        "block_size=3: want a power of two up to 256",
    ]
    assert isinstance(refusal.value, fastserve.errors.ConfigError)
    assert isinstance(refusal.value, ValueError)


def test_keywords_that_lack_or_do_not_exist():
    with pytest.raises(TypeError, match=r"Core\(\) needs num_blocks"):
        Core()
    with pytest.raises(TypeError, match=r"no keyword 'num_block'; it takes \[.*'num_blocks'"):
        Core(num_blocks=1, num_block=1)


# Submitting.


@pytest.mark.parametrize(
    "prompt",
    [
        [5, 6, 7],
        (5, 6, 7),
        range(5, 8),
        np.array([5, 6, 7], dtype=np.int32),
        np.array([5, 6, 7], dtype=np.uint32),
        np.array([5, 6, 7], dtype=np.int64),
        np.array([5, 6, 7], dtype=np.uint8),
        np.array([5, 0, 6, 0, 7], dtype=np.int32)[::2],
        [np.int64(5), np.int32(6), 7],
    ],
    ids=repr,
)
def test_prompts_of_every_kind_are_the_same_tokens(loop, prompt):
    loop.submit(prompt=prompt)
    assert loop.arena.view(loop.plan()).token_ids.tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("keywords", "code", "text"),
    [
        ({"prompt": []}, "empty_prompt", "prompt is empty; a request needs at least one token"),
        (
            {"prompt": [1, -1]},
            "token_out_of_range",
            "token id -1 at position 1 is outside the vocabulary of 100 (0 to 99)",
        ),
        (
            {"prompt": np.array([1, -7])},
            "token_out_of_range",
            "token id -7 at position 1 is outside the vocabulary of 100 (0 to 99)",
        ),
        (
            {"prompt": [2**70]},
            "token_out_of_range",
            f"token id {2**70} at position 0 is outside the vocabulary of 100 (0 to 99)",
        ),
        (
            {"prompt": np.array([3, 100], dtype=np.uint32)},
            "token_out_of_range",
            "token id 100 at position 1 is outside the vocabulary of 100 (0 to 99)",
        ),
        (
            {"prompt": [1] * 32},
            "context_length_exceeded",
            "prompt has 32 tokens; with one to generate that is more than max_model_len=32; "
            "shorten the prompt",
        ),
        ({"max_tokens": 0}, "out_of_range", "max_tokens=0: want at least 1"),
        ({"max_tokens": -5}, "out_of_range", "max_tokens=-5: want at least 1"),
        ({"min_tokens": 9}, "out_of_range", "min_tokens=9: want 0 to 4"),
        ({"num_sequences": 129}, "out_of_range", "num_sequences=129: want 1 to 128"),
        ({"priority": 2**31}, "out_of_range", "priority=2147483648: want -2^31 to 2^31 - 1"),
        ({"namespace": -1}, "out_of_range", "namespace=-1: want 0 to 2^128 - 1"),
        ({"request_id": 2**64}, "out_of_range", f"request_id={2**64}: want 0 to 2^64 - 1"),
        (
            {"spans": [(2, 5, 0)]},
            "bad_span",
            "span 0 (2..5) must be inside the prompt of 3 tokens and after the span before it",
        ),
    ],
)
def test_a_refusal_has_text_code_and_status(loop, keywords, code, text):
    with pytest.raises(RequestError, match=f"^{re.escape(text)}$") as refusal:
        loop.submit(**keywords)
    assert (refusal.value.code, refusal.value.http_status) == (code, 400)
    assert isinstance(refusal.value, fastserve.errors.FastserveError)
    again = pickle.loads(pickle.dumps(refusal.value))
    assert (str(again), again.code, again.http_status) == (text, code, 400)
    assert not loop.inbox.has_commands(), "nothing was queued"
    loop.submit(prompt=[1, 2])
    assert loop.run() == {(1, 0): expected_output([1, 2], 0, 4, VOCAB_SIZE)}


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"prompt": "text"}, "int32, uint32 or int64 array, not str"),
        ({"prompt": 5}, "int32, uint32 or int64 array, not int"),
        ({"prompt": [1.5]}, r"prompt\[0\] must be an int, not float"),
        ({"prompt": np.zeros(3)}, r"prompt\[0\] must be an int, not float64"),
        (
            {"prompt": np.zeros((2, 2), np.int32)},
            r"prompt\[0\] must be an int, not an array of int32 with shape \[2\]",
        ),
        ({"max_tokens": 1.0}, "max_tokens must be an int, not float"),
        ({"spans": [(1, 2)]}, r"spans must be \(start, end, digest\) tuples"),
        (
            {"sampling": [1, 2]},
            "sampling must be a C-contiguous one-dimensional int32 array, not list",
        ),
        ({"temperature": 1.0}, "unexpected keyword argument"),
    ],
)
def test_a_wrong_type_is_a_type_error_that_names_it(loop, keywords, text):
    with pytest.raises(TypeError, match=text):
        loop.submit(**keywords)


def test_states_that_refuse(loop):
    loop.submit(7)
    with pytest.raises(RequestError, match="request id 7 is in use") as refusal:
        loop.submit(7)
    assert (refusal.value.code, refusal.value.http_status) == ("duplicate_request", 409)
    loop.core.drain()
    assert (loop.core.state, loop.inbox.state) == ("draining", "draining")
    with pytest.raises(RequestError, match="draining and takes no new requests") as refusal:
        loop.submit(8)
    assert (refusal.value.code, refusal.value.http_status) == ("not_accepting", 503)
    assert list(loop.run()) == [(7, 0)]


def test_a_full_queue_says_when_to_come_back():
    loop = Loop(max_num_queued_requests=1)
    loop.submit(1)
    with pytest.raises(RequestError, match=r"1 requests wait .*; retry in about 1\.0 s") as refusal:
        loop.submit(2)
    assert (refusal.value.code, refusal.value.http_status) == ("queue_full", 429)
    assert loop.inbox.predicted_wait() == 1_000_000_000


def test_what_belongs_to_a_request_reaches_the_slot_event(loop):
    record = np.array([9, -8, 7], dtype=np.int32)
    loop.submit(2**40 + 3, [5, 6], sampling=record, adapter=12)
    plan = loop.arena.view(loop.plan())
    (event,) = plan.slot_events
    sampling, tokens = plan.event_payload(event)
    assert (sampling.tolist(), tokens.tolist()) == ([9, -8, 7], [5, 6])
    assert event.tolist() == [1, 0, 3, 2**8, 0, 2, 2, 0, 3, 12, 0, 0, 0, 0, 0, 0]


def test_spans_and_namespaces_keep_prefixes_apart(loop):
    prompt = list(range(10))
    common = {"prompt": prompt, "max_tokens": 1}
    for request_id, keywords in enumerate(
        [
            {},
            {"namespace": 2**128 - 1},
            {"spans": [(1, 3, 2**127)]},
            {"spans": [(1, 3, 5)]},
            {"spans": [(1, 3, 5)]},
        ]
    ):
        loop.model.namespaces[request_id] = request_id  # What it may not read.
        if request_id == 4:
            loop.model.namespaces[request_id] = 3
        loop.submit(request_id, **common, **keywords)
        loop.run()
    assert loop.core.stats()["prefix_cache_hits"] == 8


# Steps.


@pytest.mark.parametrize(
    ("arena", "what"),
    [
        (np.zeros(9000), "an array of float64 with shape [9000]"),
        (np.zeros(9000, np.int64), "an array of int64 with shape [9000]"),
        (np.zeros(9000, np.int32)[::2], "a strided array of int32 with shape [4500]"),
        (np.zeros((3, 3), np.int32), "an array of int32 with shape [3, 3]"),
        (
            np.broadcast_to(np.int32(0), 9000),
            "a strided read-only array of int32 with shape [9000]",
        ),
        ([0] * 9000, "list"),
    ],
)
def test_an_arena_of_the_wrong_kind_is_refused(loop, arena, what):
    with pytest.raises(TypeError, match=f"^arena must be a C-contiguous.*, not {re.escape(what)}$"):
        loop.core.plan(1, arena)


def test_a_short_arena_is_refused(loop):
    with pytest.raises(StepError, match="arena has 8 words, a plan needs"):
        loop.core.plan(1, np.zeros(8, np.int32))


def test_a_plan_is_written_in_place(loop):
    loop.submit()
    words = np.zeros(loop.core.plan_words + 16, np.int32)
    assert loop.core.plan(1, words[16:]).num_tokens == 3, "a view of a larger array is taken too"
    assert words[:16].tolist() == [0] * 16
    assert words[16] == 1


def test_results_that_do_not_fit_change_nothing(loop):
    loop.submit()
    sizes = loop.plan()
    counts, tokens = loop.model.run(loop.arena.view(sizes))
    with pytest.raises(StepError, match="step 1 has 1 outputs, the results have 2"):
        loop.core.commit(1, 1, np.ones(2, np.int32), np.ones(2, np.int32))
    with pytest.raises(StepError, match=r"output row 0 of step 1: token=100, want 0 to 99"):
        loop.core.commit(1, 1, counts, np.array([100], np.int32))
    with pytest.raises(StepError, match="step 2 cannot be committed now; step 1 is next"):
        loop.core.commit(2, 1, counts, tokens)
    with pytest.raises(
        TypeError, match="tokens must be a C-contiguous one-dimensional int32 array"
    ):
        loop.core.commit(1, 1, counts, tokens.astype(np.int64))
    with pytest.raises(StepError, match="1 steps are in flight, max_num_steps_in_flight=1"):
        loop.plan()
    outputs = loop.core.commit(1, 1, counts, tokens)
    assert outputs.tokens.tolist() == tokens.tolist()
    with pytest.raises(StepError, match="no step is in flight"):
        loop.core.fail(1, 1)


def test_outputs_are_flat_read_only_arrays(loop):
    loop.submit(1, max_tokens=1)
    loop.submit(2, [4, 5], num_sequences=2)
    loop.submit(3, max_tokens=9)
    loop.inbox.abort(3)
    outputs = loop.step()
    kinds = {
        "request_ids": np.uint64,
        "seq_indices": np.uint32,
        "source_rows": np.int32,
        "token_indptr": np.uint32,
        "tokens": np.int32,
        "finish_reasons": np.uint8,
        "stop_tokens": np.int32,
        "num_cached_tokens": np.uint32,
        "num_output_tokens": np.uint32,
    }
    for name, kind in kinds.items():
        array = getattr(outputs, name)
        assert array.dtype == kind, name
        assert array.base is outputs, name
        assert not array.flags.writeable, name
        assert len(array) == len(outputs) + (name == "token_indptr") - (name == "tokens"), name
    by_name = dict(
        zip(
            zip(outputs.request_ids.tolist(), outputs.seq_indices.tolist(), strict=True),
            outputs.finish_reasons.tolist(),
            strict=True,
        )
    )
    assert by_name == {(3, 0): 3, (1, 0): 2, (2, 0): 0, (2, 1): 0}
    assert FINISH_REASONS == {1: "stop", 2: "length", 3: "abort", 4: "error"}
    assert repr(outputs) == "<StepOutputs of 4 sequences: 3 tokens, 2 finished>"


def test_outputs_outlive_the_core_and_its_later_steps(loop):
    loop.submit(1, max_tokens=6)
    kept = [loop.step() for _ in range(6)]
    tokens = [outputs.tokens for outputs in kept]
    del kept, loop
    gc.collect()
    said = [token for array in tokens for token in array.tolist()]
    assert said == expected_output([1, 2, 3], 0, 6, VOCAB_SIZE)


def test_memory_of_outputs_is_used_again(loop):
    loop.submit(1, max_tokens=20)
    addresses = [loop.step().tokens.ctypes.data for _ in range(20)]
    assert len(set(addresses)) == 2, "one is filled while the other is read"


def test_a_failed_step_is_computed_again(loop):
    loop.submit()
    outputs = loop.core.fail(loop.plan().step, 1)
    assert len(outputs) == 0
    assert loop.run() == {(1, 0): expected_output([1, 2, 3], 0, 4, VOCAB_SIZE)}
    assert loop.core.stats()["num_failed_steps"] == 1


def test_a_sequence_under_which_steps_keep_failing_ends_with_error():
    loop = Loop(max_num_step_failures=2)
    loop.submit()
    reasons = [loop.core.fail(loop.plan().step, 1).finish_reasons.tolist() for _ in range(3)]
    assert reasons == [[], [], [4]]
    assert loop.core.stats()["held"] == 0


def test_finish_says_why_and_how_much_counts(loop):
    loop.submit(1, max_tokens=9)
    for _ in range(3):
        loop.step()
    assert loop.inbox.finish(1, 0, "stop", 2)
    outputs = loop.step()
    assert outputs.finish_reasons.tolist() == [1]
    assert outputs.num_output_tokens.tolist() == [2]
    assert not loop.inbox.finish(1, 0, "stop", 2), "it has ended"
    with pytest.raises(
        ValueError, match="reason='bored': want 'stop', 'length', 'abort' or 'error'"
    ):
        loop.inbox.finish(1, 0, "bored", 2)


def test_block_tables_are_a_live_read_only_view(loop):
    tables = loop.core.block_tables
    assert tables.shape == (4, 8)
    assert tables.dtype == np.int32
    assert tables.base is loop.core
    with pytest.raises(ValueError, match="read-only"):
        tables[0, 0] = 1
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        tables.setflags(write=True)

    loop.submit(prompt=list(range(9)))
    slot = loop.arena.view(loop.plan()).row_slots[0]
    assert len(set(tables[slot, :3].tolist())) == 3, "filled in place"
    assert loop.core.block_tables.ctypes.data == tables.ctypes.data
    del loop
    gc.collect()
    assert len(set(tables[slot, :3].tolist())) == 3, "kept alive by the view"
