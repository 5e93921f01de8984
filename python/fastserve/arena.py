"""The plan of one step, read in place.

The core writes a plan as int32 words into an arena; here the words become numpy views under the
names that ``rust/sched/src/plan.rs`` gives them. Nothing is copied and nothing is made per sequence
or per token: a view is sixteen slices whatever the batch.

Offsets come from the core (``Core.layout``: name → (offset, capacity)) and are never added up here.
What the two sides share by number (header fields, words per record) stands below, and a test
compares it with the core's.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.int32]
Layout: TypeAlias = Mapping[str, tuple[int, int]]

PLAN_VERSION: Final = 1
SLOT_EVENT_WORDS: Final = 16
TABLE_EDIT_WORDS: Final = 3
TIER_COPY_WORDS: Final = 4
COPY_WORDS: Final = 2


class Header(IntEnum):
    """Where each count stands in the header."""

    VERSION = 0
    STEP_LOW = 1
    STEP_HIGH = 2
    NUM_ROWS = 3
    NUM_TOKENS = 4
    NUM_OUTPUTS = 5
    NUM_TABLE_EDITS = 6
    NUM_SLOT_EVENTS = 7
    NUM_EVENT_WORDS = 8
    NUM_COPIES_OUT = 9
    NUM_COPIES_IN = 10
    NUM_COPIES = 11


class OutputKind(IntEnum):
    """What is wanted of an output row."""

    SAMPLE = 0
    VERIFY = 1
    SCORE = 2
    EMBED = 3


class SlotEventKind(IntEnum):
    """What happened to a row slot."""

    ASSIGNED = 1
    RELEASED = 2


class EventWord(IntEnum):
    """The words of one slot event."""

    KIND = 0
    SLOT = 1
    REQUEST_LOW = 2
    REQUEST_HIGH = 3
    INDEX = 4
    NUM_PROMPT_TOKENS = 5
    NUM_TOKENS = 6
    OFFSET = 7
    NUM_SAMPLING_WORDS = 8
    ADAPTER = 9


class Sizes(Protocol):
    """What ``Core.plan`` returns, as far as an arena cares."""

    @property
    def step(self) -> int:
        """The step planned."""


def _low_high(low: int, high: int) -> int:
    return (low & 0xFFFF_FFFF) | (high & 0xFFFF_FFFF) << 32


class PlanView:
    """One plan's sections, each a view of the arena exactly as long as the plan uses it.

    Attributes:
        step: Id of the step.
        num_rows: Rows, S.
        num_tokens: Tokens to compute, T.
        num_outputs: Output rows, R.
        row_slots: ``[S]`` row slot of each row.
        query_indptr: ``[S + 1]`` where each row's tokens start.
        seq_lens: ``[S]`` tokens with K and V after this step; 0 marks a padding row.
        num_shared_blocks: ``[S]`` leading blocks equal to the previous row's.
        token_ids: ``[T]`` a token, or −1 − slot: that slot's last sample.
        positions: ``[T]`` position in the sequence.
        slot_mapping: ``[T]`` ``block * block_size + offset``; −1: write nothing.
        out_rows: ``[R]`` index into the step's tokens whose hidden state is taken; may repeat.
        out_slots: ``[R]`` row slot whose sampling state is used.
        out_kinds: ``[R]`` :class:`OutputKind`.
        table_edits: ``[n, 3]`` slot, index, block.
        slot_events: ``[n, 16]`` columns are :class:`EventWord`.
        event_words: ``[n]`` what slot events point to.
        copies_out: ``[n, 4]`` block, external slot, ticket low, ticket high.
        copies_in: ``[n, 4]`` the same, the other way.
        copies: ``[n, 2]`` source block, destination block.
    """

    __slots__ = (
        "copies",
        "copies_in",
        "copies_out",
        "event_words",
        "num_outputs",
        "num_rows",
        "num_shared_blocks",
        "num_tokens",
        "out_kinds",
        "out_rows",
        "out_slots",
        "positions",
        "query_indptr",
        "row_slots",
        "seq_lens",
        "slot_events",
        "slot_mapping",
        "step",
        "table_edits",
        "token_ids",
    )

    def __init__(self, words: Words, layout: Layout) -> None:
        first = layout["header"][0]
        header: list[int] = words[first : first + len(Header)].tolist()
        if header[Header.VERSION] != PLAN_VERSION:
            raise ValueError(
                f"the arena holds plan version {header[Header.VERSION]}, this package reads "
                f"version {PLAN_VERSION}; rebuild the extension"
            )

        def section(name: str, num_words: int) -> Words:
            offset, _ = layout[name]
            return words[offset : offset + num_words]

        def records(name: str, count: Header, width: int) -> Words:
            return section(name, header[count] * width).reshape(-1, width)

        self.step = _low_high(header[Header.STEP_LOW], header[Header.STEP_HIGH])
        self.num_rows = num_rows = header[Header.NUM_ROWS]
        self.num_tokens = num_tokens = header[Header.NUM_TOKENS]
        self.num_outputs = num_outputs = header[Header.NUM_OUTPUTS]
        self.row_slots = section("row_slots", num_rows)
        self.query_indptr = section("query_indptr", num_rows + 1)
        self.seq_lens = section("seq_lens", num_rows)
        self.num_shared_blocks = section("num_shared_blocks", num_rows)
        self.token_ids = section("token_ids", num_tokens)
        self.positions = section("positions", num_tokens)
        self.slot_mapping = section("slot_mapping", num_tokens)
        self.out_rows = section("out_rows", num_outputs)
        self.out_slots = section("out_slots", num_outputs)
        self.out_kinds = section("out_kinds", num_outputs)
        self.table_edits = records("table_edits", Header.NUM_TABLE_EDITS, TABLE_EDIT_WORDS)
        self.slot_events = records("slot_events", Header.NUM_SLOT_EVENTS, SLOT_EVENT_WORDS)
        self.event_words = section("event_words", header[Header.NUM_EVENT_WORDS])
        self.copies_out = records("copies_out", Header.NUM_COPIES_OUT, TIER_COPY_WORDS)
        self.copies_in = records("copies_in", Header.NUM_COPIES_IN, TIER_COPY_WORDS)
        self.copies = records("copies", Header.NUM_COPIES, COPY_WORDS)

    def event_payload(self, event: Words) -> tuple[Words, Words]:
        """The sampling record and the tokens so far that one row of ``slot_events`` points to."""
        start = int(event[EventWord.OFFSET])
        middle = start + int(event[EventWord.NUM_SAMPLING_WORDS])
        end = middle + int(event[EventWord.NUM_TOKENS])
        return self.event_words[start:middle], self.event_words[middle:end]

    def describe(self) -> str:
        """The plan as text, a line a row, as the core prints it: for people and snapshots."""
        lines = [
            f"step {self.step} rows {self.num_rows} tokens {self.num_tokens} "
            f"outputs {self.num_outputs}"
        ]
        for event in self.slot_events.tolist():
            what = "assign" if event[EventWord.KIND] == SlotEventKind.ASSIGNED else "release"
            request = _low_high(event[EventWord.REQUEST_LOW], event[EventWord.REQUEST_HIGH])
            slot, index = event[EventWord.SLOT], event[EventWord.INDEX]
            lines.append(f"  {what} slot {slot} r{request}.{index}")
        lines += [f"  copy block {source} to {into}" for source, into in self.copies.tolist()]
        for row, slot in enumerate(self.row_slots.tolist()):
            first, end = self.query_indptr[row : row + 2].tolist()
            lines.append(
                f"  row {row} slot {slot} "
                f"positions {self.positions[first]}..{self.positions[end - 1] + 1} "
                f"seq_len {self.seq_lens[row]} shared {self.num_shared_blocks[row]} "
                f"tokens {self.token_ids[first : min(end, first + 8)].tolist()}"
            )
        return "\n".join(lines) + "\n"


class Arena:
    """Host memory for one plan.

    There is one arena more than there may be steps in flight; who drives the core takes them in
    turn.

    Attributes:
        words: What ``Core.plan`` writes into.
        layout: ``Core.layout``. Its length comes with it, as ``Core.plan_words``.
    """

    __slots__ = ("layout", "words")

    def __init__(self, layout: Layout, num_words: int) -> None:
        self.layout = dict(layout)
        self.words: Words = np.zeros(num_words, dtype=np.int32)

    def view(self, sizes: Sizes | None = None) -> PlanView:
        """The plan that was written last.

        Raises:
            ValueError: ``sizes`` is of another step: the arena was reused too early.
        """
        plan = PlanView(self.words, self.layout)
        if sizes is not None and sizes.step != plan.step:
            raise ValueError(
                f"the arena holds step {plan.step}, not step {sizes.step}: it was written again "
                "before its step was done; use one arena more than steps in flight"
            )
        return plan
