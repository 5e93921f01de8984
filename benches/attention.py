"""Attention of decode rows that share a prefix: told so, beside not told.

    make bench-core ARGS=attention

One JSON line a case: microseconds of one layer with 9 query and 3 KV heads of 64 (SmolLM2's), the
two in turn, medians. The results have the same bits.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fastserve import host
from fastserve._core import cpu

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
CASES = [(2, 1024), (16, 1024), (64, 1024), (64, 4096)]
OWN_TOKENS = 32
RUNS = 15


def main() -> int:
    """Measure every case. Returns the process's exit status."""
    pool = cpu.Pool(host.cpus().num_usable)
    for num_rows, num_shared in CASES:
        for kv_dtype in ("float32", "bfloat16", "int8"):
            context = num_shared + OWN_TOKENS
            apart, together = (
                paged(pool, num_rows, 1, context, num_shared, kv_dtype, told=told)[0]
                for told in (False, True)
            )
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(RUNS):
                for call, found in zip((apart, together), times, strict=True):
                    begin = time.perf_counter()
                    call()
                    found.append(time.perf_counter() - begin)
            apart_s, together_s = (statistics.median(found) for found in times)
            record = {
                "bench": "attention",
                "rows": num_rows,
                "shared_tokens": num_shared,
                "own_tokens": OWN_TOKENS,
                "kv_dtype": kv_dtype,
                "threads": pool.num_threads,
                "apart_us": round(apart_s * 1e6),
                "together_us": round(together_s * 1e6),
                "speedup": round(apart_s / together_s, 2),
            }
            print(json.dumps(record), flush=True)
    return 0


def paged(
    pool: cpu.Pool,
    rows: int,
    tokens: int,
    context: int,
    shared: int,
    kv_dtype: str,
    *,
    told: bool = True,
) -> tuple[Callable[[], None], int]:
    """A call with `rows` rows of `tokens` queries at the end of `context` tokens each.

    The first `shared` of these are the same for all, which the kernel may be `told`. Also returns
    the bytes of all keys and values. All cases of one shape have the same numbers.
    """
    rng = np.random.default_rng(0)
    own, common = (context - shared) // BLOCK_SIZE, shared // BLOCK_SIZE
    kv = keys_and_values(rng, common + rows * own, kv_dtype)
    tables = np.empty((rows, common + own), np.int32)
    tables[:, :common] = np.arange(common)
    tables[:, common:] = common + np.arange(rows * own).reshape(rows, own)
    q = rng.standard_normal((rows * tokens, HEADS, HEAD_DIM), dtype=np.float32)
    out = np.empty_like(q)
    slots = np.arange(rows, dtype=np.int32)
    indptr = np.arange(0, rows * tokens + 1, tokens, dtype=np.int32)
    seq_lens = np.full(rows, context, np.int32)
    num_shared_blocks = np.full(rows, common * told, np.int32)
    num_shared_blocks[0] = 0

    def call() -> None:
        pool.paged_attention(
            q,
            kv,
            tables,
            slots,
            indptr,
            seq_lens,
            out,
            scale=HEAD_DIM**-0.5,
            num_shared_blocks=num_shared_blocks,
        )

    return call, kv.nbytes


def keys_and_values(
    rng: np.random.Generator, num_blocks: int, dtype: str
) -> NDArray[np.float32] | NDArray[np.uint16] | NDArray[np.int8]:
    """Noise in every block, of one size whatever it is stored as."""
    shape = cpu.kv_layer_shape(num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype)
    if dtype == "int8":
        kv = rng.integers(-127, 128, shape, dtype=np.int8)
        kv[..., -4 * BLOCK_SIZE :] = np.full(BLOCK_SIZE, 1 / 64, np.float32).view(np.int8)
        return kv
    wide = rng.standard_normal(shape, dtype=np.float32)
    return wide if dtype == "float32" else (wide.view(np.uint32) >> 16).astype(np.uint16)


if __name__ == "__main__":
    sys.exit(main())
