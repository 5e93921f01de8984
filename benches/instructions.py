"""Instructions of a step: plan + commit, exactly, whatever else the machine does.

    make bench-core ARGS=instructions
    python benches/instructions.py --rows 4096 --context 1024

Runs the ``step`` bench below valgrind twice, with different numbers of steps; the difference of
the two counts is the additional steps' alone. One JSON line a case. Without valgrind there is
nothing to count with, and a line on stderr says so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CASES = [(64, 1024), (64, 8192), (256, 1024), (1024, 1024)]
FEW, MANY = 100, 300
MEASURED = "*plan_and_commit*"


def main() -> int:
    """Count for the cases asked for. Returns the process's exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, choices=(64, 256, 1024, 4096))
    parser.add_argument("--context", type=int, choices=(1024, 8192, 32768), default=1024)
    arguments = parser.parse_args()
    if shutil.which("valgrind") is None:
        print("instructions: no valgrind here (Debian: apt install valgrind)", file=sys.stderr)
        return 0
    bench = build()
    cases = [(arguments.rows, arguments.context)] if arguments.rows else CASES
    for rows, context in cases:
        few, many = (count(bench, rows, context, steps) for steps in (FEW, MANY))
        instructions = (many - few) / (MANY - FEW)
        record = {
            "bench": "step_instructions",
            "rows": rows,
            "context": context,
            "instructions": round(instructions),
            "per_row": round(instructions / rows, 1),
        }
        print(json.dumps(record), flush=True)
    return 0


def build() -> Path:
    """Build the step bench. Returns its executable."""
    command = ["cargo", "bench", "--quiet", "--package", "fastserve", "--bench", "step"]
    command += ["--no-run", "--message-format=json"]
    lines = subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True)
    built = [json.loads(line) for line in lines.stdout.splitlines()]
    return Path(next(item["executable"] for item in built if item.get("executable")))


def count(bench: Path, rows: int, context: int, steps: int) -> int:
    """Instructions of all steps of one run, those that prepare the load included."""
    command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={os.devnull}"]
    command += [f"--toggle-collect={MEASURED}", str(bench), "--bench"]
    command += ["--rows", str(rows), "--context", str(context), "--steps", str(steps)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    found = re.search(r"Collected : (\d+)", run.stderr)
    if found is None:
        raise RuntimeError(f"valgrind did not say what it counted: {run.stderr[-500:]}")
    return int(found[1])


if __name__ == "__main__":
    sys.exit(main())
