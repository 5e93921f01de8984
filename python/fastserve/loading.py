"""From the name of a model to what an engine needs: a runner and a tokenizer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from fastserve.config import EngineConfig
from fastserve.models.resolve import resolve
from fastserve.progress import LoadingBar, loading
from fastserve.runner import CpuRunner

if TYPE_CHECKING:
    from fastserve.text.tokenizer import Tokenizer

__all__ = ["load_model"]

logger = logging.getLogger("fastserve.loading")


def load_model(
    model: str | Path, config: EngineConfig, *, progress: LoadingBar = None
) -> tuple[CpuRunner, Tokenizer | None]:
    """Read a model's weights and its tokenizer.

    Args:
        model: A folder, a GGUF file, a hub id or ``smollm2``.
        config: What to compute in, and with how many threads.
        progress: Show a bar; by default where stderr is a terminal. A callable is the caller's own
            bar: it gets bytes done and bytes in all.

    Raises:
        ModelError: There is no such model, or it cannot be run.
    """
    source = resolve(model)
    tokenizer = None
    if not config.skip_tokenizer_init:
        from fastserve.text.tokenizer import Tokenizer

        tokenizer = Tokenizer.from_source(source)
    with loading(source.name, progress) as advance:
        runner = CpuRunner.load(
            source,
            dtype=config.dtype,
            kv_cache_dtype=config.kv_cache_dtype,
            quantization=config.quantization,
            num_threads=config.num_threads,
            progress=advance,
        )
    logger.info(
        "%s from %s, weights in %s, computed in %s, keys and values kept in %s",
        source.name,
        source.path,
        ", ".join(runner.weights.formats()),
        runner.dtype,
        runner.kv_dtype,
    )
    return runner, tokenizer
