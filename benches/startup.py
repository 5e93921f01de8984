"""From process start to the first token of ``fastserve generate``, and the peak memory of it.

Unit: seconds from ``exec`` to the first byte on stdout, median of five processes after one that
warms the page cache. Peak memory is the process's largest resident set; the part of the KV pool
that was touched is counted in (it is a megabyte or two: the pool is touched only where it is
used).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

NUM_RUNS = 5
MODEL = "smollm2"
MAX_TOKENS = 8
# 32 tokens with SmolLM2's tokenizer, and no chat template.
PROMPT = (
    "A scheduler decides which requests run in the next step, how many tokens each of them "
    "computes, and which blocks of the cache hold their keys and their values."
)
COMMAND = [
    str(Path(sys.executable).parent / "fastserve"),
    *("generate", MODEL, PROMPT, "--raw", "--max-tokens", str(MAX_TOKENS)),
]


def measure() -> tuple[float, int]:
    """One process: seconds to the first byte, and its peak resident set in bytes."""
    start = time.perf_counter()
    with subprocess.Popen(
        COMMAND, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 1)
        seconds = time.perf_counter() - start
        while os.read(process.stdout.fileno(), 1 << 16):
            pass
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if not first or process.returncode != 0:
        raise SystemExit(f"exit {process.returncode}: {' '.join(COMMAND)}")
    kilobyte = 1 if sys.platform == "darwin" else 1024
    return seconds, usage.ru_maxrss * kilobyte


def main() -> None:
    measure()
    runs = [measure() for _ in range(NUM_RUNS)]
    line = {
        "bench": "startup",
        "model": MODEL,
        "prompt_tokens": 32,
        "runs": NUM_RUNS,
        "first_token_s": round(statistics.median(seconds for seconds, _ in runs), 3),
        "worst_s": round(max(seconds for seconds, _ in runs), 3),
        "peak_gb": round(max(peak for _, peak in runs) / 1e9, 3),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
