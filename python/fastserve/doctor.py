"""What this machine and this installation can do, and what is wrong with them.

:func:`examine` looks; it needs no model. What it finds is plain text in sections, so that it can be
printed, or sent along with a bug report as JSON.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fastserve import _core, host
from fastserve.extras import BASE, how_to_install, missing
from fastserve.kernels.pool import ISA_VARIABLE

__all__ = ["Report", "Section", "examine"]

_GIB = 2**30

# Flags of /proc/cpuinfo that say which kernels can run, by the name that people know.
_INSTRUCTION_SETS = {
    "avx": "AVX",
    "avx2": "AVX2",
    "fma": "FMA",
    "avx512f": "AVX-512F",
    "avx512bw": "AVX-512BW",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx_tile": "AMX",
    "amx_bf16": "AMX-BF16",
    "asimd": "NEON",
    "bf16": "BF16",
    "sve": "SVE",
}
_PURPOSES = {"server": "for fastserve serve"}
_LIBRARIES = ("fastapi", "uvicorn")


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and its lines."""

    title: str
    lines: tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Report:
    """What was found.

    Attributes:
        sections: In the order to be printed.
        problems: One sentence each, with the remedy. Empty if all is well.
    """

    sections: list[Section] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        found: dict[str, object] = {section.title: dict(section.lines) for section in self.sections}
        return {**found, "problems": self.problems}


def examine() -> Report:
    """Look at everything."""
    report = Report()
    for title, look in (
        ("versions", _versions),
        ("processor", _processor),
        ("memory", _memory),
        ("number formats", _formats),
        ("models", _models),
    ):
        report.sections.append(Section(title, tuple(look(report.problems))))
    report.problems.extend(_strangers())
    return report


def _versions(problems: list[str]) -> Iterator[tuple[str, str]]:
    yield "fastserve", f"{_core.__version__} ({Path(__file__).parent})"
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}"
    found = {name: _version(name) for name in (*BASE, *_LIBRARIES)}
    yield "libraries", ", ".join(f"{name} {version}" for name, version in found.items() if version)
    lost = [name for name in BASE if found[name] is None]
    if lost:
        problems.append(f"not installed: {', '.join(lost)}; pip install {' '.join(lost)}")
    for extra, purpose in _PURPOSES.items():
        optional = f"optional, {purpose}: {how_to_install(extra)}"
        yield f"extra {extra}", optional if missing(extra) else "installed"


def _processor(problems: list[str]) -> Iterator[tuple[str, str]]:
    cpu, cpus = _cpuinfo(), host.cpus()
    yield "name", cpu.get("model name", platform.processor() or "unknown")
    flags = cpu.get("flags", cpu.get("Features", "")).split()
    sets = [name for flag, name in _INSTRUCTION_SETS.items() if flag in flags]
    yield "instruction sets", ", ".join(sets) or "none that matter"
    available = _core.cpu.available_isas()
    chosen = os.environ.get(ISA_VARIABLE)
    path = _kernels()
    notes = [f"chosen by {ISA_VARIABLE}"] if chosen else []
    if path not in available:
        problems.append(f"{ISA_VARIABLE}={chosen}: this machine has {', '.join(available)}")
        path, notes = "none", [f"{ISA_VARIABLE}={chosen} is not built"]
    if others := [isa for isa in available if isa != path]:
        notes.append(f"also built: {', '.join(others)}")
    yield "kernels", f"{path} ({'; '.join(notes)})" if notes else path
    yield "cores", f"{cpus.num_online} online, {cpus.num_allowed} allowed to this process"
    quota = "none" if cpus.quota is None else f"{cpus.quota:g} cores"
    yield "container limit", quota
    yield "threads", f"{cpus.num_usable} (--num-threads)"


def _kernels() -> str:
    """The instruction set that kernels use: what is asked for, or the best there is."""
    return os.environ.get(ISA_VARIABLE) or _core.cpu.detect_isa()


def _memory(problems: list[str]) -> Iterator[tuple[str, str]]:
    memory = host.memory()
    yield "total", f"{memory.total_bytes / _GIB:.1f} GiB"
    yield "available", f"{memory.available_bytes / _GIB:.1f} GiB"
    limit = memory.limit_bytes
    yield "container limit", "none" if limit is None else f"{limit / _GIB:.1f} GiB"
    yield "process limits", _process_limits()
    yield "default KV cache", f"up to {memory.available_bytes / 4 / _GIB:.1f} GiB (--num-blocks)"
    if memory.available_bytes < _GIB:
        problems.append(
            f"{memory.available_bytes / _GIB:.1f} GiB of memory is available; "
            "smollm2 takes about 1 GiB"
        )


def _formats(problems: list[str]) -> Iterator[tuple[str, str]]:
    from fastserve.models.tensors import COMMON_FORMATS

    yield "float32", "computed natively"
    yield (
        "bfloat16",
        "matrix products natively, attention and the rest through float32"
        if _kernels().endswith("bf16")
        else "computed through float32: no AVX-512 BF16 here",
    )
    kept = [name for name in COMMON_FORMATS if name not in ("F32", "F16", "BF16")]
    yield "file formats", f"{', '.join(kept)}: multiplied as they are; others become float32"
    yield "int8, int4", "weights of any format, quantized when they are loaded (--quantization)"
    yield "KV cache", "float32, bfloat16, int8 with a scale per token and head (--kv-cache-dtype)"


def _models(problems: list[str]) -> Iterator[tuple[str, str]]:
    from fastserve.errors import ModelError
    from fastserve.models.resolve import BUILT_IN, BUILT_IN_REMEDY, has_built_in, resolve

    if not has_built_in():
        yield BUILT_IN, f"optional, a model that needs no hub: {BUILT_IN_REMEDY}"
    else:
        try:
            yield BUILT_IN, str(resolve(BUILT_IN).path)
        except ModelError as error:
            yield BUILT_IN, "broken"
            problems.append(str(error))
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    yield "hub", "offline (HF_HUB_OFFLINE)" if offline else "asked for ids that are not cached"


def _strangers() -> Iterator[str]:
    """Other packages called ``fastserve`` that may be taken for this one."""
    ours = Path(__file__).resolve().parent
    remedy = (
        f"pip uninstall fastserve, then install {_core.DISTRIBUTION}'s wheel again with "
        "pip install --force-reinstall"
    )
    for name in sorted(set(importlib.metadata.packages_distributions().get("fastserve", ()))):
        if name.lower().replace("_", "-") != _core.DISTRIBUTION:
            yield f"another project's distribution {name!r} has the same import name; {remedy}"
    for entry in sys.path:
        folder = Path(entry or ".") / "fastserve"
        for found in (folder / "__init__.py", folder.with_suffix(".py")):
            if found.is_file() and found.resolve().parent != ours:
                yield f"{found} can be imported instead of {ours}; rename it, or leave that folder"


def _cpuinfo() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo; empty where there is no such file."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _process_limits() -> str:
    """Limits that the shell sets (``ulimit``) and that loading a model can meet."""
    try:
        import resource
    except ImportError:
        return "unknown"
    found = []
    for name, kind in (("address space", resource.RLIMIT_AS), ("data", resource.RLIMIT_DATA)):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            found.append(f"{name} {soft / _GIB:.1f} GiB")
    return ", ".join(found) or "none"


def _version(name: str) -> str | None:
    """Of a distribution that can be imported, ``None`` if it cannot."""
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
