"""A model too simple to be wrong behind the runner's protocol, and what it must answer.

Its logits are pseudo-random numbers seeded by a checksum of all tokens up to a position. Those are
read as attention reads keys: through the core's block tables, from memory that rows of this and
earlier steps wrote. A wrong table, slot mapping, copy, fork, position or last sample shows as a
wrong answer.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from fastserve._core import cpu
from fastserve.arena import PlanView
from fastserve.text.detokenizer import TokenTable

VOCAB_SIZE = 97
EOS = 2


def toy_logits(tokens: Sequence[int]) -> NDArray[np.float32]:
    """What the model says after `tokens`. The whole oracle."""
    seed = zlib.crc32(np.asarray(tokens, dtype="<i4").tobytes())
    logits = np.random.default_rng(seed).standard_normal(VOCAB_SIZE, dtype=np.float32)
    logits[EOS] += 0.5  # An answer ends after some thirty tokens.
    return logits * 3


def toy_answer(
    prompt: Sequence[int], num_tokens: int, stop_token_ids: Sequence[int] = (EOS,)
) -> list[int]:
    """The greedy continuation of `prompt`."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(toy_logits(tokens).argmax()))
        if tokens[-1] in stop_token_ids:
            break
    return tokens[len(prompt) :]


class ToyRunner:
    """Runs plans over a memory of token ids.

    Attributes:
        on_forward: Called with each plan before it is run; may raise, or change what is said.
        num_forwards: Steps run.
    """

    device = "toy"
    vocab_size = VOCAB_SIZE
    pool = cpu.Pool(2)

    def __init__(self, max_positions: int = 256, eos_token_ids: Sequence[int] = (EOS,)) -> None:
        self.config = SimpleNamespace(
            max_positions=max_positions, eos_token_ids=tuple(eos_token_ids), vocab_size=VOCAB_SIZE
        )
        self.on_forward: Callable[[PlanView], None] = lambda plan: None
        self.poison: Callable[[list[int]], bool] = lambda tokens: False
        self.num_forwards = 0

    def kv_bytes_per_block(self, block_size: int) -> int:
        return block_size * 4096

    def step_costs(self) -> None:
        return None

    def native_parts(self) -> None:
        return None

    def allocate_kv(
        self, num_blocks: int, block_size: int, block_tables: NDArray[np.int32]
    ) -> None:
        self.block_size = block_size
        self.block_tables = block_tables
        self.memory = np.full((num_blocks, block_size), -9, dtype=np.int64)

    def forward(self, plan: PlanView, last_samples: NDArray[np.int32]) -> NDArray[np.float32]:
        self.num_forwards += 1
        self.on_forward(plan)
        for source, into in plan.copies.tolist():
            self.memory[into] = self.memory[source]
        tokens = plan.token_ids.astype(np.int64)
        tokens = np.where(tokens < 0, last_samples[np.maximum(-1 - tokens, 0)], tokens)
        self.memory.reshape(-1)[plan.slot_mapping] = tokens
        slots = np.repeat(plan.row_slots, np.diff(plan.query_indptr))
        rows = [
            self._attend(int(slots[at]), int(plan.positions[at]) + 1)
            for at in plan.out_rows.tolist()
        ]
        if not rows:
            return np.empty((0, VOCAB_SIZE), dtype=np.float32)
        return np.stack(rows)

    def _attend(self, slot: int, length: int) -> NDArray[np.float32]:
        blocks = self.block_tables[slot, : -(-length // self.block_size)]
        seen = self.memory[blocks].reshape(-1)[:length].tolist()
        logits = toy_logits(seen)
        if self.poison(seen):
            logits[5] = np.nan
        return logits


class ToyTokenizer:
    """Token i is the character 30 + i, a space for 1; 2 ends a text and has no text itself."""

    def __init__(self) -> None:
        tokens = [b"", b" ", b"<end>", *(bytes([30 + token]) for token in range(3, VOCAB_SIZE))]
        self.table = TokenTable(tokens, [EOS])
        self.has_chat_template = True

    def encode(self, text: str) -> list[int]:
        return [1 if character == " " else ord(character) - 30 for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(self.table.token_bytes(token) for token in tokens if token != EOS).decode()

    def apply_chat_template(
        self, messages: Sequence[dict[str, str]], **options: object
    ) -> list[int]:
        text = "".join(f"{message['role']}:{message['content']};" for message in messages)
        return self.encode(text + ("assistant:" if options["add_generation_prompt"] else ""))
