"""Who uses the processor, and how much memory a process and its children take: from ``/proc``."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

MAX_OTHER_CORES = 0.12
"""A run during which other programs used more than this is disturbed."""

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class CpuTime:
    """CPU seconds so far.

    Attributes:
        busy_s: Of the whole machine, time that the hypervisor gave to others included.
        own_s: Of a process and its living and ended descendants.
    """

    busy_s: float
    own_s: float

    def other_cores(self, earlier: CpuTime, span_s: float) -> float:
        """Cores that others used on average since `earlier`, `span_s` seconds ago."""
        own_s = self.own_s - earlier.own_s
        return max(0.0, self.busy_s - earlier.busy_s - own_s) / span_s

    def own_cores(self, earlier: CpuTime, span_s: float) -> float:
        """Cores that the process and its descendants used on average."""
        return (self.own_s - earlier.own_s) / span_s


def cpu_time(root: int) -> CpuTime:
    """Read the clocks of the machine and of the process `root`."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    line = (_PROC / "stat").read_text().partition("\n")[0]
    ticks = dict(zip(names, map(int, line.split()[1:9]), strict=True))
    busy = sum(ticks.values()) - ticks["idle"] - ticks["iowait"]
    own = sum(sum(map(int, fields[11:15])) for fields in map(_stat, family(root)) if fields)
    return CpuTime(busy / _TICKS_PER_S, own / _TICKS_PER_S)


def peak_bytes(root: int) -> int:
    """Sum of the largest resident sets of a process and its living descendants, each at its time.

    Pages that several share count several times.
    """
    total = 0
    for pid in family(root):
        for line in _read(pid, "status").splitlines():
            if line.startswith("VmHWM:"):
                total += int(line.split()[1]) * 1024
    return total


def family(root: int) -> list[int]:
    """A process and its living descendants."""
    parents = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            parents[int(entry.name)] = int(fields[1])
    found = [root]
    for pid in found:  # Grows while it is gone through.
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def wait_until_quiet(patience_s: float) -> None:
    """Wait until other programs leave the cores alone, at most `patience_s`."""
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        before = cpu_time(os.getpid())
        time.sleep(0.5)
        if cpu_time(os.getpid()).other_cores(before, 0.5) < MAX_OTHER_CORES / 2:
            return


def _stat(pid: int) -> list[str]:
    """Fields of ``/proc/PID/stat`` after the name, which may have spaces; none of what is gone."""
    return _read(pid, "stat").rpartition(")")[2].split()


def _read(pid: int, name: str) -> str:
    try:
        return (_PROC / str(pid) / name).read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
