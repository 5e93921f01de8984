"""Cores and memory, read from folders that imitate a machine and its control groups."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from fastserve import host

MEMINFO = "MemTotal:       16777216 kB\nMemFree:  1024 kB\nMemAvailable:    8388608 kB\n"
GIB = 2**30


def machine(root: Path, cgroup_line: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A machine of 16 GiB, 8 available, whose process is in the group that `cgroup_line` says."""
    proc, cgroup = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(MEMINFO)
    (proc / "self" / "cgroup").write_text(cgroup_line)
    for name, text in files.items():
        path = cgroup / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, cgroup


def test_without_a_control_group_the_machine_is_the_limit(tmp_path: Path) -> None:
    memory = host.memory(*machine(tmp_path, "0::/\n", {}))
    assert memory == host.Memory(total_bytes=16 * GIB, available_bytes=8 * GIB, limit_bytes=None)


def test_the_smallest_limit_on_the_path_counts(tmp_path: Path) -> None:
    files = {
        "pod/box/memory.max": "max",
        "pod/box/memory.current": "0",
        "pod/memory.max": str(4 * GIB),
        "pod/memory.current": str(3 * GIB),
        "pod/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        "pod/box/cpu.max": "max 100000",
        "pod/cpu.max": "150000 100000",
    }
    folders = machine(tmp_path, "0::/pod/box\n", files)
    # 4 GiB granted, 3 used, of which 1 is file cache that the kernel gives back.
    assert host.memory(*folders) == host.Memory(
        total_bytes=16 * GIB, available_bytes=2 * GIB, limit_bytes=4 * GIB
    )
    assert host.cpus(*folders).quota == 1.5


def test_version_one_groups(tmp_path: Path) -> None:
    files = {
        "memory/box/memory.limit_in_bytes": str(2 * GIB),
        "memory/box/memory.usage_in_bytes": str(GIB),
        "memory/memory.limit_in_bytes": "9223372036854771712",  # what version 1 says for no limit
        "cpu/box/cpu.cfs_quota_us": "-1",
        "cpu/box/cpu.cfs_period_us": "100000",
        "cpu/cpu.cfs_quota_us": "50000",
        "cpu/cpu.cfs_period_us": "100000",
    }
    lines = "4:memory:/box\n1:cpu,cpuacct:/box\n9:name=systemd:/\n"
    folders = machine(tmp_path, lines, files)
    assert host.memory(*folders).limit_bytes == 2 * GIB
    assert host.memory(*folders).available_bytes == GIB
    assert host.cpus(*folders).quota == 0.5


def test_a_share_of_a_core_still_runs_one_thread() -> None:
    cpus = host.Cpus(num_online=64, num_allowed=8, quota=0.5)
    assert cpus.num_usable == 1
    assert host.Cpus(num_online=64, num_allowed=8, quota=2.6).num_usable == 3
    assert host.Cpus(num_online=64, num_allowed=8, quota=None).num_usable == 8


def test_this_machine_has_something() -> None:
    memory = host.memory()
    assert 0 < memory.available_bytes <= memory.total_bytes
    assert 1 <= host.cpus().num_usable <= host.cpus().num_online


def test_a_limit_of_the_address_space_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``ulimit -v``: what the process has already is gone from it."""
    proc, cgroup = machine(tmp_path, "0::/\n", {})
    (proc / "self" / "statm").write_text(f"{GIB // resource.getpagesize()} 5 5 5 0 5 0\n")
    for limit, left in ((3 * GIB, 2 * GIB), (GIB // 2, 0), (20 * GIB, 8 * GIB)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        assert host.memory(proc, cgroup).available_bytes == left
