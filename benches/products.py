"""Products with packed weights: speed beside torch's, and beside what memory and arithmetic allow.

    make bench-core ARGS=products

For each format and number of rows, one JSON line: microseconds, the weight bytes read a second as
a share of the fastest of many sums over as large a tensor, and the ratio to torch's float32 product
of the same shape, all in one run with the same threads. The weight is larger than the caches.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from fastserve._core import cpu
from fastserve.host import cpus
from fastserve.models.tensors import find_format

ROWS = (1, 2, 4, 8, 32, 128, 512)
OUTPUTS, INPUTS = 12288, 2048
FORMATS = ("F32", "BF16", "I8", "Q8_0", "Q4_1", "Q4_K", "Q6_K")
BUDGET_S = 0.4


def times_s(work: Callable[[], object]) -> list[float]:
    """Times of a call: at least five, and about as many as fit the budget."""
    work()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - begin < BUDGET_S and len(times) < 200):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


def median_s(work: Callable[[], object]) -> float:
    """Median time of a call."""
    return statistics.median(times_s(work))


def random_rows(name: str, rng: np.random.Generator) -> np.ndarray:
    """Rows in a format whose scales are finite, as they are packed."""
    if name in ("F32", "I8"):  # int8 is made from float32.
        return rng.standard_normal(OUTPUTS * INPUTS, dtype=np.float32).view(np.uint8)
    layout = find_format(name)
    assert layout is not None
    num_blocks = OUTPUTS * INPUTS // layout.block_elements
    # Bytes below 64 make neither an infinite scale nor a NaN.
    return rng.integers(0, 60, num_blocks * layout.block_bytes, dtype=np.uint8)


def main() -> None:
    """Measure and print."""
    num_threads = cpus().num_usable
    torch.set_num_threads(num_threads)
    pool = cpu.Pool(num_threads)
    rng = np.random.default_rng(1)
    reference = torch.from_numpy(rng.standard_normal((OUTPUTS, INPUTS), dtype=np.float32))
    bandwidth = reference.nbytes / min(times_s(reference.sum))
    print(json.dumps({"bench": "read", "gb_per_s": round(bandwidth / 1e9, 1), "isa": pool.isa}))
    torch_s = {}
    for name in FORMATS:
        packed = cpu.Packed(name, OUTPUTS, INPUTS)
        packed.fill(0, random_rows(name, rng))
        weight = cpu.Weight([packed])
        for rows in ROWS:
            x = rng.standard_normal((rows, INPUTS), dtype=np.float32)
            out = np.empty((rows, OUTPUTS), np.float32)
            if rows not in torch_s:
                tensors = (torch.from_numpy(x), reference.t())
                torch_s[rows] = median_s(partial(torch.mm, *tensors, out=torch.from_numpy(out)))
            ours_s = median_s(partial(pool.linear, x, weight, out))
            record = {
                "bench": "product",
                "format": name,
                "rows": rows,
                "us": round(ours_s * 1e6),
                "gflop_per_s": round(2e-9 * rows * OUTPUTS * INPUTS / ours_s, 1),
                "read_share": round(weight.num_bytes / ours_s / bandwidth, 3),
                "torch_f32_us": round(torch_s[rows] * 1e6),
                "speedup": round(torch_s[rows] / ours_s, 2),
            }
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
