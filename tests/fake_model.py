"""A model too simple to be wrong, run from plans as a device would run them.

The next token is a checksum of everything before it. "Everything before it" is read the way
attention reads it: through the block table, from memory that earlier rows wrote. So a wrong table,
slot mapping, copy, match or fork shows as a wrong prefix, here and in the tokens.

Memory holds, for each slot of each block, the token and the namespace that wrote it. The block
tables are a device's own, built from a plan's table edits, and compared with the core's.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastserve.core import Core, EventWord, OutputKind, PlanView, SlotEventKind

NOTHING = -1


def next_token(prefix: Sequence[int], index: int, vocab_size: int) -> int:
    """What sequence ``index`` of a request says after ``prefix``. The whole oracle."""
    return zlib.crc32(np.asarray([*prefix, index], dtype="<i4").tobytes()) % vocab_size


def expected_output(
    prompt: Sequence[int], index: int, num_tokens: int, vocab_size: int
) -> list[int]:
    """The first ``num_tokens`` tokens that a sequence generates if nothing ends it."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, index, vocab_size))
    return tokens[len(prompt) :]


@dataclass
class Slot:
    """What a device knows of a row slot's sequence."""

    request_id: int
    index: int
    namespace: int
    last_sample: int


class FakeModel:
    """Runs plans over a memory of its own.

    Args:
        core: Whose plans are run.
        namespaces: Namespace of each request that is not in the common one.
    """

    def __init__(self, core: Core, namespaces: dict[int, int] | None = None) -> None:
        config = core.config
        self.vocab_size: int = config["vocab_size"]
        self.block_size: int = config["block_size"]
        self.namespaces = {} if namespaces is None else namespaces
        self.live_tables = core.block_tables
        self.tables = np.full_like(self.live_tables, NOTHING)
        num_blocks: int = config["num_blocks"]
        self.tokens = np.full((num_blocks, self.block_size), NOTHING)
        self.writers = np.full((num_blocks, self.block_size), NOTHING)
        self.slots: dict[int, Slot] = {}

    def run(self, plan: PlanView) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Counts and tokens for ``Core.commit``, one of each a row of output."""
        self._prepare(plan)
        rows = np.repeat(np.arange(plan.num_rows), np.diff(plan.query_indptr))
        row_slots = plan.row_slots[rows]
        for at, slot in enumerate(row_slots.tolist()):
            self._write(plan, at, slot)
        self._compare_tables(plan)

        counts = np.zeros(plan.num_outputs, dtype=np.int32)
        tokens = np.zeros(plan.num_outputs, dtype=np.int32)
        for row, (at, slot, kind) in enumerate(
            zip(
                plan.out_rows.tolist(),
                plan.out_slots.tolist(),
                plan.out_kinds.tolist(),
                strict=True,
            )
        ):
            prefix = self._attend(int(row_slots[at]), int(plan.positions[at]) + 1)
            if kind == OutputKind.SAMPLE:
                sample = next_token(prefix, self.slots[slot].index, self.vocab_size)
                counts[row], tokens[row] = 1, sample
                self.slots[slot].last_sample = sample
        return counts, tokens

    def who(self, plan: PlanView) -> list[tuple[int, int]]:
        """Request and sequence of each row of output."""
        slots = (self.slots[slot] for slot in plan.out_slots.tolist())
        return [(slot.request_id, slot.index) for slot in slots]

    def _prepare(self, plan: PlanView) -> None:
        for event in plan.slot_events:
            slot = int(event[EventWord.SLOT])
            if event[EventWord.KIND] == SlotEventKind.RELEASED:
                self.slots.pop(slot, None)
                continue
            request_id = (
                int(event[EventWord.REQUEST_LOW]) | int(event[EventWord.REQUEST_HIGH]) << 32
            )
            namespace = self.namespaces.get(request_id, 0)
            index = int(event[EventWord.INDEX])
            self.slots[slot] = Slot(request_id, index, namespace, last_sample=NOTHING)
        for slot, at, block in plan.table_edits.tolist():
            self.tables[slot, at] = block
        self._copy(plan)

    def _copy(self, plan: PlanView) -> None:
        for source, destination in plan.copies.tolist():
            self.tokens[destination] = self.tokens[source]
            self.writers[destination] = self.writers[source]

    def _write(self, plan: PlanView, at: int, slot: int) -> None:
        token = int(plan.token_ids[at])
        if token < 0:
            token = self.slots[-1 - token].last_sample
        place = int(plan.slot_mapping[at])
        block, offset = divmod(place, self.block_size)
        position = int(plan.positions[at])
        assert block == self.tables[slot, position // self.block_size], "K and V go to the table's"
        assert offset == position % self.block_size
        self.tokens[block, offset] = token
        self.writers[block, offset] = self.slots[slot].namespace

    def _compare_tables(self, plan: PlanView) -> None:
        """The core's tables and the device's agree where this step's rows read them."""
        for slot, length in zip(plan.row_slots.tolist(), plan.seq_lens.tolist(), strict=True):
            used = -(-length // self.block_size)
            assert self.tables[slot, :used].tolist() == self.live_tables[slot, :used].tolist()

    def _attend(self, slot: int, length: int) -> list[int]:
        """The tokens a query sees: its own and all before it."""
        blocks = self.tables[slot, : -(-length // self.block_size)]
        assert (self.writers[blocks].reshape(-1)[:length] == self.slots[slot].namespace).all()
        prefix: list[int] = self.tokens[blocks].reshape(-1)[:length].tolist()
        return prefix
