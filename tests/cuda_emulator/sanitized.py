"""One launch under a sanitizer: ``python -m cuda_emulator.sanitized MODE KERNEL [NUMBER]``.

A sanitizer's library has to be there from the start of the process: this is one of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from cuda_emulator.module import EmulatedModule


def main() -> None:
    """Launch a kernel of ``planted.cu``, or ``attention``: a step with all of its kernels."""
    mode, name, *numbers = sys.argv[1:]
    if name == "attention":
        from cuda_attention import How, Shape, attend, make_rows

        shape = Shape("__nv_bfloat16", 64, 16, group=3)
        rows = make_rows(np.random.default_rng(0), shape, [(1, 300), (20, 70), (1, 5)])
        attend(shape, rows, How(mode=mode))
        return
    x = np.arange(64, dtype=np.float32)
    module = EmulatedModule(Path(__file__).with_name("planted.cu"), {}, mode)
    module.launch(name, 1, 64, [x, *map(np.int32, numbers)], shared_bytes=256)


if __name__ == "__main__":
    main()
