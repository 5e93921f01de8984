"""All engines in turn: round 1 of each, then round 2, so that the machine's moods hit all alike."""

from __future__ import annotations

import ctypes.util
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers import machine, workloads
from peers.environments import Environments, SetUpError
from peers.load import MAX_OTHER_CORES, wait_until_quiet
from peers.measures import measure
from peers.models import Models
from peers.reference import Rates
from peers.session import EngineError, Session, package_path
from peers.settings import PEERS, Peer, Setting

REPOSITORY = Path(__file__).resolve().parents[2]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run.

    Attributes:
        engines: Keys of ``settings.PEERS``.
        work: Keys of ``workloads.WORKLOADS``.
        num_rounds: Medians are of so many.
        model: One of ``models.MODELS``.
        precision: ``bf16`` or ``int8``.
        rates: W5's requests a second.
        span_s: W5's length in seconds.
        num_threads: For every engine.
        scale: Below 1 a trial: shorter workloads, no claims.
        patience_s: How long a run waits for a quiet machine.
    """

    engines: list[str]
    work: list[str]
    num_rounds: int
    model: str
    precision: str
    rates: list[float]
    span_s: float
    num_threads: int
    scale: float
    patience_s: float


class Driver:
    """Runs a plan and gives a row for each run, which it also appends to a file.

    Args:
        plan: What to run.
        folder: Environments, models, logs and results.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._environments = Environments(folder, Path(sys.executable))
        self._models = Models(folder / "models", self._environments)
        self._machine = machine.Machine(folder, plan.num_threads)
        self._common = {
            "machine": machine.name(),
            "commit": machine.commit(REPOSITORY),
            "model": plan.model,
            "precision": plan.precision,
            "num_threads": plan.num_threads,
            "scale": plan.scale,
        }
        # Without instructions for bfloat16, torch multiplies it many times slower than float32.
        self._multiplies_bf16 = self._machine.rates().is_like_the_table
        self.missing: dict[str, str] = {}
        """Engines that cannot be run here, with the reason."""

    def rows(self) -> Iterator[Row]:
        """Set everything up, then run. An engine that fails is left out from then on."""
        jobs = self._prepared()
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "results.jsonl").open("a") as results:
            for number in range(self._plan.num_rounds):
                for peer, setting, work in jobs:
                    if peer.name in self.missing:
                        continue
                    for row in self._process(peer, setting, work, number):
                        results.write(json.dumps(row) + "\n")
                        results.flush()
                        yield row

    def _prepared(self) -> list[tuple[Peer, Setting, list[str]]]:
        """Engines with their workloads, one entry a process; everything they need is there."""
        jobs = []
        for name in self._plan.engines:
            peer = PEERS[name]
            try:
                self._options(peer, peer.settings[0])
                self._environments.python(peer.adapter)
            except (SetUpError, OSError) as error:
                self._leave_out(name, str(error))
                continue
            for setting in peer.settings:
                work = [w for w in self._plan.work if peer.setting(w) is setting]
                if work:
                    jobs.append((peer, setting, work))
        return jobs

    def _options(self, peer: Peer, setting: Setting) -> dict[str, Any]:
        precision = peer.precisions.get(self._plan.precision)
        if precision is None:
            raise SetUpError(f"has no {self._plan.precision}")
        options = {
            "model": str(self._models.path(self._plan.model, peer.adapter, precision)),
            "precision": precision,
            "threads": self._plan.num_threads,
            "dtype": "bfloat16" if self._multiplies_bf16 else "float32",
            **setting.options,
        }
        if peer.adapter == "llama":
            options["binary"] = str(self._environments.llama_binary("llama-server"))
            options["source"] = self._environments.llama_version
        return options

    def _process(self, peer: Peer, setting: Setting, work: list[str], number: int) -> Iterator[Row]:
        """One process of an engine, through its workloads; a new one after a run that timed out."""
        left = [
            (name, rate) for name in work for rate in (self._plan.rates if name == "W5" else [0.0])
        ]
        while left:
            wait_until_quiet(self._plan.patience_s)
            rates = self._machine.rates()
            log = self._environments.logs / f"engine-{peer.name}.log"
            python = self._environments.python(peer.adapter)
            variables = self._variables(peer, setting, python)
            try:
                with Session(
                    python, peer.adapter, self._options(peer, setting), variables, log
                ) as session:
                    while left:
                        row = self._run(session, peer, *left.pop(0), number, rates)
                        yield row
                        if any(problem.startswith("timeout") for problem in row["problems"]):
                            break
            except EngineError as error:
                self._leave_out(peer.name, str(error))
                return

    def _run(
        self, session: Session, peer: Peer, name: str, rate: float, number: int, rates: Rates
    ) -> Row:
        requests = workloads.build(
            name, 100 + number, rate=rate, span_s=self._plan.span_s, scale=self._plan.scale
        )
        wait_until_quiet(self._plan.patience_s)
        before, begin_s = session.cpu_time(), time.monotonic()
        done = session.run(requests, workloads.WORKLOADS[name].timeout_s)
        now, span_s = session.cpu_time(), time.monotonic() - begin_s
        other_cores = now.other_cores(before, span_s)
        return {
            **self._common,
            "engine": peer.name,
            "version": session.version,
            "workload": name,
            "rate": rate,
            "round": number,
            **measure(name, requests, done),
            "first_token_s": session.first_token_s,
            "peak_bytes": session.peak_bytes(),
            "own_cores": now.own_cores(before, span_s),
            "other_cores": other_cores,
            "disturbed": other_cores > MAX_OTHER_CORES,
            "problems": done.problems[:3],
            **asdict(rates),
        }

    def _variables(self, peer: Peer, setting: Setting, python: Path) -> dict[str, str]:
        """The environment of the process: same threads for everybody, no search for models."""
        paths = [package_path()]
        variables = dict(setting.environment)
        if peer.adapter == "fastserve":
            paths.append(str(REPOSITORY / "python"))
        else:
            variables["OMP_NUM_THREADS"] = str(self._plan.num_threads)
        if peer.adapter == "vllm":
            cores = sorted(os.sched_getaffinity(0))[: self._plan.num_threads]
            variables["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
            variables["LD_PRELOAD"] = os.pathsep.join(_preloaded(python))
        variables["PYTHONPATH"] = os.pathsep.join(paths)
        return variables

    def _leave_out(self, name: str, reason: str) -> None:
        self.missing[name] = reason
        print(f"peers: {name} is left out: {reason}", file=sys.stderr, flush=True)


def _preloaded(python: Path) -> list[str]:
    """Libraries that vLLM's guide asks to preload; those that are not here are left out."""
    found = [ctypes.util.find_library("tcmalloc_minimal")]
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    return [name for name in (*found, str(openmp) if openmp.exists() else None) if name]
