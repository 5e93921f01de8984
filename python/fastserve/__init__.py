"""fastserve: serve a language model from Python, with the bookkeeping in Rust.

::

    from fastserve import LLM, SamplingParams

    with LLM("smollm2") as llm:
        print(llm.generate("The capital of France is", SamplingParams(max_tokens=8)))

Names are imported when they are first used, so that ``fastserve.core``, the scheduler alone, needs
no model.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fastserve._shadow import warn_of_other_distribution

if TYPE_CHECKING:
    from fastserve.async_engine import AsyncEngine
    from fastserve.engine import Engine
    from fastserve.errors import (
        ConfigError,
        EngineDeadError,
        FastserveError,
        KernelError,
        ModelError,
        RequestError,
    )
    from fastserve.llm import LLM
    from fastserve.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from fastserve.sampling_params import ParameterError, SamplingParams
    from fastserve.text.chat_template import ChatTemplateError

warn_of_other_distribution()

__all__ = [
    "LLM",
    "AsyncEngine",
    "ChatTemplateError",
    "CompletionOutput",
    "ConfigError",
    "Engine",
    "EngineDeadError",
    "FastserveError",
    "KernelError",
    "Logprob",
    "ModelError",
    "ParameterError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_HOME = {
    "LLM": "llm",
    "AsyncEngine": "async_engine",
    "ChatTemplateError": "text.chat_template",
    "CompletionOutput": "outputs",
    "ConfigError": "errors",
    "Engine": "engine",
    "EngineDeadError": "errors",
    "FastserveError": "errors",
    "KernelError": "errors",
    "Logprob": "outputs",
    "ModelError": "errors",
    "ParameterError": "sampling_params",
    "RequestError": "errors",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "__version__": "_core",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'fastserve' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fastserve.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
