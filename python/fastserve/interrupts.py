"""Ctrl-C between steps instead of in the middle of one.

Python raises ``KeyboardInterrupt`` wherever the main thread happens to be, which may be between two
halves of something that belongs together. During a step the signal is noted instead, and raised
when the step is over. A second Ctrl-C does not wait: it raises at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["deferred_interrupts"]


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Note Ctrl-C for the length of the block, and raise ``KeyboardInterrupt`` at its end.

    Does nothing outside the main thread, where Python delivers no signals, and where somebody has a
    handler of their own, which stays theirs.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    presses: list[int] = []

    def press(number: int, frame: FrameType | None) -> None:
        presses.append(number)
        if len(presses) > 1:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if presses:
        raise KeyboardInterrupt
