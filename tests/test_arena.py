"""The plan as Python reads it: views of one buffer, exactly as long as the plan uses them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from fastserve.arena import Arena, Header, OutputKind
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
