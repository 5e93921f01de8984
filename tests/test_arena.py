"""The plan as Python reads it: views of one buffer, exactly as long as the plan uses them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from fastserve import core
from fastserve.arena import (
    COPY_WORDS,
    PLAN_VERSION,
    SLOT_EVENT_WORDS,
    TABLE_EDIT_WORDS,
    TIER_COPY_WORDS,
    Arena,
    EventWord,
    Header,
    OutputKind,
    SlotEventKind,
)
from plans import PlanBuilder, Row, layout_for


@pytest.fixture
def builder() -> PlanBuilder:
    return PlanBuilder(block_size=4, num_blocks=32)


def test_sections_have_the_plans_lengths(builder):
    plan = builder.plan(
        [Row(slot=3, tokens=[5, 6, 7], start=2), Row(slot=1, tokens=[-2], start=9, shared=1)],
        copies=[(4, 9)],
    )
    assert (plan.step, plan.num_rows, plan.num_tokens, plan.num_outputs) == (1, 2, 4, 2)
    assert plan.row_slots.tolist() == [3, 1]
    assert plan.query_indptr.tolist() == [0, 3, 4]
    assert plan.seq_lens.tolist() == [5, 10]
    assert plan.token_ids.tolist() == [5, 6, 7, -2]
    assert plan.positions.tolist() == [2, 3, 4, 9]
    assert plan.out_rows.tolist() == [2, 3]
    assert plan.out_kinds.tolist() == [OutputKind.SAMPLE, OutputKind.SAMPLE]
    assert plan.copies.tolist() == [[4, 9]]
    assert plan.copies_in.shape == (0, 4)
    assert plan.slot_events.shape == (0, 16)
    assert plan.table_edits.shape == (0, 3)


def test_views_share_the_arenas_memory(builder):
    plan = builder.plan([Row(slot=0, tokens=[1, 2])])
    for name in ("token_ids", "slot_mapping", "query_indptr", "seq_lens"):
        assert np.shares_memory(getattr(plan, name), builder.arena.words), name
    builder.arena.words[builder.arena.layout["token_ids"][0]] = 42
    assert plan.token_ids.tolist() == [42, 2]


def test_step_ids_are_64_bits(builder):
    builder.plan([Row(slot=0, tokens=[1])])
    first = builder.arena.layout["header"][0]
    builder.arena.words[first + Header.STEP_LOW] = -1
    builder.arena.words[first + Header.STEP_HIGH] = 2
    assert builder.arena.view().step == (2 << 32) + 0xFFFF_FFFF


def test_event_payload_is_record_then_tokens():
    layout, num_words = layout_for(2, 16, 4)
    arena = Arena(layout, num_words)
    arena.words[: len(Header)] = [1, 7, 0, 0, 0, 0, 0, 1, 6, 0, 0, 0]
    at = layout["slot_events"][0]
    arena.words[at : at + 10] = [1, 1, 9, 0, 2, 2, 3, 1, 2, 0]
    at = layout["event_words"][0]
    arena.words[at : at + 6] = [99, 11, 12, 21, 22, 23]
    plan = arena.view(SimpleNamespace(step=7))
    record, tokens = plan.event_payload(plan.slot_events[0])
    assert (record.tolist(), tokens.tolist()) == ([11, 12], [21, 22, 23])
    assert plan.describe() == "step 7 rows 0 tokens 0 outputs 0\n  assign slot 1 r9.2\n"


def test_describe_prints_a_line_a_row(builder):
    plan = builder.plan(
        [Row(slot=2, tokens=list(range(10))), Row(slot=0, tokens=[7], start=4, shared=1)],
        copies=[(3, 5)],
    )
    assert plan.describe() == (
        "step 1 rows 2 tokens 11 outputs 2\n"
        "  copy block 3 to 5\n"
        "  row 0 slot 2 positions 0..10 seq_len 10 shared 0 tokens [0, 1, 2, 3, 4, 5, 6, 7]\n"
        "  row 1 slot 0 positions 4..5 seq_len 5 shared 1 tokens [7]\n"
    )


def test_an_arena_reused_too_early_is_noticed(builder):
    builder.plan([Row(slot=0, tokens=[1])])
    with pytest.raises(ValueError, match="holds step 1, not step 5: it was written again"):
        builder.arena.view(SimpleNamespace(step=5))


def test_another_version_is_refused():
    layout, num_words = layout_for(2, 16, 4)
    with pytest.raises(ValueError, match="plan version 0, this package reads version 1"):
        Arena(layout, num_words).view()


# Both sides of the arena: what Python says by number or by name is what Rust says.


def test_numbers_are_the_cores():
    assert PLAN_VERSION == core.PLAN_VERSION
    assert SLOT_EVENT_WORDS == core.SLOT_EVENT_WORDS
    assert TABLE_EDIT_WORDS == core.TABLE_EDIT_WORDS
    assert TIER_COPY_WORDS == core.TIER_COPY_WORDS
    assert COPY_WORDS == core.COPY_WORDS
    assert {field.name: field.value for field in Header} == core.HEADER
    assert max(core.HEADER.values()) < core.HEADER_WORDS


@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize("max_num_seqs", [1, 7, 1024])
def test_sections_lie_where_the_core_writes_them(block_size, max_num_seqs):
    """Known words are written at each of the core's offsets, and every view must find its own."""
    scheduler = core.Core(num_blocks=512, block_size=block_size, max_num_seqs=max_num_seqs)
    layout, num_words = scheduler.layout, scheduler.plan_words
    end = 0
    for offset, capacity in layout.values():
        assert offset >= end, "sections do not overlap"
        assert offset % 16 == 0, "sections begin on 64-byte lines"
        end = offset + capacity
    assert end <= num_words

    arena = Arena(layout, num_words)
    arena.words[:] = np.arange(num_words)
    arena.words[: len(Header)] = [PLAN_VERSION, 1, 0] + [1] * (len(Header) - 3)
    plan = arena.view()
    for name, (offset, _) in layout.items():
        if name != "header":
            section = getattr(plan, name).reshape(-1)
            assert section.tolist() == list(range(offset, offset + section.size)), name
    widths = {"table_edits": 3, "slot_events": 16, "copies_out": 4, "copies_in": 4, "copies": 2}
    for name, width in widths.items():
        assert getattr(plan, name).shape == (1, width), name


def test_a_plan_of_the_core_reads_as_it_was_meant():
    scheduler = core.Core(
        num_blocks=8, block_size=4, max_num_seqs=2, max_model_len=32, vocab_size=100
    )
    request_id = (3 << 32) + 5
    scheduler.inbox().submit(
        request_id,
        [10, 11, 12, 13, 14],
        max_tokens=2,
        arrival=0,
        adapter=6,
        sampling=np.array([-1, 8], dtype=np.int32),
    )
    arena = Arena(scheduler.layout, scheduler.plan_words)
    plan = arena.view(scheduler.plan(1, arena.words))
    assert plan.describe() == (
        f"step 1 rows 1 tokens 5 outputs 1\n  assign slot 0 r{request_id}.0\n"
        "  row 0 slot 0 positions 0..5 seq_len 5 shared 0 tokens [10, 11, 12, 13, 14]\n"
    )
    (event,) = plan.slot_events
    fields = {field.name: int(event[field]) for field in EventWord}
    assert fields == {
        "KIND": SlotEventKind.ASSIGNED,
        "SLOT": 0,
        "REQUEST_LOW": 5,
        "REQUEST_HIGH": 3,
        "INDEX": 0,
        "NUM_PROMPT_TOKENS": 5,
        "NUM_TOKENS": 5,
        "OFFSET": 0,
        "NUM_SAMPLING_WORDS": 2,
        "ADAPTER": 6,
    }
    sampling, tokens = plan.event_payload(event)
    assert (sampling.tolist(), tokens.tolist()) == ([-1, 8], [10, 11, 12, 13, 14])
    assert plan.query_indptr.tolist() == [0, 5]
    assert plan.positions.tolist() == [0, 1, 2, 3, 4]
    blocks = scheduler.block_tables[0, :2].tolist()
    assert plan.table_edits.tolist() == [[0, 0, blocks[0]], [0, 1, blocks[1]]]
    slots = [blocks[at // 4] * 4 + at % 4 for at in range(5)]
    assert plan.slot_mapping.tolist() == slots
    assert (plan.out_rows.tolist(), plan.out_slots.tolist()) == ([4], [0])
    assert plan.out_kinds.tolist() == [OutputKind.SAMPLE]
