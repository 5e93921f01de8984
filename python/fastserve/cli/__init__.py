"""``fastserve``: the command line. Parses, prints, exits; the work is on the floors below.

==== =========================================================================================
exit meaning
==== =========================================================================================
0    It did what was asked.
1    It could not: the device failed, the port is taken, an extra is missing.
2    It was asked wrongly: an unknown flag, a value out of range, a model that is not there.
130  Ctrl-C.
141  Whoever read the output went away (``fastserve generate … | head -1``).
==== =========================================================================================

An error is one line on stderr, ``error: …``, with the value, the limit and the remedy. A traceback
is a bug.
"""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from fastserve.cli.commands import app

__all__ = ["app", "main"]

INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command line and exit."""
    try:
        try:
            from fastserve.cli.commands import run  # Late: an early Ctrl-C is no traceback either.
        except ImportError as error:  # Another project's `fastserve`, or an install with a hole.
            sys.exit(f"error: {error}")

        code = run()
        sys.stdout.flush()
    except KeyboardInterrupt:
        # From here on another Ctrl-C kills at once, instead of interrupting the clean-up loudly.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        code = INTERRUPTED
    except BrokenPipeError:
        from fastserve.cli.console import reader_gone

        code = reader_gone()
    sys.exit(code)


def __getattr__(name: str) -> Any:
    if name == "app":
        from fastserve.cli.commands import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
