"""Medians of runs, and a table of them for the terminal.

Disturbed runs are left out where an undisturbed one of the same kind exists. A cell's mark says
what is wrong with it; a marked cell is shown and claims nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from peers.reference import GFLOP_PER_S, READ_GB_PER_S, TOLERANCE, Rates, judge

Row: TypeAlias = Mapping[str, Any]

MARKS = {
    "incomplete": "x",
    "disturbed": "~",
    "invalid": "!",
    "unproven": "?",
    "": "",
}


@dataclass(frozen=True, slots=True)
class Column:
    """A number of the table.

    Attributes:
        title: First line of its head.
        unit: Second line.
        workload: Whose runs have it; empty for all runs.
        measure: Its key in a row.
        factor: From the row's unit to the table's.
        digits: After the point.
    """

    title: str
    unit: str
    workload: str
    measure: str
    factor: float = 1.0
    digits: int = 0

    @property
    def key(self) -> str:
        """Name of its cells in a file of medians."""
        return f"{self.workload or 'all'}.{self.measure}"


COLUMNS = (
    Column("W1", "tok/s", "W1", "tokens_per_s"),
    Column("W1S", "tok/s", "W1S", "tokens_per_s", digits=1),
    Column("W2", "s", "W2", "wall_s", digits=1),
    Column("W3", "ms/tok", "W3", "itl_mean_s", 1e3, 1),
    Column("W3", "TTFT ms", "W3", "ttft_p50_s", 1e3),
    Column("W4", "gap ms", "W4", "gap_worst_s", 1e3),
    Column("W4", "TTFT s", "W4", "long_ttft_s", digits=2),
    # Of a process, which has a row for each of its workloads; its memory only ever grows.
    Column("start", "s", "", "first_token_s", digits=1),
    Column("peak", "GB", "", "peak_bytes", 1e-9, 2),
)
ONLINE = (
    Column("TTFT", "p50 ms", "W5", "ttft_p50_s", 1e3),
    Column("TTFT", "p99 ms", "W5", "ttft_p99_s", 1e3),
    Column("TPOT", "p50 ms", "W5", "tpot_p50_s", 1e3, 1),
    Column("TPOT", "p99 ms", "W5", "tpot_p99_s", 1e3, 1),
    Column("good", "req/s", "W5", "goodput_per_s", digits=2),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """A median.

    Attributes:
        value: In the row's unit.
        num_runs: Of how many runs.
        mark: A key of :data:`MARKS`.
        expected: What the reference says, scaled to this machine; ``None`` where it says nothing.
    """

    value: float
    num_runs: int
    mark: str = ""
    expected: float | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """Medians of one model at one precision on one machine.

    Attributes:
        about: Machine, commit, model, precision, threads, scale, rounds and rates.
        versions: By engine, in the order in which they ran.
        cells: By engine and key of a column; W5's keys end with ``@`` and the rate.
    """

    about: dict[str, Any]
    versions: dict[str, str]
    cells: dict[str, dict[str, Cell]]

    def as_json(self) -> dict[str, Any]:
        """Plain data, as :meth:`from_json` takes it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Table:
        """Undo :meth:`as_json`."""
        cells = {
            engine: {key: Cell(**cell) for key, cell in row.items()}
            for engine, row in data["cells"].items()
        }
        return cls(dict(data["about"]), dict(data["versions"]), cells)

    @property
    def w5_rates(self) -> list[float]:
        """Requests a second of the W5 runs."""
        keys = {key for row in self.cells.values() for key in row if "@" in key}
        return sorted({float(key.partition("@")[2]) for key in keys})


GROUPED_BY = ("machine", "commit", "model", "precision", "num_threads", "scale")


def tabulate(rows: Sequence[Row]) -> list[Table]:
    """One table for each machine, commit, model, precision, number of threads and scale."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in GROUPED_BY), []).append(row)
    return [_table(dict(zip(GROUPED_BY, key, strict=True)), group) for key, group in groups.items()]


def _table(about: dict[str, Any], rows: Sequence[Row]) -> Table:
    versions: dict[str, str] = {}
    for row in rows:
        versions[row["engine"]] = row["version"]
    about["num_rounds"] = len({row["round"] for row in rows})
    about["read_gb_per_s"] = _median(row["read_gb_per_s"] for row in rows)
    about["gflop_per_s"] = _median_rates(rows)
    cells: dict[str, dict[str, Cell]] = {}
    for engine in versions:
        mine = [row for row in rows if row["engine"] == engine]
        found = {column.key: _cell(column, mine) for column in COLUMNS}
        for rate in sorted({row["rate"] for row in mine if row["workload"] == "W5"}):
            same = [row for row in mine if row["rate"] == rate]
            found |= {f"{column.key}@{rate:g}": _cell(column, same) for column in ONLINE}
        cells[engine] = {key: cell for key, cell in found.items() if cell is not None}
    return Table(about, versions, cells)


def _cell(column: Column, rows: Iterable[Row]) -> Cell | None:
    runs = [
        row
        for row in rows
        if column.workload in ("", row["workload"]) and row.get(column.measure) is not None
    ]
    if not runs:
        return None
    clean = [row for row in runs if not row["disturbed"]]
    used = clean or runs
    if not column.workload:
        used = _largest_of_each_round(runs, column.measure)
    value = statistics.median(row[column.measure] for row in used)
    incomplete = any(row["num_tokens"] != row["num_wanted_tokens"] for row in used)
    mark, expected = "" if clean else "disturbed", None
    if column.workload:
        first = used[0]
        rates = Rates(
            read_gb_per_s=_median(row["read_gb_per_s"] for row in used),
            gflop_per_s=_median_rates(used),
        )
        key = (first["model"], first["precision"], first["engine"])
        if first["scale"] == 1.0:
            verdict = judge(key, column.workload, column.measure, value, rates)
            if verdict is not None:
                expected, mark = verdict.expected, mark or verdict.mark
        # W5 counts what is missing in its goodput.
        mark = "incomplete" if incomplete and column.workload != "W5" else mark
    return Cell(value, len(used), mark, expected)


def _largest_of_each_round(rows: Sequence[Row], measure: str) -> list[Row]:
    """A row a round: the one whose number is largest."""
    largest: dict[int, Row] = {}
    for row in sorted(rows, key=lambda row: row[measure]):
        largest[row["round"]] = row
    return list(largest.values())


def _median(values: Iterable[float]) -> float:
    return statistics.median(list(values))


def _median_rates(rows: Sequence[Row]) -> dict[str, float]:
    kinds = rows[0]["gflop_per_s"]
    return {kind: _median(row["gflop_per_s"][kind] for row in rows) for kind in kinds}


def shown(column: Column, cell: Cell | None, absent: str = "-") -> str:
    """A cell as text: the number in the column's unit, then its mark."""
    if cell is None:
        return absent
    return f"{cell.value * column.factor:.{column.digits}f}{MARKS[cell.mark]}"


def used_columns(table: Table) -> list[Column]:
    """Columns of which any engine has a cell."""
    return [c for c in COLUMNS if any(c.key in row for row in table.cells.values())]


def render(table: Table, missing: Mapping[str, str]) -> str:
    """The table as text of at most 80 columns."""
    about = table.about
    lines = [
        f"{about['model']}, {about['precision']}, {about['num_threads']} threads, medians of "
        f"{about['num_rounds']}; commit {about['commit']}",
        f"{about['machine']}",
        rates_line(table),
        "",
    ]
    columns = used_columns(table)
    lines += [
        f"{'':15}" + "".join(f"{column.title:>8}" for column in columns),
        f"{'engine':15}" + "".join(f"{column.unit:>8}" for column in columns),
    ]
    for engine, row in table.cells.items():
        values = "".join(f"{shown(column, row.get(column.key)):>8}" for column in columns)
        lines.append(f"{engine:15}{values}")
    for rate in table.w5_rates:
        lines += ["", f"{f'W5, {rate:g} req/s':15}" + "".join(f"{c.title:>10}" for c in ONLINE)]
        lines.append(f"{'engine':15}" + "".join(f"{column.unit:>10}" for column in ONLINE))
        for engine, row in table.cells.items():
            cells = [shown(column, row.get(f"{column.key}@{rate:g}")) for column in ONLINE]
            if set(cells) != {"-"}:
                lines.append(f"{engine:15}" + "".join(f"{cell:>10}" for cell in cells))
    lines += ["", *(f"{engine}: {version}" for engine, version in table.versions.items())]
    lines += [f"{engine}: left out: {reason}" for engine, reason in missing.items()]
    return "\n".join([*lines, *mark_lines(table)])


def rates_line(table: Table) -> str:
    """What the machine did beside the runs, and the same of the reference's machine."""
    rates = table.about["gflop_per_s"]
    found = ", ".join(f"{kind} {value:.0f}" for kind, value in rates.items())
    return (
        f"read {table.about['read_gb_per_s']:.1f} GB/s, {found} GFLOP/s "
        f"(reference: {READ_GB_PER_S:.0f}; bf16 {GFLOP_PER_S['bf16']:.0f})"
    )


def mark_lines(table: Table) -> list[str]:
    """What the marks in the table mean, as far as there are any."""
    used = {cell.mark for row in table.cells.values() for cell in row.values()}
    percent = round(TOLERANCE * 100)
    meanings = {
        "incomplete": "requests without all of their tokens",
        "disturbed": "other programs used the processor during every run",
        "invalid": f"over {percent} % slower than the reference, scaled by bandwidth",
        "unproven": (
            f"over {percent} % slower than the reference, scaled to a processor without\n"
            "  bfloat16 instructions: W3 by bandwidth, the rest by the float32 rate"
        ),
    }
    lines = [f"{MARKS[mark]} {text}" for mark, text in meanings.items() if mark in used]
    if table.about["scale"] != 1.0:
        lines.append(f"A trial with workloads cut to {table.about['scale']:g}: shows nothing.")
    return lines
