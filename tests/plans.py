"""Plans made by hand: what the Rust core would write, without the Rust core.

A :class:`PlanBuilder` keeps block tables for row slots and writes one step after the other into an
arena, with the layout that ``rust/sched/src/plan.rs`` describes. It plans whatever it is told to:
whole prompts, chunks, single tokens and any mix of them, in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastserve.arena import Arena, Header, Layout, OutputKind, PlanView


def layout_for(max_num_seqs: int, max_num_tokens: int, max_num_outputs: int) -> tuple[Layout, int]:
    """The sections of a plan of at most this size, and the words of an arena that holds it."""
    rows, tokens, outputs = max_num_seqs, max_num_tokens, max_num_outputs
    capacities = {
        "header": 32,
        "row_slots": rows,
        "query_indptr": rows + 1,
        "seq_lens": rows,
        "num_shared_blocks": rows,
        "token_ids": tokens,
        "positions": tokens,
        "slot_mapping": tokens,
        "out_rows": outputs,
        "out_slots": outputs,
        "out_kinds": outputs,
        "table_edits": 3 * 64,
        "slot_events": 16 * 4 * rows,
        "event_words": 4096,
        "copies_out": 4 * 2 * rows,
        "copies_in": 4 * 2 * rows,
        "copies": 2 * rows,
    }
    layout: dict[str, tuple[int, int]] = {}
    offset = 0
    for name, capacity in capacities.items():
        layout[name] = (offset, capacity)
        offset += -(-capacity // 16) * 16
    return layout, offset


@dataclass(kw_only=True)
class Row:
    """One row of a step.

    Attributes:
        slot: Its row slot.
        tokens: The tokens to compute; −1 − slot takes a slot's last sample.
        start: Position of the first of them.
        outputs: Which of ``tokens`` have an output (indices; negative from the end).
        shared: Leading blocks equal to the previous row's.
    """

    slot: int
    tokens: list[int]
    start: int = 0
    outputs: list[int] = field(default_factory=lambda: [-1])
    shared: int = 0


class PlanBuilder:
    """Writes plans for sequences whose blocks it hands out itself, scattered over the pool."""

    def __init__(
        self,
        *,
        block_size: int = 16,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        max_blocks_per_seq: int = 16,
        max_num_tokens: int = 512,
        seed: int = 0,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.block_tables = np.zeros((max_num_seqs, max_blocks_per_seq), dtype=np.int32)
        self.num_table_blocks = [0] * max_num_seqs
        self.free = np.random.default_rng(seed).permutation(num_blocks).tolist()
        layout, num_words = layout_for(max_num_seqs, max_num_tokens, max_num_tokens)
        self.arena = Arena(layout, num_words)
        self.step = 0

    def give_kv_to(self, runner: Any) -> None:
        """Allocate the runner's cache with all bits set, which is NaN, or numbers with a scale of
        NaN: what was not written must not be read.
        """
        runner.allocate_kv(self.num_blocks, self.block_size, self.block_tables)
        kv = runner._cache.kv
        kv.view(np.uint8).fill(255)

    def take_block(self) -> int:
        """One free block."""
        return int(self.free.pop())

    def grow(self, slot: int, num_tokens: int) -> None:
        """Give ``slot`` the blocks that ``num_tokens`` tokens need."""
        while self.num_table_blocks[slot] * self.block_size < num_tokens:
            self.block_tables[slot, self.num_table_blocks[slot]] = self.take_block()
            self.num_table_blocks[slot] += 1

    def release(self, slot: int) -> None:
        """Take all blocks of ``slot`` back."""
        self.free += self.block_tables[slot, : self.num_table_blocks[slot]].tolist()
        self.num_table_blocks[slot] = 0

    def plan(
        self,
        rows: list[Row],
        copies: list[tuple[int, int]] | None = None,
        kind: OutputKind = OutputKind.SAMPLE,
    ) -> PlanView:
        """Write one step and read it back."""
        copies = copies or []
        self.step += 1
        words = self.arena.words
        words[:] = -77  # What a section does not use must not be read.
        token_ids: list[int] = []
        positions: list[int] = []
        slot_mapping: list[int] = []
        indptr = [0]
        out_rows: list[int] = []
        out_slots: list[int] = []
        for row in rows:
            end = row.start + len(row.tokens)
            self.grow(row.slot, end)
            out_rows += [len(token_ids) + at % len(row.tokens) for at in row.outputs]
            out_slots += [row.slot] * len(row.outputs)
            token_ids += row.tokens
            positions += range(row.start, end)
            table = self.block_tables[row.slot]
            slot_mapping += [
                int(table[at // self.block_size]) * self.block_size + at % self.block_size
                for at in range(row.start, end)
            ]
            indptr.append(len(token_ids))
        self._section("row_slots", [row.slot for row in rows])
        self._section("query_indptr", indptr)
        self._section("seq_lens", [row.start + len(row.tokens) for row in rows])
        self._section("num_shared_blocks", [row.shared for row in rows])
        self._section("token_ids", token_ids)
        self._section("positions", positions)
        self._section("slot_mapping", slot_mapping)
        self._section("out_rows", out_rows)
        self._section("out_slots", out_slots)
        self._section("out_kinds", [int(kind)] * len(out_rows))
        self._section("copies", [block for copy in copies for block in copy])
        header = [0] * 32
        header[Header.VERSION] = 1
        header[Header.STEP_LOW] = self.step
        header[Header.NUM_ROWS] = len(rows)
        header[Header.NUM_TOKENS] = len(token_ids)
        header[Header.NUM_OUTPUTS] = len(out_rows)
        header[Header.NUM_COPIES] = len(copies)
        self._section("header", header)
        return self.arena.view()

    def _section(self, name: str, values: list[int]) -> None:
        offset, capacity = self.arena.layout[name]
        assert len(values) <= capacity, f"{name}: {len(values)} words, capacity {capacity}"
        self.arena.words[offset : offset + len(values)] = values


def drive(
    runner: Any,
    builder: PlanBuilder,
    sequences: list[list[int]],
    chunk_of: Callable[[int, int], int],
) -> list[NDArray[np.float32]]:
    """Run every sequence to its end and return the logits of each of its positions.

    ``chunk_of(step, sequence)`` says how many of its tokens a sequence computes in a step; 0 leaves
    it out. Rows of a step come in a different order each time.
    """
    builder.give_kv_to(runner)
    last_samples = np.full(len(builder.block_tables), -1, dtype=np.int32)
    done = [0] * len(sequences)
    collected: list[list[NDArray[np.float32]]] = [[] for _ in sequences]
    step = 0
    while any(done[index] < len(tokens) for index, tokens in enumerate(sequences)):
        rows = []
        for index, tokens in enumerate(sequences):
            chunk = tokens[done[index] : done[index] + chunk_of(step, index)]
            if chunk:
                outputs = list(range(len(chunk)))
                rows.append(Row(slot=index, tokens=chunk, start=done[index], outputs=outputs))
        step += 1
        if not rows:
            continue
        rows = rows[step % len(rows) :] + rows[: step % len(rows)]
        logits = runner.forward(builder.plan(rows), last_samples).copy()
        first = 0
        for row in rows:
            collected[row.slot].append(logits[first : first + len(row.tokens)])
            first += len(row.tokens)
            done[row.slot] += len(row.tokens)
    return [np.concatenate(parts) for parts in collected]
