"""The machine: its name, and what it does at the moment (``machine.c``)."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path

from peers.reference import Rates

_SOURCE = Path(__file__).with_name("machine.c")
_FLAGS = ("-O3", "-march=native", "-pthread")


class Machine:
    """Measures what `num_threads` threads of this machine do.

    Args:
        folder: Where the probe is built.
        num_threads: Threads that every engine gets.
    """

    def __init__(self, folder: Path, num_threads: int) -> None:
        self._num_threads = num_threads
        self._probe = folder / "machine"
        if not self._probe.exists() or self._probe.stat().st_mtime < _SOURCE.stat().st_mtime:
            folder.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cc", *_FLAGS, str(_SOURCE), "-o", str(self._probe)], check=True)

    def rates(self) -> Rates:
        """Measure now; takes about a second of an idle machine."""
        command = [str(self._probe), str(self._num_threads)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return Rates(**json.loads(done.stdout))


def name() -> str:
    """Processor and number of cores, without the marks of its maker."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {_instructions()}"


def _instructions() -> str:
    """The widest instructions that matter here."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "unknown instructions"
    flags = set(text.partition("\nflags")[2].partition("\n")[0].split())
    known = {
        "amx_bf16": "AMX-BF16",
        "avx512_bf16": "AVX-512 BF16",
        "avx512f": "AVX-512",
        "avx2": "AVX2",
    }
    return next((title for flag, title in known.items() if flag in flags), "neither AVX2 nor more")


def commit(repository: Path) -> str:
    """The commit of the tree that is measured, ``-dirty`` where it was changed since."""
    command = ["git", "-C", str(repository), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
