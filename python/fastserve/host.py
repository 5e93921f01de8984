"""The machine as this process may use it: cores and memory, container limits respected.

A container sees the whole machine in ``/proc`` and is killed for believing it. The limits that
count are the smallest along the path of its control group, version 2 or 1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Cpus", "Memory", "cpus", "memory"]

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory in bytes.

    Attributes:
        total_bytes: Of the machine.
        available_bytes: What can still be taken without swapping or being killed.
        limit_bytes: The control group's limit, ``None`` without one.
    """

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpus:
    """Cores, counted as hardware threads.

    Attributes:
        num_online: Of the machine.
        num_allowed: Those this process may run on (its affinity mask).
        quota: Cores' worth of time that the control group grants, ``None`` without a limit.
    """

    num_online: int
    num_allowed: int
    quota: float | None

    @property
    def num_usable(self) -> int:
        """How many threads of work make sense, at least 1."""
        if self.quota is None:
            return self.num_allowed
        return max(1, min(self.num_allowed, int(self.quota + 0.5)))


def memory(proc: Path = _PROC, cgroup: Path = _CGROUP) -> Memory:
    """Measure the memory now. The folders are arguments so that tests can bring their own."""
    total, available = _machine_memory(proc)
    limit = None
    for folder in _cgroup_folders(proc, cgroup, "memory"):
        for limit_name, usage_name, cache_key in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            group_limit = _number(folder / limit_name)
            if group_limit is None or group_limit >= total:
                continue
            limit = group_limit if limit is None else min(limit, group_limit)
            used = (_number(folder / usage_name) or 0) - _reclaimable(folder, cache_key)
            available = min(available, max(0, group_limit - max(0, used)))
    available = min(available, _address_space_left(proc, available))
    return Memory(total_bytes=total, available_bytes=available, limit_bytes=limit)


def _address_space_left(proc: Path, unlimited: int) -> int:
    """What ``ulimit -v`` leaves this process; `unlimited` where there is no such limit."""
    try:
        import resource
    except ImportError:
        return unlimited
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return unlimited
    num_pages = _text(proc / "self" / "statm").split()[:1]
    used = int(num_pages[0]) * resource.getpagesize() if num_pages else 0
    return max(0, soft - used)


def cpus(proc: Path = _PROC, cgroup: Path = _CGROUP) -> Cpus:
    """Count the cores now."""
    online = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else online
    quota = None
    for folder in _cgroup_folders(proc, cgroup, "cpu"):
        granted = _cpu_quota(folder)
        if granted is not None:
            quota = granted if quota is None else min(quota, granted)
    return Cpus(num_online=online, num_allowed=allowed, quota=quota)


def _machine_memory(proc: Path) -> tuple[int, int]:
    """Total and available bytes, as the kernel counts them."""
    fields = {}
    for line in _text(proc / "meminfo").splitlines():
        name, _, value = line.partition(":")
        number = value.split()[:1]
        if number and number[0].isdecimal():
            fields[name] = int(number[0]) * 1024
    if "MemTotal" in fields:
        return fields["MemTotal"], fields.get("MemAvailable", fields.get("MemFree", 0))
    # No /proc (macOS): the kernel does not say what is available, so take half.
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, total // 2


def _cgroup_folders(proc: Path, cgroup: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control group and those above it, lowest first."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroup / controller if controllers else cgroup
        folder = root / path.lstrip("/")
        while folder != root and root in folder.parents:
            yield folder
            folder = folder.parent
        yield root


def _cpu_quota(folder: Path) -> float | None:
    """Cores' worth of time that one group grants, ``None`` for no limit."""
    words = _text(folder / "cpu.max").split()
    if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal():
        return int(words[0]) / int(words[1])
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def _reclaimable(folder: Path, key: str) -> int:
    """Cached file pages of a group: counted as used, given back when memory is short."""
    for line in _text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.isdecimal():
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    """The non-negative number in a file; ``None`` for "max", -1 or no such file."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
