"""From rows to documents: a file of medians, the table in docs/peers.md, and the chart.

    make peers-report

takes the whole workloads (no trials) of the newest commit in results.jsonl, writes their medians to
docs/peers.json, and from that file alone the table between the marks in docs/peers.md. A test holds
the two together.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from peers.environments import Environments, run_logged
from peers.settings import PEERS
from peers.summary import (
    ONLINE,
    Cell,
    Column,
    Row,
    Table,
    mark_lines,
    rates_line,
    shown,
    tabulate,
    used_columns,
)

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "target" / "peers"
MEDIANS = REPOSITORY / "docs" / "peers.json"
DOCUMENT = REPOSITORY / "docs" / "peers.md"
CHART = REPOSITORY / "docs" / "peers.png"
RESULTS = ("<!-- results -->", "<!-- end of results -->")
SETTINGS = ("<!-- settings -->", "<!-- end of settings -->")
NOTHING = "Nothing was measured on a quiet machine yet."


def newest(rows: Sequence[Row]) -> list[Row]:
    """Rows of whole workloads of the commit and the machine that were measured last."""
    whole = [row for row in rows if row["scale"] == 1.0]
    if not whole:
        return []
    last = whole[-1]
    return [r for r in whole if (r["commit"], r["machine"]) == (last["commit"], last["machine"])]


def markdown(tables: Sequence[Table]) -> str:
    """What belongs between the marks in the document."""
    return "\n\n".join(map(_section, tables)) if tables else NOTHING


def _section(table: Table) -> str:
    about = table.about
    lines = [
        f"### {about['model']}, {about['precision']}",
        "",
        f"Commit {about['commit']}; {about['machine']}; {about['num_threads']} threads; medians of "
        f"{about['num_rounds']}; {rates_line(table)}.",
        "",
    ]
    used = used_columns(table)
    rows = [(engine, [row.get(c.key) for c in used]) for engine, row in table.cells.items()]
    lines += _grid("engine", used, [(name, cells) for name, cells in rows])
    for rate in table.w5_rates:
        online = [
            (engine, [row.get(f"{c.key}@{rate:g}") for c in ONLINE])
            for engine, row in table.cells.items()
        ]
        lines += ["", *_grid(f"W5, {rate:g}/s", ONLINE, [r for r in online if any(r[1])])]
    lines += ["", *(f"- {version}" for version in table.versions.values())]
    lines += [f"- {line}" for line in mark_lines(table)]
    return "\n".join(lines)


def _grid(
    head: str, columns: Sequence[Column], rows: Sequence[tuple[str, Sequence[Cell | None]]]
) -> list[str]:
    titles = " | ".join(f"{column.title} {column.unit}" for column in columns)
    lines = [f"| {head} | {titles} |", "|---" * (len(columns) + 1) + "|"]
    for name, cells in rows:
        values = (shown(c, cell, "–") for c, cell in zip(columns, cells, strict=True))
        lines.append(f"| {name} | {' | '.join(values)} |")
    return lines


def read_medians(path: Path) -> list[Table]:
    """The tables of a file of medians; none where there is no file."""
    if not path.exists():
        return []
    return [Table.from_json(data) for data in json.loads(path.read_text())]


def inserted(document: str, text: str, marks: tuple[str, str] = RESULTS) -> str:
    """The document with `text` between two marks.

    Raises:
        ValueError: It has no such marks.
    """
    begin, end = marks
    before, _, rest = document.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the document has no {begin} before {end}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def settings_table() -> str:
    """The settings in force, as Markdown."""
    lines = ["| engine | work | options | how |", "|---|---|---|---|"]
    for peer in PEERS.values():
        for setting in peer.settings:
            options = {**setting.options, **setting.environment} or "defaults"
            shown_options = f"`{json.dumps(options)}`" if setting.options else options
            work = ", ".join(setting.workloads)
            lines.append(f"| {peer.name} | {work} | {shown_options} | {setting.how} |")
    return "\n".join(lines)


def main() -> None:
    """Write medians, table and chart."""
    results = FOLDER / "results.jsonl"
    if not results.exists():
        raise SystemExit(f"peers: {results} is missing; `make bench-peers` writes it")
    tables = tabulate(newest([json.loads(line) for line in results.read_text().splitlines()]))
    if not tables:
        raise SystemExit(f"peers: {results} has trials only (--scale below 1)")
    MEDIANS.write_text(json.dumps([table.as_json() for table in tables], indent=1) + "\n")
    written = read_medians(MEDIANS)
    document = inserted(DOCUMENT.read_text(), settings_table(), SETTINGS)
    DOCUMENT.write_text(inserted(document, markdown(written)))
    environments = Environments(FOLDER, Path("python3"))
    script = Path(__file__).with_name("chart.py")
    run_logged(
        [environments.python("chart"), script, MEDIANS, CHART], environments.logs / "chart.log"
    )
    print(f"wrote {MEDIANS.name}, {DOCUMENT.name} and {CHART.name} in {MEDIANS.parent}")


if __name__ == "__main__":
    main()
