"""Change the core's code a little, many times, and see whether its tests notice.

    make mutants                             all of kv, sched and engine; takes hours
    make mutants ARGS="--file '*/tree.rs'"   a part; further arguments go to cargo-mutants

Prints how many changes were caught and compares those that survived with ``docs/mutants.md``, which
gives a reason for each. Fails below 90 % caught, or if a survivor is not listed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
TOOLS = REPOSITORY / "target" / "tools"
OUTPUT = REPOSITORY / "target" / "mutants"
SURVIVORS = REPOSITORY / "docs" / "mutants.md"
VERSION = "27.1.0"
MUTATED = ("fastserve-kv", "fastserve-sched", "fastserve-engine")
# The simulator's tests are the core's tests too.
TESTED = (*MUTATED, "fastserve-sim")
MIN_CAUGHT_PERCENT = 90


def main() -> int:
    """Run, summarise, compare. Returns the process's exit status."""
    environment = install()
    command = ["cargo", "mutants", "--output", str(OUTPUT), "--no-times", "--colors", "never"]
    command += [part for name in MUTATED for part in ("--package", name)]
    command += [part for name in TESTED for part in ("--test-package", name)]
    command += ["--cap-lints", "true", "--jobs", str(max(1, (os.cpu_count() or 1) // 2))]
    status = subprocess.run([*command, *sys.argv[1:]], cwd=REPOSITORY, env=environment, check=False)
    # 2: some mutants survived; 3: some timed out. Anything else and there is nothing to count.
    if status.returncode not in (0, 2, 3):
        return status.returncode
    return summarise(partial=len(sys.argv) > 1)


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


def outcomes(name: str) -> list[str]:
    """The mutants of one outcome as ``file: change``, without line numbers, which drift."""
    path = OUTPUT / "mutants.out" / f"{name}.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return sorted(re.sub(r"^(\S+?\.rs):\d+:\d+: ", r"\1: ", line) for line in lines)


def listed() -> set[str]:
    """The survivors that ``docs/mutants.md`` gives a reason for."""
    text = SURVIVORS.read_text() if SURVIVORS.exists() else ""
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| .+ \|$", text, re.MULTILINE)
    return {f"{file}: {change}" for file, change in rows}


def summarise(*, partial: bool) -> int:
    """Print the counts and every difference from the list of survivors."""
    caught, missed, timeout = outcomes("caught"), outcomes("missed"), outcomes("timeout")
    tested = len(caught) + len(missed) + len(timeout)
    if not tested:
        print("no mutant was tested")
        return 1
    # A change that makes the tests hang was noticed.
    percent = 100 * (len(caught) + len(timeout)) / tested
    print(
        f"{tested} mutants: {len(caught)} caught, {len(timeout)} made the tests hang, "
        f"{len(missed)} survived ({percent:.1f} % caught)"
    )
    known = listed()
    unlisted = [line for line in missed if line not in known]
    for line in unlisted:
        print(f"survived, and docs/mutants.md gives no reason: {line}")
    if not partial:
        for line in sorted(known - set(missed)):
            print(f"in docs/mutants.md, but it is caught or gone: {line}")
    return 1 if unlisted or percent < MIN_CAUGHT_PERCENT else 0


if __name__ == "__main__":
    sys.exit(main())
