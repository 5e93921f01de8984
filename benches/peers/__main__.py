"""``python -m peers``: see ``--help``."""

from __future__ import annotations

import argparse
import signal
import sys

from peers import reference
from peers.driver import REPOSITORY, Driver, Plan, Row
from peers.models import MODELS
from peers.settings import DEFAULT_ENGINES, PEERS
from peers.summary import render, tabulate
from peers.workloads import WORKLOADS

FOLDER = REPOSITORY / "target" / "peers"
ABOUT = "Compare fastserve with other CPU engines on seeded workloads."
MORE = f"""
workloads:
{chr(10).join(f"  {w.name:4} {w.title}" for w in WORKLOADS.values())}

marks:
  ~ disturbed: other programs used the processor during every run of the cell.
  ! invalid: a peer is over 15 % slower than the reference table, scaled by the
    read bandwidth measured beside it ({reference.READ_GB_PER_S:.0f} GB/s in the table). It was
    probably set up badly; such a row is not won.
  ? unproven: the same on a processor without bfloat16 instructions. The table is
    from 2 cores of a Zen 5 with AVX-512 BF16, and bandwidth says nothing about
    products elsewhere: W3 is still scaled by bandwidth, W1, W2 and W4 by the
    float32 rate measured beside them against the table's bf16 rate
    ({reference.GFLOP_PER_S["bf16"]:.0f} GFLOP/s). A slower peer may then have slower kernels for
    these instructions, so its row is neither invalid nor proof.
  x incomplete: requests without all of their tokens.

Environments, models, logs and results.jsonl go to target/peers (about 15 GB with
all peers). torch comes in its CUDA build; PIP_EXTRA_INDEX_URL may name an index
that has builds for CPUs.
"""


def _list(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def parse(arguments: list[str]) -> Plan:
    """Read the command line. Ends the program where it is wrong."""
    parser = argparse.ArgumentParser(
        "make bench-peers",
        description=ABOUT,
        epilog=MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--engines", type=_list, default=[], help=f"of {', '.join(PEERS)}")
    parser.add_argument("--work", type=_list, default=["W1", "W2", "W3", "W4"], help="W1,W2,...")
    parser.add_argument("--runs", type=int, default=3, help="rounds; medians are of so many")
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--precision", choices=tuple(DEFAULT_ENGINES), default="bf16")
    parser.add_argument("--rates", type=_list, default=["1", "3", "6", "9"], help="W5, requests/s")
    parser.add_argument("--secs", type=float, default=30.0, help="W5's length")
    parser.add_argument("--threads", type=int, default=2, help="of every engine")
    parser.add_argument("--patience", type=float, default=25.0, help="seconds to wait for quiet")
    parser.add_argument("--scale", type=float, default=1.0, help="below 1: a trial, shows nothing")
    given = parser.parse_args(arguments)
    engines = given.engines or list(DEFAULT_ENGINES[given.precision])
    for names, known in ((engines, list(PEERS)), (given.work, list(WORKLOADS))):
        for name in names:
            if name not in known:
                parser.error(f"{name}: want some of {','.join(known)}")
    if given.runs < 1 or given.threads < 1 or not 0.0 < given.scale <= 1.0:
        parser.error("want --runs and --threads of at least 1, and --scale above 0 and up to 1")
    return Plan(
        engines=engines,
        work=given.work,
        num_rounds=given.runs,
        model=given.model,
        precision=given.precision,
        rates=[float(rate) for rate in given.rates],
        span_s=given.secs,
        num_threads=given.threads,
        scale=given.scale,
        patience_s=given.patience,
    )


def progress(row: Row) -> str:
    """One line for one run."""
    rate = f"@{row['rate']:g}" if row["rate"] else ""
    notes = ["disturbed"] if row["disturbed"] else []
    notes += row["problems"][:1]
    return (
        f"{row['round'] + 1}  {row['engine']:15}{row['workload'] + rate:6}"
        f"{row['wall_s'] or 0.0:7.1f} s {row['tokens_per_s'] or 0.0:7.1f} tok/s "
        f"{row['other_cores']:5.2f} other cores  {'; '.join(notes)}"
    )


def main() -> None:
    """Set up, run, print."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that engines are ended too.
    driver = Driver(parse(sys.argv[1:]), FOLDER)
    rows: list[Row] = []
    for row in driver.rows():
        rows.append(row)
        print(progress(row), file=sys.stderr, flush=True)
    for table in tabulate(rows):
        print(f"\n{render(table, driver.missing)}")
    if not rows:
        raise SystemExit("peers: nothing ran")
    print(f"\nRows are in {FOLDER / 'results.jsonl'}")


if __name__ == "__main__":
    main()
