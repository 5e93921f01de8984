"""Embed the scheduler alone: a toy server loop with a fake model, and no torch.

A client thread submits requests while the main thread steps. The "model" answers a prompt with its
letters, shifted by one in the alphabet; what matters is the loop around it and what it reads:

    plan     the core says which tokens of which sequences run, where their keys and values go
    run      the model computes them and gives one token for each row of output
    commit   the core appends the tokens, applies the stop rules and frees what has ended

Run it with ``python examples/embed_scheduler.py``.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from fastserve.core import FINISH_REASONS, Arena, Core, Inbox, PlanView, RequestError

VOCAB_SIZE = 128  # A token is a character.
SYSTEM = "you answer in capitals. "
PROMPTS = ["attack at dawn", "attack at noon", "hello", "the quick brown fox", ""]


def submit_all(inbox: Inbox, refused: dict[int, str]) -> None:
    """What a client thread does: hand over tokens, or hear at once why not."""
    for request_id, prompt in enumerate(PROMPTS):
        text = SYSTEM + prompt if prompt else ""
        try:
            inbox.submit(
                request_id,
                np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32),
                max_tokens=len(prompt) + 1,
                arrival=time.monotonic_ns(),
                stop_token_ids=[ord(".")],
            )
        except RequestError as error:
            refused[request_id] = f"{error.code}: {error}"


class ShiftModel:
    """A fake model. It keeps tokens where a real one keeps keys and values.

    Args:
        num_blocks: Blocks in the pool.
        block_size: Tokens a block.
        block_tables: Which blocks are whose, as the core keeps it.
    """

    def __init__(self, num_blocks: int, block_size: int, block_tables: NDArray[np.int32]) -> None:
        self.cache = np.zeros((num_blocks, block_size), dtype=np.int32)
        self.block_tables = block_tables

    def run(self, plan: PlanView) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Counts and tokens, one of each a row of output."""
        for source, destination in plan.copies:
            self.cache[destination] = self.cache[source]
        self.cache.reshape(-1)[plan.slot_mapping] = plan.token_ids  # Write, ...
        tokens = [
            self._next(self._read(slot, plan.positions[at] + 1))  # ... then attend.
            for at, slot in zip(plan.out_rows, plan.out_slots, strict=True)
        ]
        return np.ones(len(tokens), dtype=np.int32), np.array(tokens, dtype=np.int32)

    def _read(self, slot: int, length: int) -> str:
        """The sequence so far, through its block table, as attention reads it."""
        blocks = self.block_tables[slot, : -(-length // self.cache.shape[1])]
        return bytes(self.cache[blocks].reshape(-1)[:length].tolist()).decode()

    def _next(self, text: str) -> int:
        question = text.removeprefix(SYSTEM)
        letters = [letter for letter in question if not letter.isupper()]
        answered = len(question) - len(letters)
        if answered == len([letter for letter in letters if letter.isalpha()]):
            return ord(".")
        asked = [letter for letter in letters if letter.isalpha()][answered]
        return (ord(asked) - ord("a") + 1) % 26 + ord("A")


def main() -> None:
    """Serve the prompts and print the answers."""
    core = Core(
        num_blocks=64,
        block_size=8,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        vocab_size=VOCAB_SIZE,
    )
    arena = Arena(core.layout, core.plan_words)
    model = ShiftModel(num_blocks=64, block_size=8, block_tables=core.block_tables)

    refused: dict[int, str] = {}
    client = threading.Thread(target=submit_all, args=(core.inbox(), refused))
    client.start()

    answers: dict[int, list[str]] = defaultdict(list)
    while client.is_alive() or core.has_work():
        sizes = core.plan(time.monotonic_ns(), arena.words)
        if not sizes.is_step:
            outputs = core.take_outputs()
        else:
            counts, tokens = model.run(arena.view(sizes))
            outputs = core.commit(sizes.step, time.monotonic_ns(), counts, tokens)
        starts = outputs.token_indptr
        for entry, request_id in enumerate(outputs.request_ids.tolist()):
            answers[request_id] += map(chr, outputs.tokens[starts[entry] : starts[entry + 1]])
            if reason := FINISH_REASONS.get(int(outputs.finish_reasons[entry])):
                cached = outputs.num_cached_tokens[entry]
                text = "".join(answers[request_id])
                print(f"{PROMPTS[request_id]!r} -> {text!r} ({reason}, {cached} tokens cached)")

    client.join()
    for request_id, why in refused.items():
        print(f"{PROMPTS[request_id]!r} refused, {why}")
    stats = core.stats()
    print(
        f"{stats['num_steps']} steps, {stats['num_generation_tokens']} tokens generated, "
        f"blocks: {stats['free']} free + {stats['held']} held + {stats['cached']} cached "
        f"= {stats['capacity']}"
    )


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # Whoever read the output went away: `| head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
