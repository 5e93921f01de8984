"""What is not in the base install, and the one line that says how to get it."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["require_torch"]


def require_torch(who: str) -> None:
    """Say what to install where torch is missing.

    Raises:
        ImportError: torch is not installed; `who` needs it.
    """
    if find_spec("torch") is None:
        from fastserve._core import DISTRIBUTION

        raise ImportError(
            f"{who} needs torch, which is not installed; "
            f"install it with: pip install '{DISTRIBUTION}[torch]'"
        )
