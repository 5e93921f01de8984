"""What a thread of pure Python beside the step thread costs a step.

Unit: microseconds for plan + commit through the binding, median over the steps, with and without
a thread that spins in Python. ``plan`` and ``commit`` keep the GIL, so the ratio should be 1: a
call that gave it up would wait up to the interpreter's switch interval (5 ms) to get it back.

The rows decode, all of them, in every step; the contexts grow by a token a step. Runs with and
without the thread alternate, so that a drift of the machine's clock hits both.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np

from fastserve.core import Core

PROMPT_TOKENS = 256
NUM_STEPS = 400
NUM_ROUNDS = 4


class Load:
    """A core with `num_rows` sequences that decode for ever, as far as a bench is concerned."""

    def __init__(self, num_rows: int) -> None:
        total = PROMPT_TOKENS + 4 * NUM_STEPS * NUM_ROUNDS
        self.core = Core(
            block_size=16,
            num_blocks=num_rows * (total // 16 + 1),
            max_model_len=total,
            max_num_seqs=num_rows,
            max_num_batched_tokens=max(num_rows, 8192),
            max_num_output_rows=num_rows,
            max_num_queued_tokens=num_rows * total,
        )
        inbox = self.core.inbox()
        rng = np.random.default_rng(1)
        for request in range(num_rows):
            prompt = rng.integers(0, 30_000, PROMPT_TOKENS, dtype=np.int32)
            inbox.submit(request, prompt, max_tokens=total - PROMPT_TOKENS, arrival=0)
        self.arena = np.zeros(self.core.plan_words, dtype=np.int32)
        self.counts = np.ones(num_rows, dtype=np.int32)
        self.tokens = np.arange(num_rows, dtype=np.int32)
        self.now = 0
        while self.step() < num_rows:  # Until every prompt is computed and every row decodes.
            pass

    def step(self) -> int:
        """Plan and commit one step. Returns its number of outputs."""
        self.now += 1_000_000
        sizes = self.core.plan(self.now, self.arena)
        outputs = sizes.num_outputs
        self.core.commit(sizes.step, self.now, self.counts[:outputs], self.tokens[:outputs])
        return outputs


def time_steps(step: Callable[[], int]) -> list[float]:
    """Microseconds of each of a few hundred steps."""
    times = []
    for _ in range(NUM_STEPS):
        start = time.perf_counter_ns()
        step()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return times


def spin(stop: threading.Event) -> None:
    count = 0
    while not stop.is_set():
        count += 1


def bench(num_rows: int) -> dict[str, object]:
    load = Load(num_rows)
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(NUM_ROUNDS):
        alone += time_steps(load.step)
        stop = threading.Event()
        spinner = threading.Thread(target=spin, args=(stop,), daemon=True)
        spinner.start()
        beside += time_steps(load.step)
        stop.set()
        spinner.join()
    quiet, busy = statistics.median(alone), statistics.median(beside)
    return {
        "bench": "gil",
        "rows": num_rows,
        "us": round(quiet, 2),
        "us_beside_a_spinning_thread": round(busy, 2),
        "ratio": round(busy / quiet, 3),
    }


def main() -> None:
    for num_rows in (64, 256, 1024):
        print(json.dumps(bench(num_rows)), flush=True)


if __name__ == "__main__":
    main()
