"""Change the core's code a little, many times, and see whether its tests notice.

    make mutants                             all of kv, sched and engine; takes hours
    make mutants ARGS="--shard 0/8"          an eighth of them
    make mutants ARGS="--file '*/tree.rs'"   a part; further arguments go to cargo-mutants

Each change meets the tests of its own crate first. Those that survive meet the simulator, whose
tests are the core's too and take longer. Prints how many were caught and compares those that
survived both with ``docs/mutants.md``, which gives a reason for each. Fails below 90 % caught, or
if a survivor is not listed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
TOOLS = REPOSITORY / "target" / "tools"
OUTPUT = REPOSITORY / "target" / "mutants"
SURVIVORS = REPOSITORY / "docs" / "mutants.md"
VERSION = "27.1.0"
MUTATED = ("fastserve-kv", "fastserve-sched", "fastserve-engine")
SIMULATOR = "fastserve-sim"
TIMEOUT_S = 60
SIMULATOR_TIMEOUT_S = 120
MIN_CAUGHT_PERCENT = 90
OUTCOMES = ("caught", "missed", "timeout", "unviable")


def main() -> int:
    """Run, summarise, compare. Returns the process's exit status."""
    environment = install()
    counts: Counter[str] = Counter()
    survivors: list[str] = []
    for package in MUTATED:
        found = mutate(package, package, sys.argv[1:], environment)
        # A change that makes the tests hang was noticed.
        counts["caught"] += len(found["caught"]) + len(found["timeout"])
        if not found["missed"]:
            continue
        exactly = "|".join(re.escape(name) for name in found["missed"])
        again = mutate(package, SIMULATOR, ["--re", f"^({exactly})$"], environment)
        # cargo-mutants deletes fields of struct expressions whatever --re says.
        again = {name: [m for m in again[name] if m in found["missed"]] for name in again}
        counts["caught by the simulator"] += len(again["caught"]) + len(again["timeout"])
        survivors += again["missed"]
    return summarise(counts, survivors, partial=len(sys.argv) > 1)


def mutate(
    package: str, tests: str, arguments: list[str], environment: dict[str, str]
) -> dict[str, list[str]]:
    """Mutants of one package against the tests of some. Returns their names by outcome."""
    command = ["cargo", "mutants", "--output", str(OUTPUT), "--no-times", "--colors", "never"]
    command += ["--package", package, "--cap-lints", "true"]
    if "--shard" in arguments:  # Through all files, rather than a file at a time.
        command += ["--sharding", "round-robin"]
    # Two changes at a time fill a machine that links for half of the time.
    command += ["--jobs", str(max(1, len(os.sched_getaffinity(0))))]
    # A test that takes as long counts as hanging: many times what it takes on a busy machine.
    command += ["--timeout", str(SIMULATOR_TIMEOUT_S if tests == SIMULATOR else TIMEOUT_S)]
    if tests == SIMULATOR:
        command += [
            "--baseline",
            "skip",
        ]  # The baseline is of the package's own tests, and was run.
    command += ["--test-package", tests, *arguments]
    # Documentation examples take as long to link as all other tests together. Of the simulator,
    # half of the seeds with 1, 2 and 4 steps in flight.
    targets = ["--test", "seeds"] if tests == SIMULATOR else ["--lib", "--tests"]
    command += [f"--cargo-arg={target}" for target in targets]
    if tests == SIMULATOR:
        command += ["--", "seeds_0_to_249"]
    # The engine's own tests take less time to run than to optimise, unlike all others.
    optimise = {"CARGO_PROFILE_TEST_OPT_LEVEL": "0" if tests == "fastserve-engine" else "1"}
    print(f"{package}, by the tests of {tests}", flush=True)
    status = subprocess.run(
        command, cwd=REPOSITORY, env=environment | optimise, check=False
    ).returncode
    # 2: some mutants survived; 3: some timed out. Anything else and there is nothing to count.
    if status not in (0, 2, 3):
        sys.exit(status)
    return {name: outcome(name) for name in OUTCOMES}


def install() -> dict[str, str]:
    """Install cargo-mutants below target/ unless it is there. Returns the environment to use."""
    path = f"{TOOLS / 'bin'}{os.pathsep}{os.environ['PATH']}"
    if shutil.which("cargo-mutants", path=path) is None:
        print(
            f"Installing cargo-mutants {VERSION} into {TOOLS.relative_to(REPOSITORY)}", flush=True
        )
        command = ["cargo", "install", "--quiet", "--locked", "--root", str(TOOLS)]
        subprocess.run([*command, "cargo-mutants", "--version", VERSION], check=True)
    # No debug information: half of the time would go into writing it.
    return os.environ | {
        "PATH": path,
        "CARGO_PROFILE_DEV_DEBUG": "0",
        "CARGO_PROFILE_TEST_DEBUG": "0",
    }


def outcome(name: str) -> list[str]:
    """The mutants of one outcome of the last run."""
    path = OUTPUT / "mutants.out" / f"{name}.txt"
    return path.read_text().splitlines() if path.exists() else []


def without_place(name: str) -> str:
    """``file: change``, without line numbers, which drift."""
    return re.sub(r"^(\S+?\.rs):\d+:\d+: ", r"\1: ", name)


def listed() -> set[str]:
    """The survivors that ``docs/mutants.md`` gives a reason for."""
    text = SURVIVORS.read_text() if SURVIVORS.exists() else ""
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| .+ \|$", text, re.MULTILINE)
    return {f"{file}: {change}" for file, change in rows}


def summarise(counts: Counter[str], survivors: list[str], *, partial: bool) -> int:
    """Print the counts and every difference from the list of survivors."""
    tested = counts.total() + len(survivors)
    if not tested:
        print("no mutant was tested")
        return 1
    percent = 100 * counts.total() / tested
    print(
        f"{tested} mutants: {counts['caught']} caught by the tests of their crate, "
        f"{counts['caught by the simulator']} by the simulator, "
        f"{len(survivors)} survived ({percent:.1f} % caught)"
    )
    known = listed()
    unlisted = [name for name in survivors if without_place(name) not in known]
    for name in unlisted:
        print(f"survived, and docs/mutants.md gives no reason: {name}")
    if not partial:
        for line in sorted(known - {without_place(name) for name in survivors}):
            print(f"in docs/mutants.md, but it is caught or gone: {line}")
    return 1 if unlisted or percent < MIN_CAUGHT_PERCENT else 0


if __name__ == "__main__":
    sys.exit(main())
