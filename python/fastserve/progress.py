"""Progress bars on stderr: shown on a terminal, or where they are asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

__all__ = ["Advance", "LoadingBar", "generating", "loading"]

Advance: TypeAlias = Callable[[int, int], None]
"""Called with what is done and what there is in all."""

LoadingBar: TypeAlias = bool | Advance | None
"""Show a bar or not, or the caller's own; ``None``: where stderr is a terminal."""


@contextmanager
def loading(name: str, show: LoadingBar = None) -> Iterator[Advance]:
    """A bar for reading weights, in bytes."""
    if callable(show):
        yield show
        return
    if not _shown(show):
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn

    with _bar(TextColumn("{task.description}"), BarColumn(), DownloadColumn()) as bar:
        task = bar.add_task(f"Loading {name}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def generating(num_requests: int, show: bool | None = None) -> Iterator[Advance]:
    """A bar for a batch: called with requests finished and tokens generated."""
    if not _shown(show):
        yield lambda finished, num_tokens: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[rate]}"),
    )
    with _bar(*columns) as bar:
        task = bar.add_task("Generating", total=num_requests, rate="")

        def advance(finished: int, num_tokens: int) -> None:
            elapsed = bar.tasks[task].elapsed
            rate = f"{num_tokens / elapsed:.0f} tokens/s" if elapsed else ""
            bar.update(task, completed=finished, rate=rate)

        yield advance


def _shown(show: bool | None) -> bool:
    return sys.stderr.isatty() if show is None else show


def _bar(*columns: ProgressColumn) -> Progress:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    # On a terminal it makes room for the answer; in a log it is one line at the end.
    return Progress(*columns, console=console, transient=console.is_terminal)
