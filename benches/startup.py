"""From process start to the first token of ``fastserve generate``, and the peak memory of it.

Unit: seconds from ``exec`` to the first byte on stdout, median of five processes after one that
warms the page cache. Peak memory is the process's largest resident set; the part of the KV pool
that was touched is counted in (it is a megabyte or two: the pool is touched only where it is
used).

A second line has the peak memory of a process whose KV pool of 10,000 tokens was filled (but for
17 of its 625 blocks), with weights, keys and values in bfloat16.
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

POOL_TOKENS = 10_000
FILL = f"""
from fastserve import LLM, SamplingParams

llm = LLM("{MODEL}", dtype="bfloat16", num_blocks={POOL_TOKENS} // 16, progress=False)
prompts = [{{"prompt_token_ids": [100 + i] * 496}} for i in range({POOL_TOKENS} // 512)]
outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
assert sum(len(output.outputs[0].token_ids) for output in outputs) == 16 * len(prompts)
"""


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
        peak = wait(process)
    if not first:
        raise SystemExit(f"no output: {' '.join(COMMAND)}")
    return seconds, peak


def fill_pool() -> int:
    """Peak resident set in bytes of a process that uses all of its KV pool."""
    with subprocess.Popen([sys.executable, "-c", FILL], stdin=subprocess.DEVNULL) as process:
        return wait(process)


def wait(process: subprocess.Popen[bytes]) -> int:
    """Until it is over. Its peak resident set in bytes."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"exit {process.returncode} of the measured process")
    kilobyte = 1 if sys.platform == "darwin" else 1024
    return usage.ru_maxrss * kilobyte


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
    memory = {
        "bench": "memory",
        "model": MODEL,
        "dtype": "bfloat16",
        "pool_tokens": POOL_TOKENS,
        "peak_gb": round(fill_pool() / 1e9, 3),
    }
    print(json.dumps(memory), flush=True)


if __name__ == "__main__":
    main()
