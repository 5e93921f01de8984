"""Says so when another project's ``fastserve`` is installed in this package's place.

The name ``fastserve`` on the package index belongs to another project. Two distributions that share
an import name overwrite each other's files in silence: whichever was installed last has the front
page, ``fastserve/__init__.py``, and removing either tears holes into the other.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path


def check_front() -> None:
    """Refuse to work behind a front page that is not ours.

    Raises:
        ImportError: Another project's ``fastserve/__init__.py`` is there.
    """
    front = sys.modules["fastserve"]
    if not hasattr(front, "_HOME"):
        raise ImportError(
            f"{getattr(front, '__file__', 'fastserve')} is another project's; it took the place of "
            f"ours, which has the same import name; {_remedy()}"
        )


def warn_of_other_distribution() -> None:
    """Warn while another project's distribution shares our folder and we still have the front."""
    site_packages = Path(__file__).parent.parent
    for other in site_packages.glob("fastserve-*.dist-info"):
        warnings.warn(
            f"{other.name.removesuffix('.dist-info')} is another project's and shares our folder; "
            f"removing it later would break ours: {_remedy()}",
            RuntimeWarning,
            stacklevel=3,
        )


def _remedy() -> str:
    # Not from the extension, which imports `fastserve.errors`, which is where this may be asked.
    from importlib.metadata import packages_distributions

    sharing = packages_distributions().get("fastserve", [])
    ours = [name for name in sharing if name and name != "fastserve"] or ["this one"]
    return (
        f"`pip uninstall fastserve`, then install {ours[0]}'s wheel again with "
        "`pip install --force-reinstall`"
    )
