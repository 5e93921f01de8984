"""Kernels beside what the machine does at the moment: shares of its arithmetic and of its memory.

    make bench-core ARGS=limits

The machine is measured before and after every kernel (``peers/machine.c``: multiply-adds on
registers, sums over memory), and a share is of the faster of the two: the best time of the kernel
over the best that the machine did around it. One JSON line a case; ``wanted`` is the share that
this project aims at. Products are of 12,288 outputs and 2,048 inputs, attention has 9 query and 3
KV heads of 64 (SmolLM2's), one layer. A weight that fits the last cache of a large processor stays
there between calls, and is then read faster than memory is.

Arithmetic of float32 and of formats that become float32 is measured against float32's rate, and
int8 and bfloat16 against theirs where the processor has instructions for them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from attention import BLOCK_SIZE, HEAD_DIM, HEADS, paged
from numpy.typing import NDArray
from peers.machine import Machine
from peers.reference import Rates
from products import INPUTS, OUTPUTS, random_rows

from fastserve import host
from fastserve._core import cpu

FEW_ROWS = (1, 2, 4)
MANY_ROWS = (32, 128, 512)
FORMATS = ("F32", "BF16", "I8", "Q8_0", "Q4_1", "Q4_K", "Q6_K")
KV_DTYPES = ("float32", "bfloat16", "int8")
WANTED_READING = {"product": 0.92, "decode": 0.80}
WANTED_CHUNK = 0.45
BUDGET_S = 0.5


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel's call and what it takes.

    Attributes:
        name: Fields that say which it is.
        call: Runs it once.
        work: Bytes that it reads, or operations: two for a multiply-add.
        limit: Field of :class:`Rates` that bounds it.
        wanted: The share of that to reach.
    """

    name: dict[str, object]
    call: Callable[[], object]
    work: float
    limit: str
    wanted: float


def main() -> int:
    """Measure every case. Returns the process's exit status."""
    num_threads = host.cpus().num_usable
    machine = Machine(Path(__file__).parent.parent / "target" / "peers", num_threads)
    pool = cpu.Pool(num_threads)
    for cases in (products(pool), attention(pool)):
        for case in cases:
            before = machine.rates()
            best_s = fastest_s(case.call)
            limit = max(rate(before, case.limit), rate(machine.rates(), case.limit))
            reached = case.work / best_s / 1e9
            record = {
                "bench": "limits",
                **case.name,
                "isa": pool.isa,
                "threads": num_threads,
                "us": round(best_s * 1e6),
                "limit": case.limit,
                "reached": round(reached, 1),
                "possible": round(limit, 1),
                "share": round(reached / limit, 3),
                "wanted": case.wanted,
            }
            print(json.dumps(record), flush=True)
    return 0


def rate(rates: Rates, limit: str) -> float:
    """One of the machine's rates; float32's where it has no instructions for what is wanted."""
    if limit == "read":
        return rates.read_gb_per_s
    return rates.gflop_per_s.get(limit, rates.gflop_per_s["f32"])


def fastest_s(call: Callable[[], object]) -> float:
    """The best time of a call, of five or more."""
    call()
    best, count, begin = float("inf"), 0, time.perf_counter()
    while count < 5 or time.perf_counter() - begin < BUDGET_S:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
        count += 1
    return best


def products(pool: cpu.Pool) -> Iterator[Case]:
    """Few rows read a weight, many compute."""
    rng = np.random.default_rng(1)
    for name in FORMATS:
        packed = cpu.Packed(name, OUTPUTS, INPUTS)
        packed.fill(0, random_rows(name, rng))
        weight = cpu.Weight([packed])
        for rows in (*FEW_ROWS, *MANY_ROWS):
            x = rng.standard_normal((rows, INPUTS), dtype=np.float32)
            out = np.empty((rows, OUTPUTS), np.float32)

            def call(
                x: NDArray[np.float32] = x,
                weight: cpu.Weight = weight,
                out: NDArray[np.float32] = out,
            ) -> None:
                pool.linear(x, weight, out)

            fields = {"kernel": "product", "format": name, "rows": rows}
            if rows in FEW_ROWS:
                yield Case(fields, call, weight.num_bytes, "read", WANTED_READING["product"])
            else:
                limit = "int8" if name == "I8" else "f32"
                wanted = 0.80 if rows < MANY_ROWS[1] else 0.88
                yield Case(fields, call, 2 * rows * OUTPUTS * INPUTS, limit, wanted)


def attention(pool: cpu.Pool) -> Iterator[Case]:
    """Decode rows read keys and values; chunks and rows that share a prefix compute."""
    for kv_dtype in KV_DTYPES:
        for rows, context in ((16, 4096), (4, 16384)):
            call, num_bytes = paged(pool, rows, 1, context, 0, kv_dtype)
            fields = {"kernel": "decode", "kv_dtype": kv_dtype, "rows": rows, "context": context}
            yield Case(fields, call, num_bytes, "read", WANTED_READING["decode"])
        for tokens, context in ((512, 512), (256, 4096), (32, 16384)):
            call, _ = paged(pool, 1, tokens, context, 0, kv_dtype)
            fields = {"kernel": "chunk", "kv_dtype": kv_dtype, "tokens": tokens, "context": context}
            # A token sees those of its chunk up to itself: half of them.
            pairs = tokens * (context - (tokens - 1) / 2)
            work = 4 * HEADS * HEAD_DIM * pairs
            yield Case(fields, call, work, "bf16", WANTED_CHUNK)
        call, _ = paged(pool, 64, 1, 4096, 4096 - 2 * BLOCK_SIZE, kv_dtype)
        fields = {"kernel": "shared prefix", "kv_dtype": kv_dtype, "rows": 64, "context": 4096}
        yield Case(fields, call, 4 * HEADS * HEAD_DIM * 64 * 4096, "bf16", WANTED_CHUNK)


if __name__ == "__main__":
    sys.exit(main())
