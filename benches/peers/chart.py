"""A picture of the medians: four panels, a bar for each engine.   chart.py MEDIANS.json OUT.png

Runs in an environment of its own (``requirements/chart.txt``) and reads plain data, so it imports
nothing of this package. The first table of the file is drawn.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

PANELS = (
    ("W1.tokens_per_s", "W1: 64 requests at once", "output tokens/s, more is better", 1.0, 0),
    ("W2.wall_s", "W2: 64 requests with a shared prefix, cold", "seconds, less is better", 1.0, 1),
    ("W3.itl_mean_s", "W3: one stream", "ms a token, less is better", 1e3, 1),
    ("W4.gap_worst_s", "W4: worst gap beside a prompt of 4,096", "ms, less is better", 1e3, 0),
)
OURS, THEIRS, DOUBTFUL = "#c2410c", "#64748b", "#cbd5e1"
INK = "#1e293b"


def draw(table: dict[str, Any], target: Path) -> None:
    """Draw one table."""
    panels = [p for p in PANELS if any(p[0] in row for row in table["cells"].values())]
    plt.rcParams.update({"font.size": 10, "text.color": INK, "axes.labelcolor": INK})
    figure, grid = plt.subplots(2, 2, figsize=(10, 6.2), dpi=150)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _panel(axes, table["cells"], panel)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    about = table["about"]
    figure.suptitle(
        f"{about['model']}, {about['precision']}, {about['num_threads']} threads", fontsize=13
    )
    rates = ", ".join(f"{kind} {rate:.0f} GFLOP/s" for kind, rate in about["gflop_per_s"].items())
    note = (
        f"{about['machine']}; read {about['read_gb_per_s']:.0f} GB/s, {rates}; commit "
        f"{about['commit']}; medians of {about['num_rounds']}"
    )
    if _is_doubtful(table):
        note += "\nPale bars are marked in the table: disturbed, incomplete or not comparable."
    figure.text(0.5, 0.012, note, ha="center", va="bottom", fontsize=8)
    figure.tight_layout(rect=(0, 0.055, 1, 1))
    figure.savefig(target)


def _panel(
    axes: Any, cells: dict[str, dict[str, Any]], panel: tuple[str, str, str, float, int]
) -> None:
    key, title, unit, factor, digits = panel
    bars = [(engine, row[key]) for engine, row in cells.items() if key in row]
    values = [cell["value"] * factor for _, cell in bars]
    colours = [
        DOUBTFUL if cell["mark"] else OURS if engine.startswith("fastserve") else THEIRS
        for engine, cell in bars
    ]
    places = range(len(bars))
    drawn = axes.barh(places, values, color=colours, height=0.68)
    axes.bar_label(drawn, [f"{value:,.{digits}f}" for value in values], padding=4, color=INK)
    axes.set_yticks(places, [engine for engine, _ in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, max(values) * 1.18)
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(unit, fontsize=9)
    axes.tick_params(left=False, labelsize=9, colors=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _is_doubtful(table: dict[str, Any]) -> bool:
    drawn = {panel[0] for panel in PANELS}
    return any(
        cell["mark"] for row in table["cells"].values() for key, cell in row.items() if key in drawn
    )


def main() -> None:
    """Read and draw."""
    source, target = map(Path, sys.argv[1:3])
    draw(json.loads(source.read_text())[0], target)


if __name__ == "__main__":
    main()
